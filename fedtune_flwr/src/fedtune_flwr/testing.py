"""An in-process grid, so that strategies and client apps can be tested in milliseconds.

`FakeGrid` calls the `ClientApp` directly, with a context a node that lasts as long as the grid.
Messages can only be made inside `task_identity()`.
"""

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

# flwr's code for an exception inside a ClientApp.
_CLIENT_APP_RAISED = 100


@contextmanager
def task_identity(run_id: int = 1) -> Iterator[None]:
    """Sets the identity that `flwr.app.Message` asks for outside a run, and restores it."""
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:  # flwr before 1.41 asks for none
        yield
        return
    fields = ("_run_id", "_node_id", "_task_id")
    before = {name: getattr(TaskIdentity, name) for name in fields}
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, 1, 1
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(TaskIdentity, name, value)


class FakeGrid(Grid):
    """A grid whose nodes are calls of one `ClientApp` in this process.

    Args:
        app: the client app.
        num_nodes: how many nodes; their ids start at `first_id`.
        run_config: the run's configuration, as clients see it.
        first_id: id of the first node, which has partition 0.
        silent: ids of nodes that never answer.
        watch: called with every message and its reply (None for a silent node), after the client
            has answered.

    Attributes:
        contexts: the context of each node, by id.
    """

    def __init__(
        self,
        app: ClientApp,
        num_nodes: int,
        *,
        run_config: Mapping[str, Any] | None = None,
        first_id: int = 100,
        silent: Iterable[int] = (),
        watch: Callable[[Message, Message | None], None] | None = None,
    ) -> None:
        self.app = app
        self.silent = set(silent)
        self.watch = watch
        self.contexts = {
            first_id + i: Context(
                run_id=1,
                node_id=first_id + i,
                node_config={"partition-id": i, "num-partitions": num_nodes},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for i in range(num_nodes)
        }
        self._answers: dict[str, Message] = {}

    def set_run(self, run: Any) -> None:
        """Ignored: there is one run."""

    @property
    def run(self) -> Any:
        """None: there is no run record."""
        return None

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message, by the constructor that replaced this method."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Ids of all nodes, the silent ones too."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Runs the client on each message at once; returns ids to pull the replies by."""
        ids = []
        for message in messages:
            message_id = str(uuid.uuid4())
            message.metadata.__dict__["_message_id"] = message_id
            reply = self._answer(message)
            if self.watch is not None:
                self.watch(message, reply)
            if reply is not None:
                self._answers[message_id] = reply
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies to those messages, each once."""
        return [self._answers.pop(i) for i in message_ids if i in self._answers]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Replies in the order of the messages; silent nodes are simply missing."""
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message | None:
        node_id = message.metadata.dst_node_id
        if node_id in self.silent:
            return None
        try:
            return self.app(message, self.contexts[node_id])
        except Exception as error:  # as the runtimes do: reported, not raised
            reason = f"{type(error)}:<'{error}'>"
            return Message(Error(code=_CLIENT_APP_RAISED, reason=reason), reply_to=message)

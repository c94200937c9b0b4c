"""The client side: answering the profile query, and reading hyperparameters."""

import contextvars
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from ._errors import ConfigError
from ._metrics import allowed
from ._privacy import Noise
from ._space import Scalar
from ._wire import (
    ACTION,
    APPLIED_RECORD,
    METRICS_RECORD,
    PROFILE_KEY,
    REFERENCE_KEY,
    config_key,
    unpack_arrays,
)

log = logging.getLogger(__name__)

ProfileFn = Callable[[Message, Context], Mapping[str, float]]

# What `hparams` handed out while the current message is handled, for `FedTuneMod` to report.
_applied: contextvars.ContextVar["HParams | None"] = contextvars.ContextVar(
    "fedtune_applied", default=None
)


def fedtune_client(
    app: ClientApp, profile_fn: ProfileFn, *, noise: Noise | None = None
) -> ClientApp:
    """The same app, able to answer the server's profile query.

    Args:
        app: an app whose functions are registered with decorators.
        profile_fn: `profile_fn(message, context)` returns the metrics of this client, usually
            `profile(loader, model)`. `message.content["arrays"]` holds the reference model's
            arrays, to be loaded as a train function would.
        noise: adds local differential privacy. The noisy answer is kept in `context.state` and
            repeated, so that asking again reveals nothing more.

    Raises:
        ConfigError: the app was made from a `client_fn` and cannot register queries, or already
            has a query named "fedtune".
    """
    if not callable(profile_fn):
        raise ConfigError(f"profile_fn={profile_fn!r} must be a function of (message, context)")

    def answer(message: Message, context: Context) -> Message:
        record = _answer(profile_fn, noise, message, context)
        return Message(RecordDict({METRICS_RECORD: record}), reply_to=message)

    try:
        app.query(ACTION)(answer)
    except ValueError as error:
        raise ConfigError(
            f"app cannot answer the query {ACTION!r}: {str(error).strip().splitlines()[0]} "
            "For an app made from client_fn, pass mods=[FedTuneMod(profile_fn)] to ClientApp"
        ) from error
    return app


def _answer(
    profile_fn: ProfileFn, noise: Noise | None, message: Message, context: Context
) -> ConfigRecord:
    kept = context.state.config_records.get(METRICS_RECORD)
    if noise is not None and kept is not None:
        return kept
    values = allowed(profile_fn(message, context))
    if noise is not None:
        values = noise.apply(values)
    record = ConfigRecord(dict(values))
    if noise is not None:
        context.state[METRICS_RECORD] = record
    return record


class FedTuneMod:
    """A client mod that carries the metrics in a train reply, where queries cannot be answered.

    For apps made from `client_fn`, and apps whose other mods refuse queries (as Flower's local
    differential privacy does). Put it first: `ClientApp(client_fn, mods=[FedTuneMod(f), ...])`.
    It also reports what `hparams` handed out, so the server can tell that it was applied.

    Args:
        profile_fn: as for `fedtune_client`.
        noise: as for `fedtune_client`.
    """

    def __init__(self, profile_fn: ProfileFn, *, noise: Noise | None = None) -> None:
        if not callable(profile_fn):
            raise ConfigError(f"profile_fn={profile_fn!r} must be a function of (message, context)")
        self.profile_fn = profile_fn
        self.noise = noise

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Handles one message; everything but train messages passes untouched."""
        if not message.metadata.message_type.startswith("train") or not message.has_content():
            return call_next(message, context)
        metrics = self._metrics(message, context)
        token = _applied.set(None)
        try:
            reply = call_next(message, context)
            applied = _applied.get()
        finally:
            _applied.reset(token)
        if reply.has_error():
            return reply
        if metrics is not None:
            reply.content[METRICS_RECORD] = metrics
        if applied is not None:
            reply.content[APPLIED_RECORD] = applied.echo()
        return reply

    def _metrics(self, message: Message, context: Context) -> ConfigRecord | None:
        key = config_key(message.content)
        config = message.content.config_records.get(key) if key else None
        if config is None or not config.get(PROFILE_KEY):
            return None
        del config[PROFILE_KEY]
        packed = config.pop(REFERENCE_KEY, None)
        asked = message
        try:
            if isinstance(packed, bytes):
                # The profile function finds the reference where it would in a query.
                asked = Message(RecordDict({"arrays": unpack_arrays(packed)}), reply_to=message)
            return _answer(self.profile_fn, self.noise, asked, context)
        except Exception as error:
            # Training must go on without a profile; the server treats it as missing.
            log.warning("fedtune: profile failed, training goes on: %r", error)
            return None


class HParams(Mapping[str, Scalar]):
    """Hyperparameters for this client, by key or by attribute (`-` written `_`).

    Example:
        >>> hp = HParams({"lr": 0.1, "local-epochs": 2})
        >>> hp["local-epochs"], hp.local_epochs
        (2, 2)
    """

    def __init__(self, values: Mapping[str, Scalar]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Scalar:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        for key in (name, name.replace("_", "-")):
            if key in self._values:
                return self._values[key]
        raise AttributeError(f"no hyperparameter {name!r}; there are {', '.join(self._values)}")

    def __repr__(self) -> str:
        return f"HParams({self._values!r})"

    def echo(self) -> ConfigRecord:
        """A record for the train reply, under `"fedtune.applied"`: what was applied.

        `RecordDict({"arrays": ..., "metrics": ..., "fedtune.applied": hp.echo()})` lets the
        server warn when a client did not apply what it was sent.
        """
        return ConfigRecord(dict(self._values))


def hparams(message: Message, defaults: Mapping[str, Scalar]) -> HParams:
    """The hyperparameters in a train message, each of the type of its default.

    Args:
        message: the train message.
        defaults: every hyperparameter the client reads, with its value when the server sends
            none. A whole-number default takes whole numbers only.

    Raises:
        ConfigError: a value that was sent is not finite or not of the default's type.
    """
    key = config_key(message.content)
    config = message.content.config_records.get(key) if key else None
    values = {
        name: _typed(name, d if config is None else config.get(name, d), d)
        for name, d in defaults.items()
    }
    result = HParams(values)
    _applied.set(result)
    return result


def _typed(name: str, value: Any, default: Scalar) -> Scalar:
    wanted = type(default)
    if wanted in (bool, str):
        if isinstance(value, wanted):
            return value
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        if wanted is float:
            return float(value)
        if wanted is int and float(value).is_integer():
            return int(value)
    raise ConfigError(
        f"{name}={value!r} was sent; the client's default {default!r} asks for a finite "
        f"{wanted.__name__}"
    )

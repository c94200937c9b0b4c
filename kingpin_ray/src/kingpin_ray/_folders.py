"""Folders that one process writes at a time, and what a killed one left in them."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

try:
    import fcntl
except ImportError:  # Windows has no such lock: nothing is held there, and nothing swept
    fcntl = None  # type: ignore[assignment]

LOCKS = fcntl is not None
"""Whether this system can tell a folder in use from one that was left behind."""


def hold(folder: Path) -> int | None:
    """Returns a handle that keeps a folder to this process until it is closed; None if taken.

    The system lets go of it when the process ends in any way, so nothing stays locked after a
    crash, and no lock file stays either. Where there are no such locks (Windows, some network
    disks) the folder is not kept from others.

    Raises:
        OSError: the folder cannot be opened.
    """
    if fcntl is None:
        return os.open(os.devnull, os.O_RDONLY)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:  # a disk without locks
        return handle
    return handle


@contextmanager
def temporary_folder(prefix: str, base: str | None = None) -> Iterator[str]:
    """Yields a new folder that is removed at the end, after removing those of killed processes.

    Args:
        prefix: begins its name; used for nothing else.
        base: where it lies; None for the user's temporary folder.
    """
    base = base or tempfile.gettempdir()
    _sweep(Path(base), prefix)
    handle = None
    while handle is None:
        folder = tempfile.mkdtemp(prefix=prefix, dir=base)
        # Another process may have swept it away before it was held.
        with suppress(FileNotFoundError):
            handle = hold(Path(folder))
        if handle is not None and not os.path.isdir(folder):
            os.close(handle)
            handle = None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _sweep(base: Path, prefix: str) -> None:
    """Removes folders of this prefix, and of this user, that no living process holds."""
    if not LOCKS:
        return
    for folder in base.glob(f"{prefix}*"):
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            handle = hold(folder)
            if handle is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(handle)

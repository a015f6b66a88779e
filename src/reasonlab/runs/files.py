"""Where things lie in a run directory, and how files and directories come to be whole or absent.

Nothing is seen half-written under its final name: data goes to a sibling with a hidden temporary name, is
flushed to the disk and renamed. A full or unwritable disk is the user's to mend, so it becomes a `UserError`.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from reasonlab.errors import UserError

CACHE_VARIABLE = "REASONLAB_CACHE"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_UNWRITABLE = {
    errno.EACCES,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}


def rollouts_path(directory: Path, step: int) -> Path:
    return directory / "rollouts" / f"{step:06d}.jsonl.gz"


def experiences_path(directory: Path, step: int) -> Path:
    return directory / "experiences" / f"{step:06d}.jsonl.gz"


def evaluation_path(directory: Path, suite: str, step: int) -> Path:
    return directory / "evals" / f"{evaluation_prefix(suite)}{step:06d}.jsonl.gz"


def evaluation_prefix(suite: str) -> str:
    """How the names of a suite's files begin; quoted, so that a slash or an @ in the name does no harm."""
    return quote(suite, safe=" ") + "@"


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn the disk errors a user can mend, met while writing `path`, into a `UserError`; let others pass."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            remedy = "Free some space there, or choose another place"
            raise UserError(f"no space left to write {path} ({error.strerror})", remedy) from error
        if error.errno in _UNWRITABLE:
            raise UserError(f"cannot write {path} ({error.strerror})", "Choose another place") from error
        raise


def write_all(descriptor: int, data: bytes) -> None:
    """One `os.write`, repeated only if the system takes less than everything."""
    written = os.write(descriptor, data)
    while written < len(data):
        written += os.write(descriptor, memoryview(data)[written:])


def write_aside(path: Path, data: bytes) -> None:
    """Replace `path` by `data` in one stroke: after a crash it holds all the old bytes or all the new ones."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Not tempfile: its files are private to the user, and a run directory is often shared.
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                write_all(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_path(path.parent)


def replace_directory(tmp_dir: Path, final_dir: Path) -> None:
    """Make the finished `tmp_dir` appear as `final_dir` (same file system), whole and flushed to the disk.

    A directory already there is first renamed to a hidden sibling, and removed at the end. A crash between the
    two renames leaves no `final_dir`, with both versions whole beside it, but never a mixture of the two.
    """
    displaced = final_dir.with_name(f".{final_dir.name}.old")
    with explained(final_dir):
        try:
            for folder, _, names in os.walk(tmp_dir):
                for name in names:
                    sync_path(Path(folder, name))
                sync_path(Path(folder))
            final_dir.parent.mkdir(parents=True, exist_ok=True)
            _swap_in(tmp_dir, final_dir, displaced)
        except BaseException:
            shutil.rmtree(tmp_dir, ignore_errors=True)
            raise
        sync_path(final_dir.parent)
    shutil.rmtree(displaced, ignore_errors=True)


def _swap_in(tmp_dir: Path, final_dir: Path, displaced: Path) -> None:
    if not final_dir.exists():
        os.rename(tmp_dir, final_dir)
        return
    shutil.rmtree(displaced, ignore_errors=True)  # left by a crash; what is in place is newer
    os.rename(final_dir, displaced)
    try:
        os.rename(tmp_dir, final_dir)
    except BaseException:
        os.rename(displaced, final_dir)
        raise


def sync_path(path: Path) -> None:
    """Flush a file's bytes, or a directory's names, to the disk: power loss needs it, kill -9 does not."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_directory() -> Path:
    """Where things that can be made again are kept between commands."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "reasonlab")

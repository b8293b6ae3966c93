"""Crash-safe writing and reading of files that may be damaged: replacement, lines, locks and digests."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from verl_ext.console import warn
from verl_ext.errors import UserError, first_line_of

TEMPORARY = ".tmp"
"""Suffix of a file or directory that is not complete yet."""
GIB = 1 << 30
LATEST = 1e11
"""Upper bound of times in seconds since 1970 (year 5138); a later time means damage and may not convert to a date."""
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_DIGEST_CHUNK_BYTES = 1 << 22
_BLOCK_BYTES = 64 * 1024


# Atomic replacement


def replace_file(path: Path, lines: Iterable[str]) -> None:
    """Write pieces of UTF-8 text to a temporary file, flush it to disk, and rename it to `path`.

    Raises:
        OSError: the directory is missing, not writable, or full; `path` then keeps its old content.
    """
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name to write to; the file is renamed to `path` at the end of the block.

    Raises:
        OSError: the file cannot be renamed. After any failure, the temporary file is removed.
    """
    temporary = path.with_name(f"{path.name}{TEMPORARY}")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # the first failure is the one to report
            temporary.unlink()
        raise


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries to disk; without this, a power loss can undo a rename."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` into a `UserError` that names the file, `path` by default, and the reason.

    Raises:
        UserError: a file could not be written.
    """
    try:
        yield
    except OSError as error:
        raise write_error(path, error) from error


def write_error(path: Path, error: OSError) -> UserError:
    """Return the error of `write_errors`."""
    return UserError(f"cannot write {error.filename or path} ({error.strerror}); {write_remedy(error)}")


_MOVED = "its directory was moved or removed; move it back before you resume"
_REMEDIES = {
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "free disk space, or raise the quota",
    errno.EFBIG: "raise the limit on file sizes (`ulimit -f`)",
    errno.EROFS: "mount its file system writable before you resume",
    errno.ENOENT: _MOVED,
    errno.ESTALE: _MOVED,
    errno.EACCES: "make the directory and the file writable",
    errno.EPERM: "make the directory and the file writable",
}


def write_remedy(error: OSError) -> str:
    """How to fix an error of writing, for a message."""
    return _REMEDIES.get(error.errno or 0, "free disk space or make the directory writable")


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """Yield a directory in TMPDIR (by default, `/tmp`) that is removed at the end of the block.

    An abandoned thread may still write into it.

    Raises:
        UserError: it cannot be created.
    """
    with temporary_errors():
        directory = tempfile.TemporaryDirectory(prefix="verl_ext_", ignore_cleanup_errors=True)
    with directory as name:
        yield Path(name)


@contextmanager
def temporary_errors() -> Iterator[None]:
    """Turn an error of writing to a temporary file into a `UserError` that names TMPDIR.

    Raises:
        UserError: a file could not be written.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and type(error) is not Exception:  # tokenizers raises the latter
            raise
        place = tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")
        raise UserError(
            f"cannot write temporary files in {place} ({first_line_of(error)}); free space there, or set TMPDIR to a "
            "writable directory with free space"
        ) from error


# Documents that may be damaged or written by someone else

MAX_YAML_VALUES = 100_000
"""Maximum number of values in a YAML file after aliases are expanded."""


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON document.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def yaml_text(path: Path) -> str:
    """Read a YAML file, and refuse it if its aliases expand to too many values.

    Ten lines of nested aliases can expand to billions of values, which a parser would build one by one.

    Raises:
        OSError: the file cannot be read.
        UnicodeDecodeError: the file is not UTF-8.
        yaml.YAMLError: the file is malformed, or its aliases expand to too many values.
    """
    import yaml  # here, because few users of this module read YAML

    text = path.read_text(encoding="utf-8")
    if "*" not in text or "&" not in text:
        return text
    num_values_by_node: dict[int, int] = {}

    def num_values(node: yaml.Node | None) -> int:
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if id(node) not in num_values_by_node:  # an alias is the same node as its anchor
            pairs = node.value if isinstance(node, yaml.MappingNode) else [(item,) for item in node.value]
            num_values_by_node[id(node)] = 1 + sum(num_values(item) for pair in pairs for item in pair)
        return num_values_by_node[id(node)]

    try:
        total = num_values(yaml.compose(text, yaml.SafeLoader))
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply, or an alias contains itself") from None
    if total > MAX_YAML_VALUES:
        raise yaml.YAMLError(f"its aliases expand to more than {MAX_YAML_VALUES:,} values")
    return text


# Append-only files


class LineWriter:
    """Appends lines. Each line reaches the operating system before `write` returns, so a kill cannot lose it."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending; create it if it is missing.

        Raises:
            OSError: the file cannot be opened.
        """
        self._file = open(path, "ab", buffering=0)

    @classmethod
    def reopen(cls, path: Path, is_complete: Callable[[bytes], bool]) -> LineWriter:
        """Open `path` for appending, after repairing its end if a kill or a crash left it torn; see `drop_torn_tail`.

        Raises:
            OSError: the file cannot be read, repaired or opened.
        """
        if path.exists():
            drop_torn_tail(path, is_complete)
            _end_with_newline(path)
        return cls(path)

    def write(self, line: str) -> None:
        """Append a line, given without its newline.

        Raises:
            OSError: the disk is full or gone; part of the line may have been written.
        """
        data = line.encode() + b"\n"
        while data:  # an unbuffered write may accept fewer bytes than it was given
            data = data[self._file.write(data) :]

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def drop_torn_tail(path: Path, is_complete: Callable[[bytes], bool]) -> None:
    """Remove incomplete lines that a kill or a crash left at the end of `path`, with a warning.

    Args:
        is_complete: receives a line with its newline, if any.

    Raises:
        OSError: the file cannot be read or truncated.
    """
    with open(path, "r+b") as file:
        size = end = file.seek(0, 2)
        while end > 0:
            start = _start_of_last_line(file, end)
            if is_complete(_read_between(file, start, end)):
                break
            end = start
        if end < size:
            file.truncate(end)
            warn(f"{path} ended in the middle of a line; its last {size - end} bytes were removed")


def _end_with_newline(path: Path) -> None:
    """Add a newline to the end of `path` if it is missing."""
    with open(path, "r+b") as file:
        size = file.seek(0, 2)
        if size and _read_between(file, size - 1, size) != b"\n":
            file.write(b"\n")


def _start_of_last_line(file: BinaryIO, end: int) -> int:
    # read blocks backwards, because the file of a long run is far larger than its last line
    stop = end - 1  # the byte at `end - 1` may be the line's own newline
    while stop > 0:
        start = max(0, stop - _BLOCK_BYTES)
        newline = _read_between(file, start, stop).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        stop = start
    return 0


def _read_between(file: BinaryIO, start: int, end: int) -> bytes:
    file.seek(start)
    return file.read(end - start)


# Locks

RUN_LOCK = "run.lock"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def lock_file(file: TextIO, *, wait: bool) -> bool | None:
    """Lock a file that is open for writing; the kernel releases the lock when the file is closed or the process dies.

    Returns:
        Whether the file is locked; None, with a warning, if the file system has no locks (Lustre mounted without flock,
        some NFS).
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warn(
            f"{file.name} cannot be locked on this file system ({error.strerror}); make sure that no other process "
            "writes to it"
        )
        return None
    return True


@contextmanager
def file_lock(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a file, which is created if necessary; without `wait`, do not wait for another holder.

    Yields:
        Whether this process may continue: it holds the lock, or the file system does not support locks.

    Raises:
        UserError: the file cannot be created.
    """
    with write_errors(path):
        file = open(path, "a", encoding="utf-8")
    with file:
        yield lock_file(file, wait=wait) is not False


@contextmanager
def temporary_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock of a file that is removed at the end; a killed holder leaves an empty file without a lock.

    Args:
        on_wait: called if another process holds the lock, before waiting for it; may raise instead.

    Yields:
        Whether this is certainly the only holder; False if the file system does not support locks, see `lock_file`.

    Raises:
        OSError: the file cannot be created.
    """
    while True:
        with open(path, "a", encoding="utf-8") as file:
            locked = lock_file(file, wait=False)
            if locked is False:
                on_wait()
                locked = lock_file(file, wait=True)
            if locked and not _is_at(file, path):  # the previous holder removed it; others lock the file there now
                continue
            try:
                yield locked is True
            finally:
                with suppress(OSError):  # the file is harmless
                    path.unlink()
            return


def _is_at(file: TextIO, path: Path) -> bool:
    """Whether a path still names an open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def hold_run_lock(run_dir: Path, remedy: str = "wait for it, or stop it") -> Iterator[bool]:
    """Hold `run.lock` of a run directory; the file names the current holder.

    This works even on a disk without space for the name or the file, because `prune` must be able to free space there.

    Args:
        remedy: advice if another live launch holds the lock.

    Yields:
        Whether this is certainly the only launch; False if the file system does not support locks, see `lock_file`.

    Raises:
        UserError: another live launch holds the lock, or the file cannot be written.
    """
    path = run_dir / RUN_LOCK
    try:
        opened = path.open("a+")  # "w" would empty a live holder's file
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise write_error(path, error) from error
        # without the file, no launch can hold the lock
        warn(
            f"{path} cannot be created ({error.strerror}), so the run directory is not locked; do not start another "
            "launch in it"
        )
        yield True
        return
    with opened as file:
        locked = lock_file(file, wait=False)
        if locked is False:
            file.seek(0)
            raise UserError(f"{run_dir} is in use by {file.read().strip() or 'another launch'}; {remedy}")
        _write_holder(file, f"process {os.getpid()} on {socket.gethostname()}\n")
        try:
            yield locked is True
        finally:
            with suppress(UserError):  # an error of the block is more important
                _write_holder(file, "")  # before the release, so that the next holder's name is not lost


def is_run_locked(run_dir: Path) -> bool:
    """Whether another process holds `run.lock`, without creating or changing the file.

    False if the file is missing or cannot be read, or if the file system does not support locks.
    """
    try:
        with open(run_dir / RUN_LOCK, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def _write_holder(file: TextIO, name: str) -> None:
    """Write the lock's holder without buffering; on a full disk, the lock has no name."""
    try:
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), name.encode())
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise write_error(Path(file.name), error) from error


# Sizes, digests and places


def free_bytes(directory: Path) -> int:
    """Free space in bytes for a process without privileges."""
    return shutil.disk_usage(directory).free


def format_bytes(num_bytes: float) -> str:
    """A size in a suitable unit, such as `1.5 GiB`."""
    power = 0
    while num_bytes >= 1024 and power < len(UNITS) - 1:
        num_bytes, power = num_bytes / 1024, power + 1
    return f"{num_bytes:.1f} {UNITS[power]}" if power else f"{num_bytes:.0f} B"


def ignore_progress(num_bytes: int) -> None:
    """Progress callback that does nothing."""


def file_digest(path: Path, progress: Callable[[int], None] = ignore_progress) -> str:
    """The XXH3-128 digest of a file, in hexadecimal; calls `progress` with the size of each chunk in bytes.

    Raises:
        OSError: the file cannot be read.
    """
    import xxhash  # here, because the monitor runs on laptops without it

    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_DIGEST_CHUNK_BYTES):
            digest.update(chunk)
            progress(len(chunk))
    return digest.hexdigest()


def user_cache_dir() -> Path:
    """Cache directory, in `XDG_CACHE_HOME` or `~/.cache`; its files can be deleted at any time.

    Without a home directory, as in a container with a user ID that it does not know, it is in TMPDIR.

    Raises:
        UserError: there is no home directory, and another user could write to the one in TMPDIR.
    """
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"], "verl_ext")
    try:
        return Path.home() / ".cache/verl_ext"
    except RuntimeError:  # neither HOME nor an entry in the password file
        return _private_temporary_directory()


def _private_temporary_directory() -> Path:
    with temporary_errors():
        path = Path(tempfile.gettempdir(), f"verl_ext_{os.getuid()}")
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(f"HOME is not set, and other users can write to {path}; set HOME or XDG_CACHE_HOME")
    return path

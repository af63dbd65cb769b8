"""Files and folders that are there whole or not at all: written beside, brought to the disk, swapped into place.

``new_file`` and ``new_folder`` share one rule: whatever happens at whatever moment (an error, a full disk, SIGKILL, a
power cut), the old content stays until the new one is complete. What a killed process leaves behind is a hidden entry
beside the target, ``.<name>.unfinished-<pid>-<random>``; the next one to save under that name removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import BinaryIO

from murano.errors import ArtifactError

try:
    import fcntl
except ImportError:  # Windows: two writers still can't mix, as each has its own folder; the second is not refused
    fcntl = None  # type: ignore[assignment]


class Taken(ArtifactError):
    """The name is in use: there is something of that name, or another process is writing it."""


#: A folder that is no run is only taken over when it is small: nobody means to save a run over a project.
MAX_FOREIGN_FILES = 1000

#: File systems take 255; the folder is written beside under a name with a suffix.
MAX_NAME_BYTES = 200


def check_name(name: str, what: str) -> str:
    """The name of one folder or file below another, or an error if it would lead elsewhere.

    Raises:
        ArtifactError: it is empty, hidden, ``..``, too long, or has a separator or a control character in it.
    """
    bad = not isinstance(name, str) or not name.strip() or name.startswith(".") or re.search(r"[/\\\x00-\x1f]", name)
    if bad or (os.name == "nt" and ":" in name):
        raise ArtifactError(
            f"{what} {name!r:.80} can't be the name of a folder: use letters, digits, '-', '_' and '.'."
        )
    if (n_bytes := len(name.encode(errors="replace"))) > MAX_NAME_BYTES:
        raise ArtifactError(
            f"{what} {name[:20] + '…'!r} is too long: {n_bytes} bytes, where {MAX_NAME_BYTES} are allowed."
        )
    return name


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Write a file that replaces ``path`` when the block ends, and leaves nothing behind when it fails."""
    target = Path(os.path.realpath(path))
    with _folders(target.parent):
        temporary = _beside(target, "unfinished")
        try:
            with open(temporary, "x+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
            _sync_folder(target.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def new_folder(
    path: str | os.PathLike[str], owned: Callable[[Path], Collection[str] | None], *, replace: bool = True
) -> Iterator[Path]:
    """Fill a folder that replaces ``path`` when the block ends, and leaves nothing behind when it fails.

    Files of the old folder that are not its own (notes, figures that somebody put there) go on to the new one.

    Args:
        path: the folder; it is created if need be.
        owned: the files of a folder that belong to what is being replaced; ``None`` if it holds nothing of the kind.
        replace: whether there may be a folder of that name already.

    Raises:
        Taken: another process is writing the same folder, or it is there and must not be replaced.
        ArtifactError: it is a folder of something else.
        OSError: it can't be written.
    """
    target = Path(os.path.realpath(path))
    with _folders(target.parent), _lock(target) as locked:
        if locked:
            restore(target, locked=True)
            for left in _left_behind(target, "unfinished") + _left_behind(target, "previous"):
                _remove(left)
        if not replace and os.path.lexists(target):
            raise Taken(
                f"There is a {str(path)!r} already. Choose another run_name, or allow overwrite=True.", str(path)
            )
        _check_takeover(target, owned)
        temporary = _beside(target, "unfinished")
        try:
            temporary.mkdir()
            yield temporary
            if target.is_dir():
                shutil.copymode(target, temporary)
                _carry_over(target, temporary, owned(target) or ())
            _sync_tree(temporary)
            _swap(temporary, target, owned)
        finally:
            _remove(temporary)


def find(path: str | os.PathLike[str]) -> Path:
    """The folder ``path``, put back first if a writer was killed between moving the old one away and the new one in.

    Where it can't be put back (the disk is read-only), the folder that stands in for it is returned.
    """
    target = Path(os.path.realpath(path))
    if os.path.lexists(target):
        return Path(path)
    with contextlib.suppress(OSError, ArtifactError):
        restore(target)
    left = [] if os.path.lexists(target) else _left_behind(target, "previous")
    return left[0] if left else Path(path)


def restore(target: Path, *, locked: bool = False) -> None:
    """Put the previous folder back under its name, if a writer was killed before it moved the new one there."""
    if os.path.lexists(target) or not _left_behind(target, "previous"):
        return
    with contextlib.nullcontext() if locked else _lock(target):
        left = _left_behind(target, "previous")
        if left and not os.path.lexists(target):
            os.rename(left[0], target)
            _sync_folder(target.parent)


def is_unfinished(path: str | os.PathLike[str]) -> bool:
    """Whether a path is what a killed writer left behind."""
    return re.fullmatch(r"\..+\.(unfinished|previous)-\d+-[0-9a-f]{8}", Path(path).name) is not None


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{kind}-{os.getpid()}-{uuid.uuid4().hex[:8]}")


def _left_behind(target: Path, kind: str) -> list[Path]:
    """What killed writers left beside a folder, the newest first."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.{kind}-\d+-[0-9a-f]{{8}}")
    try:
        found = [entry for entry in os.scandir(target.parent) if pattern.fullmatch(entry.name)]
        found.sort(key=lambda entry: entry.stat(follow_symlinks=False).st_ctime_ns, reverse=True)
        return [Path(entry.path) for entry in found]
    except OSError:
        return []


def check_writable(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder that can't be written, before the work whose results are to go there; nothing is left behind.

    Raises:
        ArtifactError: naming the folder that is in the way.
    """
    path = Path(os.path.abspath(folder))
    nearest_there = next(p for p in (path, *path.parents) if os.path.lexists(p))
    try:
        with tempfile.TemporaryFile(dir=nearest_there):
            pass
    except OSError as error:
        raise ArtifactError(
            f"{os.fspath(folder)!r} can't be written: {error.strerror or error} ({nearest_there}). Name another folder."
        ) from None


@contextlib.contextmanager
def _folders(path: Path) -> Iterator[None]:
    """Make a folder and its parents; those that were made are removed again if the block fails and they are empty."""
    made = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for folder in made:
                folder.rmdir()
        raise


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[bool]:
    """Hold the right to write a folder. The system lets go of it when the process ends, however it ends.

    Yields:
        Whether it is really held; false where the file system or the system knows no locks.
    """
    path = target.with_name(f".{target.name}.lock")
    if fcntl is None:
        yield False
        return
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:
            owner = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(fd)
            raise Taken(
                f"{str(target)!r} is being written by {owner} at this moment. "
                "Wait until it is done, or choose another run_name.",
                str(target),
            ) from None
        except OSError:  # no locks on this file system
            held = False
        # Its holder may have removed the file between our opening it and locking it: then the lock is worth nothing.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                break
        os.close(fd)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield held
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(fd)


def _check_takeover(target: Path, owned: Callable[[Path], Collection[str] | None]) -> None:
    """Refuse to swap away what is no run: a file, the folder we are in, or a large folder of something else."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "there is a file of that name", str(target))
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, "the folder is read-only", str(target))
    if owned(target) is not None:
        return
    here = Path.cwd().resolve()
    count = 0
    for _, _, files in os.walk(target):
        count += len(files)
        if count > MAX_FOREIGN_FILES:
            break
    if count > MAX_FOREIGN_FILES or target == here or target in here.parents:
        raise ArtifactError(f"{str(target)!r} is no run and is in use for something else. Choose another run_name.")


def _carry_over(old: Path, new: Path, owned: Collection[str]) -> None:
    """Put the files of ``old`` that are not ``owned`` into ``new``, as hard links where that is possible."""
    for root, folders, files in os.walk(old):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        for name in (*files, *links):
            source = Path(root, name)
            relative = source.relative_to(old)
            copy = new / relative
            if relative.as_posix() in owned or os.path.lexists(copy):
                continue
            copy.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, copy, follow_symlinks=False)
            except OSError:
                shutil.copy2(source, copy, follow_symlinks=False)


def _swap(new: Path, target: Path, owned: Callable[[Path], Collection[str] | None]) -> None:
    """Put ``new`` where ``target`` is; what was there is removed, once ``new`` is in place."""
    if not os.path.lexists(target):
        os.rename(new, target)
    elif _exchange(new, target):
        _sync_folder(target.parent)
        with contextlib.suppress(OSError):  # what came into the old folder while it was being replaced
            _carry_over(new, target, owned(new) or ())
    else:
        previous = _beside(target, "previous")
        os.rename(target, previous)
        try:
            os.rename(new, target)
        except BaseException:
            os.rename(previous, target)
            raise
        _sync_folder(target.parent)
        _remove(previous)
    _sync_folder(target.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one indivisible step; false where the system or the file system can't."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        paths = (os.fsencode(one), os.fsencode(other))
        if sys.platform == "darwin":
            return bool(libc.renamex_np(*paths, 2) == 0)  # RENAME_SWAP
        return bool(libc.renameat2(-100, paths[0], -100, paths[1], 2) == 0)  # AT_FDCWD, RENAME_EXCHANGE
    except (OSError, AttributeError, TypeError):
        return False


def _remove(folder: Path) -> None:
    """Remove a folder, its manifest first, so that a half-removed run never looks whole."""
    with contextlib.suppress(OSError):
        (folder / "manifest.json").unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            path = os.path.join(root, name)
            if os.path.isfile(path) and not os.path.islink(path):
                _sync(path)
        _sync_folder(Path(root))


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # Windows can't open a folder
        return
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync files only
            raise


def _sync(path: str | Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

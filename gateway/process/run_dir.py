"""The directories of a node's ingress processes: metric files and registered regions, which nobody else may read or replace.

Ours are made with mode 0700. That alone does not help where somebody else may rename them, or had made them first: so each
directory on the way, and each symbolic link, must belong to us or to root, and only these may write to it. Others may write to
one with the sticky bit, such as /tmp: there nobody can rename what is not his.

Who serves holds a shared lock on the directory itself, which ends with the process: regions are forgotten where nobody has it,
and one that was made for a process, which a mark in it says, is removed.
"""

import contextlib
import fcntl
import grp
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gateway.errors import ConfigError

_FRESH: Final = "gateway-run-"
_MARK: Final = ".for-one-process"
_REMOVED_AT_ONCE: Final = 256
_LINKS_AT_MOST: Final = 40  # as the kernel
_MEMORY: Final = Path("/dev/shm")
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def make_run_dir(path: Path) -> Path:
    """Make the run_dir if it is not there, and its directory of metric files, which is returned. Raises: ConfigError."""
    run_dir = _existing(path, 0)
    if run_dir is None:
        run_dir = private_directory(path)
    else:
        _refuse_unless(os.stat(run_dir).st_uid == os.geteuid(), path, f"it belongs to user {os.stat(run_dir).st_uid}")
    return private_directory(run_dir / "metrics")


@contextlib.contextmanager
def fresh_run_dir() -> Iterator[Path]:
    """A run_dir for one process, removed at its end. Raises: ConfigError."""
    run_dir, held = new_run_dir()
    with held:
        yield run_dir


def new_run_dir() -> tuple[Path, contextlib.ExitStack]:
    """The same, and what removes it when it is closed. Those of processes that were killed are removed now.

    Raises: ConfigError.
    """
    above = _temporary()
    _remove_left(above)
    run_dir = Path(tempfile.mkdtemp(prefix=_FRESH, dir=above))
    held = hold_run_dir(run_dir)
    held.callback(shutil.rmtree, run_dir, ignore_errors=True)
    with contextlib.suppress(OSError):  # the disk is full: nobody removes it for us
        (run_dir / _MARK).touch()  # not before it is held: others remove what has it
    return run_dir, held


def _remove_left(above: Path) -> None:
    """Remove this user's fresh run_dirs that nobody holds, or some of them."""
    removed = 0
    for path in above.glob(f"{_FRESH}*"):
        removed += _removed(path)
        if removed == _REMOVED_AT_ONCE:
            return


def _removed(path: Path) -> bool:
    """Whether it was a fresh run_dir that nobody holds, and is removed."""
    with contextlib.suppress(OSError):  # somebody else's, or one that is held, or a user's own, without the mark
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.stat(_MARK, dir_fd=descriptor, follow_symlinks=False)
                shutil.rmtree(path, ignore_errors=True)
                return True
        finally:
            os.close(descriptor)
    return False


def shared_run_dir(name: str) -> Path:
    """Where the ingress processes of one user find each other on a node: the same for the same name, and not yet made.

    Raises: ConfigError.
    """
    return _temporary() / f"gateway-{os.geteuid()}" / name


def remove_shared_run_dir(name: str) -> None:
    """Remove what `shared_run_dir` names, if it was made and nobody else could have put something in its place."""
    with contextlib.suppress(ConfigError):
        path = shared_run_dir(name)
        above = _existing(path.parent, 0)
        if above is not None and os.stat(above).st_uid == os.geteuid():
            shutil.rmtree(above / path.name, ignore_errors=True)


def hold_run_dir(run_dir: Path) -> contextlib.ExitStack:
    """Keep what clients register here from `forget_regions`, until this is closed."""
    held = contextlib.ExitStack()
    with contextlib.suppress(OSError):  # a file system without locks
        descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
        held.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return held


def forget_regions(run_dir: Path) -> None:
    """Remove what was registered with servers that are gone, unless one that holds it lives."""
    try:
        descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # there is none
        return
    try:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
        for registered in (run_dir / "regions").glob("*"):
            with contextlib.suppress(OSError):
                registered.unlink()
    finally:
        os.close(descriptor)


def private_directory(path: Path) -> Path:
    """Make a directory with mode 0700, and those above it that are missing; or make sure of one that is there.

    Returns its path without symbolic links. Raises: ConfigError, if it cannot be made, is not ours, or others could put another
    in its place.
    """
    path = path.absolute()
    parent = _existing(path.parent, 0) or private_directory(path.parent)
    real = parent / path.name
    try:
        real.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as exc:
        raise ConfigError(f"server.run_dir: '{path}': cannot be made: {exc.strerror}") from exc
    status = real.lstat()
    _refuse_unless(not stat.S_ISLNK(status.st_mode), path, "it is a symbolic link")
    _refuse_unless(stat.S_ISDIR(status.st_mode), path, "it is no directory")
    _refuse_unless(status.st_uid == os.geteuid(), path, f"it belongs to user {status.st_uid}")
    if status.st_mode & _OTHERS:  # made by an operator, or an earlier version
        real.chmod(0o700)
    return real


def _existing(path: Path, links: int) -> Path | None:
    """A directory's path without symbolic links; None: there is none. Raises: ConfigError, if others could replace it."""
    path = path.absolute()
    if path == path.parent:
        return path
    parent = _existing(path.parent, links)
    if parent is None:
        return None
    real = Path(os.path.normpath(parent / path.name))
    try:
        status = real.lstat()
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise ConfigError(f"server.run_dir: '{path}': cannot be used: {exc.strerror}") from exc
    owner = status.st_uid
    _refuse_unless(_trusted(owner), path, f"it belongs to user {owner}, who could put another in its place")
    if stat.S_ISLNK(status.st_mode):
        _refuse_unless(links < _LINKS_AT_MOST, path, "too many symbolic links")
        return _existing(parent / real.readlink(), links + 1)
    _refuse_unless(stat.S_ISDIR(status.st_mode), path, "it is no directory")
    if not status.st_mode & stat.S_ISVTX:
        _refuse_unless(not status.st_mode & stat.S_IWOTH, path, "everyone can write to it and rename what is in it")
        shared = status.st_mode & stat.S_IWGRP and not _private(status.st_gid)
        _refuse_unless(not shared, path, f"group {status.st_gid} can write to it and rename what is in it")
    return real


def _temporary() -> Path:
    """Where this user may make directories that nobody else can rename. Raises: ConfigError."""
    try:
        usual = Path(tempfile.gettempdir())
    except FileNotFoundError:  # the root is read-only, and so is all else that may be written to as a rule
        if not os.access(_MEMORY, os.W_OK | os.X_OK):
            raise ConfigError(
                f"server.run_dir: null: none of /tmp, /var/tmp, {_MEMORY} and the current directory can be written to: "
                "expected a directory for some files of the process: set it, or the variable TMPDIR"
            ) from None
        usual = _MEMORY
    for candidate in (usual, _MEMORY):  # an empty volume that is mounted as /tmp has no sticky bit
        try:
            return _existing(candidate, 0) or usual
        except ConfigError as exc:
            fault = exc
    raise fault


def _trusted(user: int) -> bool:
    # In a user namespace root may have another number: whose / is.
    return user in (0, os.geteuid(), os.stat("/").st_uid)


def _private(group: int) -> bool:
    """Whether it is root's, or the group of one user that many systems make for each, by his name."""
    try:
        return group == 0 or grp.getgrgid(group).gr_name == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False


def _refuse_unless(good: bool, path: Path, fault: str) -> None:
    if not good:
        raise ConfigError(
            f"server.run_dir: '{path}': {fault}: expected a directory of this user, in one to which only this user or root can "
            "write, or everyone with the sticky bit as in /tmp"
        )

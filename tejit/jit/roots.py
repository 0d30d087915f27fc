"""Where compiled kernels are kept: the order of directories, who may be trusted, what can be written."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Collection
from typing import NamedTuple

from . import leftovers
from .errors import CacheDirError
from .settings import Settings

LAYOUT = "v1"
CHOOSE = "set TEJIT_CACHE_DIR to a directory of your own on a disk that programs may be loaded from"


class Root(NamedTuple):
    """A directory that holds, or could hold, cache entries."""

    path: str
    origin: str  # the setting it comes from

    @property
    def prebuilt(self) -> bool:
        return self.origin == "TEJIT_PREBUILT"

    @property
    def explicit(self) -> bool:
        return self.origin == "TEJIT_CACHE_DIR"

    @property
    def store(self) -> str:
        """The directory of the entries."""
        return os.path.join(self.path, LAYOUT)


class Unusable(Exception):
    """A root in which a build cannot be kept."""

    def __init__(self, reason: str, *, full: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.full = full


def roots(settings: Settings) -> list[Root]:
    """Every directory that is searched, in order. Nothing is created or written."""
    found = [Root(path, "TEJIT_PREBUILT") for path in settings.prebuilt]
    if settings.cache_dir:
        return [*found, Root(settings.cache_dir, "TEJIT_CACHE_DIR")]
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):
        found.append(Root(os.path.join(xdg, "tejit"), "XDG_CACHE_HOME"))
    home = os.path.abspath(os.path.expanduser("~"))
    if os.path.isdir(home):
        found.append(Root(os.path.join(home, ".cache", "tejit"), "HOME"))
    for folder in temporary_dirs():
        found.append(Root(os.path.join(folder, f"tejit-{os.getuid()}"), "TMPDIR"))
    return list({root.path: root for root in reversed(found)}.values())[::-1]


def temporary_dirs() -> list[str]:
    """Directories for temporary files, best first, found without the trial write of `tempfile.gettempdir`."""
    names = [os.environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")] + ["/tmp", "/var/tmp"]
    paths = (os.path.abspath(name) for name in names if name)
    return [path for path in dict.fromkeys(paths) if os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)]


def own_temporary() -> str | None:
    """This user's folder for locks and logs among the temporary files; None where there can be none."""
    try:
        return os.path.join(tempfile.gettempdir(), f"tejit-{os.getuid()}")
    except OSError:
        return None


def distrust(path: str, *, prebuilt: bool = False, follow: bool = False) -> str | None:
    """Why code in the directory `path` must not be loaded; None where it may.

    Args:
        prebuilt: root may own it too.
        follow: a symbolic link is as good as what it points to (only for a root, which the user names).

    Raises:
        OSError: it cannot be looked at; FileNotFoundError where there is none.
    """
    info = os.stat(path) if follow else os.lstat(path)
    if not stat.S_ISDIR(info.st_mode):
        return "it is no directory"
    return distrust_stat(info, prebuilt=prebuilt)


def distrust_stat(info: os.stat_result, *, prebuilt: bool = False) -> str | None:
    """`distrust` for what `os.stat` said of a file or directory."""
    own = os.getuid()
    if info.st_uid != own and not (prebuilt and info.st_uid == 0):
        return f"it is owned by uid {info.st_uid}, this process runs as uid {own}"
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return (
            f"others can write to it (mode {stat.S_IMODE(info.st_mode):04o}, owner uid {info.st_uid}, "
            f"this process runs as uid {own})"
        )
    return None


def is_noexec(path: str) -> bool:
    """Whether programs on the file system of `path` may not be run or loaded."""
    try:
        return bool(os.statvfs(path).f_flag & os.ST_NOEXEC)
    except OSError:
        return False


def mount_of(path: str) -> str:
    """The mount point that `path` lies on."""
    path = os.path.realpath(path)
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def distrust_root(root: Root) -> str | None:
    """Why nothing may be loaded from `root`; None where it may, or where it does not exist yet."""
    for path, follow in ((root.path, True), (root.store, False)):
        try:
            reason = distrust(path, prebuilt=root.prebuilt, follow=follow)
        except (FileNotFoundError, NotADirectoryError):
            # A link to nowhere is not "not there yet": nothing can be created in its place.
            return "it is a link to nothing" if os.path.islink(path) else None
        except OSError as error:
            return error.strerror or str(error)
        if reason:
            return reason if path == root.path else f"{path}: {reason}"
    if is_noexec(root.path):
        return f"the mount {mount_of(root.path)} is noexec, compiled kernels cannot be loaded from it"
    return None


def prepare(root: Root) -> None:
    """Make `root` ready to take an entry, proved by a trial write.

    Raises:
        Unusable: it cannot take one.
    """
    try:
        if root.origin == "HOME":
            # ~/.cache is everybody's: it gets the mode the user's umask gives it.
            os.makedirs(os.path.dirname(root.path), exist_ok=True)
        for path in (root.path, root.store):
            os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        # mkdir says "exists" of a file and "no such file" of a link to nothing: distrust_root words both.
        reason = None if is_full(error) else distrust_root(root)
        raise Unusable(reason or error.strerror or str(error), full=is_full(error)) from error
    reason = distrust_root(root)
    if reason:
        raise Unusable(reason)
    trial = os.path.join(root.store, leftovers.new_name(leftovers.TRIAL))
    try:
        os.mkdir(trial, 0o700)
        try:
            with open(os.path.join(trial, "file"), "wb") as out:
                out.write(bytes(4096))
                out.flush()
                os.fsync(out.fileno())
        finally:
            leftovers.remove(trial)
    except OSError as error:
        raise Unusable(error.strerror or str(error), full=is_full(error)) from error


def is_full(error: OSError) -> bool:
    """Whether an error says that the disk, the quota or the inodes are used up."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def explicit_error(root: Root, reason: str) -> CacheDirError:
    """The error for a TEJIT_CACHE_DIR that cannot be used."""
    try:
        owner = f"owner uid {os.stat(root.path).st_uid}"
    except OSError:
        owner = "it does not exist"
    return CacheDirError(
        f"TEJIT_CACHE_DIR={root.path} cannot be used: {reason} ({owner}, own uid {os.getuid()})",
        CHOOSE + ", or unset it",
    )


def choose(settings: Settings, avoid: Collection[str] = ()) -> tuple[Root | None, list[str]]:
    """The first root that can take a new entry, and what is worth saying about those before it.

    None: there is none; what is built serves this process only.

    Args:
        avoid: paths of roots that are known to take nothing more.

    Raises:
        CacheDirError: TEJIT_CACHE_DIR is set and cannot take it, for another reason than a full disk.
    """
    refused: list[str] = []
    for root in roots(settings):
        if root.prebuilt or root.path in avoid:
            continue
        try:
            prepare(root)
        except Unusable as unusable:
            if root.explicit and not unusable.full:
                raise explicit_error(root, unusable.reason) from unusable
            refused.append(f"{root.path} cannot hold compiled kernels: {unusable.reason}")
        else:
            return root, [f"{text}; {root.path} is used instead ({CHOOSE})" for text in refused]
    return None, [f"{text}; what is built serves this process only ({CHOOSE})" for text in refused]

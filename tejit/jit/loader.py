"""Loading: the host part into this process, the architecture parts for its GPUs, each found or built."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence

from . import gpus, interpreter
from .cache import Entry, find, move_aside
from .errors import CacheDirError, CacheError, KernelNotCached, TejitError, ToolchainError
from .messages import say, warn_once
from .parts import Part, device_part, host_part
from .roots import is_noexec, mount_of, roots
from .settings import ARCHS, Settings, arch_of, parse_archs, read_settings
from .sources import default_root

ABI = 1
_PartCallback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)


class _State:
    """What this process has loaded. One lock guards it: a second thread waits for the first one's build."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.settings: Settings | None = None  # set when `load` is through
        self.sources = ""
        self.library: ctypes.CDLL | None = None
        self.library_path: str | None = None
        self.host_error: TejitError | None = None
        self.parts: dict[int, TejitError | None] = {}  # by compute capability; None: registered
        self.paths: dict[int, str] = {}
        self.errors: dict[str, TejitError] = {}  # by key; a part that failed is not compiled again
        self.callback: Callable[[int], int] | None = None  # the host part keeps a pointer to it


_state = _State()


def _after_fork() -> None:
    # Another thread of the parent may have held it; that thread does not exist here.
    _state.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def load(sources: str | None = None) -> None:
    """Find or build the host part, load it, and register the architecture parts of the GPUs present.

    Called once by `import tejit`; further calls return at once. Missing tools and failed builds are warned of
    once and kept (`host_error`, `ensure_arch`); the reference computes then.

    Args:
        sources: root of the C++ and CUDA sources; None: the package's own.

    Raises:
        ValueError: TEJIT_COMPILE, TEJIT_BACKEND or TEJIT_ARCH holds something unknown.
        CacheDirError: TEJIT_CACHE_DIR is set and cannot be used.
        KernelNotCached: TEJIT_COMPILE=never and there is no entry for the host part.
        ToolchainError: a build has started this program, which it took for a Python interpreter.
    """
    with _state.lock:
        if _state.settings is not None:
            return
        interpreter.refuse_inside_a_build()
        settings = read_settings()
        _state.sources = sources or default_root()
        if settings.backend == "torch":
            _state.host_error = TejitError("TEJIT_BACKEND=torch: no kernels are loaded", "unset TEJIT_BACKEND")
        elif not sys.platform.startswith("linux"):
            _state.host_error = ToolchainError(
                f"kernels are compiled on Linux only, this is {sys.platform}", "the reference computes here"
            )
        else:
            _load_host(settings, build=settings.compile == "import")
        _state.settings = settings


def _load_host(settings: Settings, *, build: bool) -> None:
    """Load the host part, at import also the parts of the GPUs present; keep and warn of what fails."""
    try:
        host = host_part(_state.sources)
        archs = wanted_archs(settings) if settings.compile == "import" else ()
        parts = [host, *(device_part(_state.sources, arch, cuda_major()) for arch in archs)]
        found = _obtain(parts, settings, build=build)
        outcome = found.get(host.name)
        if outcome is None:
            return  # lazy, and not in the cache: `ensure_host` builds it
        if isinstance(outcome, TejitError):
            raise outcome
        _open_library(outcome, host, settings)
        _state.host_error = None
    except (KernelNotCached, CacheDirError):
        raise
    except TejitError as error:
        _host_failed(error)
        return
    except OSError as error:
        _host_failed(TejitError(f"loading the kernels failed: {error}", "`python -m tejit info` shows what is there"))
        return
    for part in parts[1:]:
        _settle(part, found.get(part.name))


def _host_failed(error: TejitError) -> None:
    _state.host_error = error
    warn_once(f"{error}\nthe kernels are not used, the slower reference computes")


def wanted_archs(settings: Settings) -> tuple[str, ...]:
    """Architectures to load at import: TEJIT_ARCH, else those of the GPUs present that have kernels."""
    if not cuda_major():
        return ()
    if settings.archs is not None:
        return settings.archs
    present = gpus.present(roots(settings))
    for cc in present:
        if arch_of(cc) is None:
            warn_once(_unsupported(cc).what + "; the slower reference computes there")
    return tuple(arch for arch in map(arch_of, present) if arch is not None)


def cuda_major() -> str:
    """Major version of the CUDA that torch was built with; "" for a build without."""
    import torch

    return (torch.version.cuda or "").split(".")[0]


def _unsupported(cc: int) -> ToolchainError:
    return ToolchainError(
        f"there are no kernels for GPUs of compute capability {cc // 10}.{cc % 10}; supported are {', '.join(ARCHS)}",
        "the reference computes there",
    )


def _obtain(
    parts: Sequence[Part], settings: Settings, *, build: bool, avoid: Sequence[str] = ()
) -> dict[str, Entry | TejitError]:
    """Look the parts up and build what is missing; by part name. Without `build`, a missing part is left out.

    Raises:
        CacheDirError: TEJIT_CACHE_DIR is set and cannot be used.
    """
    where = roots(settings)
    results: dict[str, Entry | TejitError] = {}
    missing = []
    for part in parts:
        found = find(where, part, avoid)
        to_build = build and found.entry is None and part.key not in _state.errors and settings.compile != "never"
        for path, reason in found.skipped:
            # A build says itself which of its own directories it cannot use.
            if not to_build or path in settings.prebuilt:
                warn_once(f"the cache directory {path} is skipped: {reason}")
        if found.entry is not None:
            results[part.name] = found.entry
        elif part.key in _state.errors:
            results[part.name] = _state.errors[part.key]
        elif settings.compile == "never":
            results[part.name] = _not_cached(part, [root.path for root in where], found.damaged)
        elif to_build:
            missing.append((part, found))
    if missing:
        from .build import build as build_parts
        from .errors import CompileError

        built = build_parts(missing, settings, avoid)
        for part, _ in missing:
            outcome = built[part.name]
            if isinstance(outcome, CompileError):
                _state.errors[part.key] = outcome
            results[part.name] = outcome
    return results


def _not_cached(part: Part, where: Sequence[str], damaged: Sequence[tuple[str, str]]) -> KernelNotCached:
    details = [f"{folder}: {reason}" for folder, reason in damaged]
    arch = f" --arch {part.arch}" if part.arch else ""
    return KernelNotCached(
        f"TEJIT_COMPILE=never, and no entry {part.key[:16]} for {part.label} in {', '.join(where) or 'any directory'}",
        f"fill the cache with `python -m tejit warm{arch}`, or unset TEJIT_COMPILE",
        details=details,
    )


def _open_library(entry: Entry, host: Part, settings: Settings) -> None:
    """dlopen the host part; an entry that cannot be loaded is moved aside and built once more."""
    try:
        library = _dlopen(entry)
    except (OSError, AttributeError) as error:
        if is_noexec(entry.folder):
            raise CacheError(
                f"the mount {mount_of(entry.folder)} is noexec, {entry.file} cannot be loaded from it",
                "set TEJIT_CACHE_DIR to a directory from which programs may be loaded",
            ) from error
        if settings.compile == "never":
            raise KernelNotCached(
                f"TEJIT_COMPILE=never, and {entry.file} cannot be loaded: {error}",
                "fill the cache again with `python -m tejit warm`, or unset TEJIT_COMPILE",
            ) from error
        say(f"{entry.file} cannot be loaded ({error}): it is built again", quiet=settings.quiet)
        if entry.root is not None and not entry.root.prebuilt:
            try:
                move_aside(entry.folder)
            except OSError:
                pass
        again = _obtain([host], settings, build=True, avoid=[entry.folder])[host.name]
        if isinstance(again, TejitError):
            raise again from error
        try:
            entry, library = again, _dlopen(again)
        except (OSError, AttributeError) as second:
            raise CacheError(
                f"{again.file} was built here and cannot be loaded: {second}",
                "`python -m tejit info` shows the tools in use; torch 2.11 or newer is needed",
                os.path.join(again.folder, "build.log"),
            ) from second
    callback = _PartCallback(_part_wanted)
    library.tejit_set_part_callback(callback)
    _state.callback, _state.library, _state.library_path = callback, library, entry.file


def _dlopen(entry: Entry) -> ctypes.CDLL:
    library = ctypes.CDLL(entry.file)
    library.tejit_abi.restype = ctypes.c_int
    library.tejit_register_part.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int]
    library.tejit_register_part.restype = ctypes.c_int
    library.tejit_set_part_callback.argtypes = [_PartCallback]
    library.tejit_set_part_callback.restype = None
    library.tejit_last_error.restype = ctypes.c_char_p
    if library.tejit_abi() != ABI:
        raise OSError(f"its ABI is {library.tejit_abi()}, not {ABI}")
    return library


def _part_wanted(cc: int) -> int:
    """Called by the host part, from any thread, when an op meets a device without a part."""
    try:
        return 1 if ensure_arch(cc) is not None else 0
    except KeyboardInterrupt:
        # Nothing may be raised into C++: the interrupt goes on when the op is back in Python.
        again = threading.Timer(0.01, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        again.daemon = True
        again.start()
        return 1
    except BaseException:
        return 1


def _settle(part: Part, outcome: Entry | TejitError | None) -> TejitError | None:
    """Register an architecture part, or keep and warn of its error."""
    assert _state.library is not None
    if isinstance(outcome, Entry):
        status = _state.library.tejit_register_part(part.cc, os.fsencode(outcome.file), int(outcome.is_cubin))
        if status == 0:
            _state.parts[part.cc] = None
            _state.paths[part.cc] = outcome.file
            return None
        reason = (_state.library.tejit_last_error() or b"").decode("utf-8", "replace")
        outcome = TejitError(f"{outcome.file} cannot be used for {part.label}: {reason or status}")
    if outcome is not None:
        _state.parts[part.cc] = outcome
        if not isinstance(outcome, KernelNotCached):
            warn_once(f"{outcome}\nthe slower reference computes on {part.label}")
    return outcome


def is_loaded() -> bool:
    """Whether the host part is loaded, so that ops run kernels."""
    return _state.library is not None


def host_error() -> TejitError | None:
    """Why the host part is not loaded; None where it is, or where nothing has failed yet."""
    return _state.host_error


def loaded_path() -> str | None:
    """The file of the host part that is loaded."""
    return _state.library_path


def ensure_host() -> TejitError | None:
    """Load the host part at first use (TEJIT_COMPILE=lazy), built where needed; return its error."""
    with _state.lock:
        settings = _state.settings
        if _state.library is None and _state.host_error is None and settings is not None:
            try:
                _load_host(settings, build=True)
            except CacheDirError as error:
                _host_failed(error)
        return _state.host_error


def host_pending() -> bool:
    """Whether `ensure_host` has still to build the host part (TEJIT_COMPILE=lazy, nothing in the cache)."""
    return _state.library is None and _state.host_error is None and _state.settings is not None


def ensure_arch(cc: int) -> TejitError | None:
    """Find or build the part for compute capability `cc` (10 * major + minor) and register it.

    Returns:
        None when its kernels can be launched; else why not, the same error each time. `KernelNotCached`
        (TEJIT_COMPILE=never) is meant to be raised by the op that met the device.
    """
    if _state.parts.get(cc, _state) is None:
        return None
    with _state.lock:
        settings = _state.settings
        if settings is None or _state.library is None:
            return _state.host_error or TejitError("the kernels are not loaded", "call tejit.jit.load() first")
        if cc in _state.parts:
            return _state.parts[cc]
        arch = arch_of(cc)
        if arch is None:
            error = _unsupported(cc)
        elif not cuda_major():
            error = ToolchainError("this torch is built without CUDA", "install a CUDA build of torch")
        else:
            part = device_part(_state.sources, arch, cuda_major())
            try:
                outcome: Entry | TejitError = _obtain([part], settings, build=True)[part.name]
            except TejitError as problem:
                outcome = problem
            return _settle(part, outcome)
        _state.parts[cc] = error
        warn_once(f"{error.what}; the slower reference computes there")
        return error


def warm(archs: str | Sequence[str] | None = None, sources: str | None = None) -> dict[str, str]:
    """Build what is missing in the cache and, in a process that wanted it at import, load it.

    Args:
        archs: architectures such as "90a" or ["90a", "100a"]; None: TEJIT_ARCH, else the GPUs present.
            On a build of torch without CUDA only the host part is built.
        sources: root of the C++ and CUDA sources; None: the package's own.

    Returns:
        The file of each part, by its name ("host", "sm_90a"); nothing under TEJIT_BACKEND=torch.

    Raises:
        ValueError: an architecture is unreadable or has no kernels.
        TejitError: a part cannot be built, the same error as was warned of at import (`KernelNotCached` under
            TEJIT_COMPILE=never).
    """
    with _state.lock:
        settings = read_settings()
        if settings.backend == "torch":
            return {}
        if not sys.platform.startswith("linux"):
            raise ToolchainError(
                f"kernels are compiled on Linux only, this is {sys.platform}", "the reference computes here"
            )
        wanted = parse_archs(archs, "archs") if archs else wanted_archs(settings)
        if not cuda_major():
            wanted = ()
        root = sources or _state.sources or default_root()
        parts = [host_part(root), *(device_part(root, arch, cuda_major()) for arch in wanted)]
        found = _obtain(parts, settings, build=True)
        for part in parts:
            outcome = found[part.name]
            if isinstance(outcome, TejitError):
                raise outcome
        entries = {name: entry for name, entry in found.items() if isinstance(entry, Entry)}
        if _state.settings is not None:
            if _state.library is None:
                _open_library(entries[parts[0].name], parts[0], settings)
                _state.host_error = None
            for part in parts[1:]:
                if _state.parts.get(part.cc, part) is not None:
                    error = _settle(part, entries[part.name])
                    if error is not None:
                        raise error
        return {name: entry.file for name, entry in entries.items()}

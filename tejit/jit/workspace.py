"""The private directory of one build: sources, wrappers, the child's request, what its log says."""

from __future__ import annotations

import atexit
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from typing import Any

from . import cache
from .cache import Entry
from .errors import CacheError, CompileError, TejitError, ToolchainError
from .parts import Part
from .roots import Root, distrust, is_noexec, mount_of, temporary_dirs
from .toolchain import Compiler, Nvcc, clean_environment, find_static_cudart

_PREFIX = "tejit-build-"
_STALE = 3600.0
# ninja and the shell read these in a path; torch escapes spaces only.
_UNSAFE = re.compile(r"[$:|\n\\]")
# Each would be ambiguous for the linker, to which torch passes its own folder unquoted.
_UNQUOTED = re.compile(r"[^\w./+@,=-]")
_ERROR_LINE = re.compile(r"\berror\b|\bfatal\b|undefined reference|cannot find -l", re.IGNORECASE)
_KILLED = re.compile(
    r"Killed signal terminated|died due to signal 9|signal 9\b|Killed \(program|\bKilled$", re.MULTILINE
)


class Workspace:
    """A new directory, on a disk from which programs can be loaded, for the compilation of one part."""

    def __init__(self, part: Part, root: Root | None) -> None:
        self.part = part
        self.folder = _make_folder(root)
        self.log = os.path.join(self.folder, cache.LOG)
        self._output = os.path.join(self.folder, "out")
        self._name = f"tejit_{part.name}"

    @property
    def built(self) -> str:
        """Where the compiled library will lie."""
        return os.path.join(self._output, f"{self._name}.so")

    def fill(self, compiler: Compiler, nvcc: Nvcc | None, ninja: str) -> tuple[list[str], dict[str, str]]:
        """Write everything the child needs; return its command and environment."""
        if not sys.executable:
            raise ToolchainError(
                "sys.executable is empty: without a Python interpreter nothing can be built",
                "fill the cache beforehand with `python -m tejit warm`",
            )
        for name in ("out", "bin", "lib", "tmp"):
            os.mkdir(os.path.join(self.folder, name), 0o700)
        source = os.path.join(self.folder, "src")
        self.part.sources.write_to(source)
        ldflags = ["-Wl,--as-needed", "-s"]
        env = clean_environment()
        env.update(
            PATH=os.pathsep.join([ninja, env.get("PATH", os.defpath)]),
            CXX=self._wrapper("cxx", compiler.command),
            # Temporary files of a killed compiler go with this directory.
            TMPDIR=os.path.join(self.folder, "tmp"),
            MAX_JOBS="1",
            OMP_NUM_THREADS="1",
            CUDA_VISIBLE_DEVICES="",
            TORCH_NO_COMPILER_WRAPPER="1",
            TORCH_DONT_CHECK_COMPILER_ABI="1",
        )
        cuda_flags: list[str] = []
        if nvcc is not None:
            os.symlink(nvcc.root, os.path.join(self.folder, "cuda"))
            env["CUDA_HOME"] = os.path.join(self.folder, "cuda")
            env["PYTORCH_NVCC"] = self._wrapper("nvcc", (nvcc.path,))
            cuda_flags = [*self.part.flags, f"-ccbin={env['CXX']}"]
            ldflags += self._cudart(nvcc)
        request = {
            "folder": self.folder,
            "name": self._name,
            "unit": f'#include "{self.part.sources.unit}"\n',
            "cuda": nvcc is not None,
            "cflags": list(self.part.flags) if nvcc is None else [],
            "cuda_cflags": cuda_flags,
            "ldflags": ldflags,
            "include": [source],
            "output": self._output,
            "torch_link": self._torch_link(),
            "sys_path": [path for path in sys.path if path],
        }
        path = os.path.join(self.folder, "request.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(request, file)
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "child.py")
        return [sys.executable, "-I", "-X", "utf8", script, path], env

    def _wrapper(self, name: str, command: tuple[str, ...]) -> str:
        # One plain word, whatever the compiler's path and number of words: torch versions quote differently.
        path = os.path.join(self.folder, "bin", name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        os.chmod(path, 0o700)
        return path

    def _cudart(self, nvcc: Nvcc) -> list[str]:
        # torch always adds -lcudart. The static library is linked by its path; an empty archive of that name
        # will do then, and pip's toolkit, which has no libcudart.so, links as well.
        static, shared = find_static_cudart(nvcc)
        library = os.path.join(self.folder, "lib", "libcudart")
        if static is not None:
            os.symlink(static, f"{library}_static.a")
            with open(f"{library}.a", "wb") as file:
                file.write(b"!<arch>\n")
            link = [f"{library}_static.a", "-Wl,--exclude-libs,ALL", "-ldl", "-lrt", "-lpthread"]
        elif shared is not None:
            os.symlink(shared, f"{library}.so")
            link = []
        else:
            raise ToolchainError(
                f"the toolkit at {nvcc.root} has no cudart library",
                "install the whole toolkit, or point TEJIT_NVCC at another one",
            )
        return [f"-L{os.path.dirname(library)}", *link]

    def _torch_link(self) -> str | None:
        import torch

        folder = os.path.dirname(os.path.abspath(str(torch.__file__)))
        if not _UNQUOTED.search(folder):
            return None
        link = os.path.join(self.folder, "torch")
        os.symlink(folder, link)
        return link

    def read_log(self) -> str:
        """What the compilers said."""
        try:
            with open(self.log, encoding="utf-8", errors="replace") as file:
                return file.read()
        except OSError:
            return ""

    def keep_log(self, root: Root | None) -> str | None:
        """Copy the log to where it outlives this directory, and return that path."""
        folders = [root.path] if root is not None else []
        folders.append(os.path.join(tempfile.gettempdir(), f"tejit-{os.getuid()}"))
        for folder in folders:
            target = os.path.join(folder, "logs")
            path = os.path.join(target, f"{self.part.name}-{self.part.key[:16]}.log")
            try:
                os.makedirs(target, mode=0o700, exist_ok=True)
                if distrust(target) is None:
                    shutil.copyfile(self.log, f"{path}.{os.getpid()}")
                    os.replace(f"{path}.{os.getpid()}", path)
                    return path
            except OSError:
                continue
        return None

    def remove(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _make_folder(root: Root | None) -> str:
    noexec: list[str] = []
    failed: list[str] = []
    for base in [*temporary_dirs(), "/dev/shm", *([root.store] if root is not None else [])]:
        if _UNSAFE.search(base) or not os.path.isdir(base):
            continue
        if is_noexec(base):
            noexec.append(mount_of(base))
            continue
        _sweep(base)
        try:
            folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base)
        except OSError as error:
            failed.append(f"{base}: {error.strerror or error}")
            continue
        return folder
    reasons = failed + [f"the mount {mount} is noexec" for mount in dict.fromkeys(noexec)]
    raise CacheError(
        f"no temporary directory to compile in ({'; '.join(reasons) or 'none exists'})",
        "set TMPDIR, and TEJIT_CACHE_DIR, to writable directories from which programs may be run",
    )


def _sweep(base: str) -> None:
    """Remove what builds left that were killed together with their parent."""
    try:
        names = [name for name in os.listdir(base) if name.startswith(_PREFIX)]
    except OSError:
        return
    for name in names:
        path = os.path.join(base, name)
        pid = name[len(_PREFIX) :].split("-")[0]
        try:
            if time.time() - os.lstat(path).st_mtime < _STALE or distrust(path) is not None:
                continue
        except OSError:
            continue
        if not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(path, ignore_errors=True)


def keep_private(built: str, log: str, manifest: dict[str, Any], part: Part) -> Entry:
    """Keep a library for this process alone, until it ends.

    Raises:
        CacheError: there is no place even for that.
    """
    reasons = []
    for base in [*temporary_dirs(), "/dev/shm"]:
        if is_noexec(base):
            reasons.append(f"{base}: the mount {mount_of(base)} is noexec")
            continue
        try:
            folder = tempfile.mkdtemp(prefix=f"tejit-private-{os.getpid()}-", dir=base)
            atexit.register(_remove_own, folder, os.getpid())
            cache._copy(built, os.path.join(folder, str(manifest["file"])))
            cache._copy(log, os.path.join(folder, cache.LOG))
            cache.write_file(os.path.join(folder, cache.MANIFEST), json.dumps(manifest).encode())
            return cache.open_entry(folder, part, None)
        except (OSError, cache.Damaged) as error:
            reasons.append(f"{base}: {error}")
    raise CacheError(
        f"{part.label} is compiled but there is no place for it ({'; '.join(reasons)})",
        "free some space, or set TEJIT_CACHE_DIR to a directory on another disk",
    )


def _remove_own(folder: str, owner: int) -> None:
    # A forked child runs this too when it ends; the file may still serve its parent.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def explain_failure(part: Part, status: int, space: Workspace, log: str | None) -> TejitError:
    """The error for a child that failed, from its exit status and its log."""
    text = space.read_log().replace(space.folder + os.sep, "")
    if status == -9 or _KILLED.search(text):
        memory = free_memory()
        left = f", {memory / 1e9:.1f} GB of memory are free now" if memory is not None else ""
        return CompileError(
            f"the compiler for {part.label} was killed by signal 9{left}",
            "memory ran out, most likely: set MAX_JOBS=1, or give this process more memory",
            log,
        )
    lines = [line.strip() for line in text.splitlines()]
    errors = [line for line in lines if _ERROR_LINE.search(line) and not line.startswith(("/bin/sh", "exec "))]
    shown = (errors or [line for line in lines if line])[:10] if errors else [line for line in lines if line][-10:]
    how = f"signal {-status}" if status < 0 else f"exit {status}"
    return CompileError(
        f"the kernels for {part.label} do not compile ({how})",
        "the log below holds the compiler's whole output; `python -m tejit info` shows the tools in use",
        log,
        shown,
    )


def free_memory() -> int | None:
    """Bytes of memory that can still be had, by the kernel and by the control group; None where unknown."""
    amounts = []
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            match = re.search(r"^MemAvailable:\s*(\d+) kB", file.read(), re.MULTILINE)
        if match:
            amounts.append(int(match[1]) << 10)
    except OSError:
        pass
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            with open(limit, encoding="ascii") as file:
                most = int(file.read())
            with open(used, encoding="ascii") as file:
                amounts.append(max(0, most - int(file.read())))
        except (OSError, ValueError):
            continue
    return min(amounts) if amounts else None

"""The private directory of one build: sources, wrappers, the child's request, what its log says."""

from __future__ import annotations

import atexit
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Collection
from typing import Any

from . import cache, interpreter, leftovers
from .cache import Entry
from .errors import CacheError, CompileError, TejitError, ToolchainError
from .nvrtc import options
from .parts import Part
from .roots import Root, distrust, is_full, is_noexec, mount_of, own_temporary, temporary_dirs
from .toolchain import Compiler, Nvcc, clean_environment, find_static_cudart

CHILD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "child.py")
# What may stand unquoted in ninja's file and in a shell: releases of torch differ in what they quote.
_PLAIN = re.compile(r"[\w./+@,=-]*")
_ERROR_LINE = re.compile(r"\berror\b|\bfatal\b|undefined reference|cannot find -l", re.IGNORECASE)
_LONGEST = 300
_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_KILLED = re.compile(
    r"Killed signal terminated|died due to signal 9|signal 9\b|Killed \(program|\bKilled$", re.MULTILINE
)


class Workspace:
    """A new directory, on a disk from which programs can be loaded, for the compilation of one part.

    Args:
        root: whose disk is the last one tried; None: there is none.
        full: directories on which a compiler ran out of space.

    Raises:
        CacheError: there is no place for one.
    """

    def __init__(self, part: Part, root: Root | None, full: Collection[str] = ()) -> None:
        self.part = part
        self.base, self.folder = _make_folder(root, full)
        self.log = os.path.join(self.folder, cache.LOG)
        self.built = os.path.join(self.folder, "out", f"tejit_{part.name}.so")
        self._source = os.path.join(self.folder, "src")

    def _open(self) -> None:
        for name in ("out", "bin", "lib", "tmp"):
            os.mkdir(os.path.join(self.folder, name), 0o700)
        self.part.sources.write_to(self._source)

    def _command(self, builder: str, units: list[str], **details: Any) -> list[str]:
        request = {
            "builder": builder,
            "folder": self.folder,
            "built": self.built,
            "units": units,
            "sys_path": [path for path in sys.path if path],
            **details,
        }
        path = os.path.join(self.folder, "request.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(request, file)
        return [interpreter.find(), "-I", "-X", "utf8", CHILD, path]

    def fill_nvrtc(self) -> tuple[list[str], dict[str, str]]:
        """Write everything the child needs to run NVRTC; return its command and environment."""
        self._open()
        self.built = os.path.splitext(self.built)[0] + ".cubin"
        command = self._command("nvrtc", self.part.sources.split(1), options=options(self.part, self._source))
        return command, clean_environment()

    def fill(
        self, compiler: Compiler, nvcc: Nvcc | None, ninja: str, jobs: int = 1
    ) -> tuple[list[str], dict[str, str]]:
        """Write everything the child needs to compile up to `jobs` units; return its command and environment."""
        self._open()
        units = self.part.sources.split(jobs)
        # What stays undefined is an error of the linker, for the child does not load what it has built.
        ldflags = ["-Wl,--as-needed", "-Wl,-z,defs", "-s", "-ldl"]
        env = clean_environment()
        env.update(
            PATH=os.pathsep.join([ninja, env.get("PATH", os.defpath)]),
            CXX=self._wrapper("cxx", compiler.command),
            # Temporary files of a killed compiler go with this directory.
            TMPDIR=os.path.join(self.folder, "tmp"),
            MAX_JOBS=str(len(units)),
            OMP_NUM_THREADS="1",
            CUDA_VISIBLE_DEVICES="",
            TORCH_NO_COMPILER_WRAPPER="1",
            TORCH_DONT_CHECK_COMPILER_ABI="1",
            # torch asks every installed package for a backend of its own; for compiling none is needed.
            TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        )
        cuda_flags: list[str] = []
        if nvcc is not None:
            os.symlink(nvcc.root, os.path.join(self.folder, "cuda"))
            env["CUDA_HOME"] = os.path.join(self.folder, "cuda")
            env["PYTORCH_NVCC"] = self._wrapper("nvcc", (nvcc.path,))
            cuda_flags = [*self.part.flags, f"-ccbin={env['CXX']}"]
            ldflags += self._cudart(nvcc)
        command = self._command(
            "nvcc" if nvcc else "c++",
            units,
            name=f"tejit_{self.part.name}",
            cflags=[] if nvcc else list(self.part.flags),
            cuda_cflags=cuda_flags,
            ldflags=ldflags,
            include=[self._source],
            torch_link=self._torch_link(),
        )
        return command, env

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
        if _PLAIN.fullmatch(folder):
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

    def ran_out_of_space(self) -> bool:
        """Whether a failed compiler met a full disk here, as it said or as a trial write tells."""
        if _FULL.search(self.read_log()):
            return True
        # The log lies on the same disk, so the compiler may have had no room to say it.
        trial = os.path.join(self.folder, "trial")
        try:
            with open(trial, "wb") as file:
                file.write(bytes(1 << 20))
        except OSError as error:
            return is_full(error)
        finally:
            leftovers.remove(trial)
        return False

    def keep_log(self, root: Root | None) -> str | None:
        """Copy the log to where it outlives this directory, and return that path."""
        for folder in (root.path if root is not None else None, own_temporary()):
            if folder is None:
                continue
            target = os.path.join(folder, "logs")
            path = os.path.join(target, f"{self.part.name}-{self.part.key[:16]}.log")
            try:
                os.makedirs(target, mode=0o700, exist_ok=True)
                if distrust(target) is None:
                    leftovers.sweep(target, (leftovers.NOTE,))
                    new = os.path.join(target, leftovers.new_name(leftovers.NOTE))
                    shutil.copyfile(self.log, new)
                    os.replace(new, path)
                    return path
            except OSError:
                continue
        return None

    def remove(self) -> None:
        """Remove the directory."""
        leftovers.remove(self.folder)


def _make_folder(root: Root | None, full: Collection[str]) -> tuple[str, str]:
    """A new folder, and the directory that was chosen for it."""
    noexec: list[str] = []
    failed: list[str] = []
    for base in [*temporary_dirs(), "/dev/shm", *([root.store] if root is not None else [])]:
        if not os.path.isdir(base):
            continue
        if not _PLAIN.fullmatch(base):
            failed.append(f"{base}: a character of it means something to ninja or the shell")
            continue
        if is_noexec(base):
            noexec.append(mount_of(base))
            continue
        if base in full:
            failed.append(f"{base}: no space left while compiling there")
            continue
        leftovers.sweep(base, (leftovers.BUILD, leftovers.PRIVATE))
        folder = os.path.join(base, leftovers.new_name(leftovers.BUILD))
        try:
            os.mkdir(folder, 0o700)
        except OSError as error:
            failed.append(f"{base}: {error.strerror or error}")
            continue
        return base, folder
    reasons = failed + [f"the mount {mount} is noexec" for mount in dict.fromkeys(noexec)]
    raise CacheError(
        f"no temporary directory to compile in ({'; '.join(reasons) or 'none exists'})",
        "set TMPDIR, and TEJIT_CACHE_DIR, to writable directories from which programs may be run",
    )


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
            folder = os.path.join(base, leftovers.new_name(leftovers.PRIVATE))
            os.mkdir(folder, 0o700)
            atexit.register(_remove_own, folder, os.getpid())
            cache.copy(built, os.path.join(folder, str(manifest["file"])))
            cache.copy(log, os.path.join(folder, cache.LOG))
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
        leftovers.remove(folder)


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
    if "\nFAILED:" in text:
        # ninja has told what failed; how torch's builder then ends says nothing more.
        text = text.partition("\nTraceback (most recent call last)")[0]
    lines = [line.strip()[:_LONGEST] for line in text.splitlines()]
    errors = [line for line in lines if _ERROR_LINE.search(line) and not line.startswith(("/bin/sh", "exec "))]
    shown = errors[:10] or [line for line in lines if line][-10:]
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

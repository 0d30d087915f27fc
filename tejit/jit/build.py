"""Building missing parts: lock, compile side by side in child processes, publish. Imported on a miss only."""

from __future__ import annotations

import hashlib
import os
import select
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from . import cache, interpreter, maintain, process, workspace
from .cache import Entry, Found
from .errors import CacheError, CompileError, TejitError, ToolchainError
from .lock import BuildLock
from .messages import say, warn_once
from .nvrtc import Nvrtc, check_nvrtc, find_nvrtc
from .parts import SCHEMA, Part
from .roots import CHOOSE, Root, choose, is_full, roots
from .settings import Settings
from .toolchain import Compiler, Nvcc, check_nvcc, find_host_compiler, find_ninja, find_nvcc, pip_line

WAIT_BEFORE_SAYING = 2.0
POLL = 0.05


class Toolchain:
    """The compilers of one build, each looked for once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._found: dict[str, Any] = {}

    def _once(self, name: str, find: Any) -> Any:
        if name not in self._found:
            try:
                self._found[name] = find()
            except TejitError as error:
                self._found[name] = error
        if isinstance(self._found[name], TejitError):
            raise self._found[name]
        return self._found[name]

    def ninja(self) -> str:
        """The folder of ninja."""
        return str(self._once("ninja", find_ninja))

    def host(self, nvcc: Nvcc | None = None) -> Compiler:
        """The host compiler, for the host part or for an nvcc."""
        found = self._once("nvcc host" if nvcc else "host", lambda: find_host_compiler(self._settings, nvcc))
        assert isinstance(found, Compiler)
        return found

    def device(self, arch: str) -> Nvcc | Nvrtc:
        """An nvcc that can compile `arch` for this torch; where there is no nvcc at all, an NVRTC."""
        import torch

        torch_cuda = str(torch.version.cuda)
        nvcc = self._once("nvcc", lambda: find_nvcc(self._settings))
        if nvcc is not None:
            assert isinstance(nvcc, Nvcc)
            check_nvcc(nvcc, torch_cuda, arch)
            return nvcc
        try:
            nvrtc = self._once("nvrtc", lambda: find_nvrtc(torch_cuda))
        except ToolchainError as error:
            raise ToolchainError(
                f"no nvcc, the kernels for sm_{arch} cannot be compiled; {error.what}",
                f"{pip_line(torch_cuda)}, or point TEJIT_NVCC at an nvcc of CUDA {torch_cuda.split('.')[0]}",
            ) from error
        assert isinstance(nvrtc, Nvrtc)
        check_nvrtc(nvrtc, torch_cuda, arch)
        return nvrtc


class Task:
    """One missing part on its way: waiting for its lock, compiling, done."""

    def __init__(self, part: Part, build: Build) -> None:
        self.part = part
        self.result: Entry | TejitError | None = None
        self.child: subprocess.Popen[bytes] | None = None
        self._build = build
        self._lock = BuildLock(build.root, part.key, part.label, build.settings)
        self._arrived = time.monotonic()
        self._arrived_at = time.time()
        self._full: list[str] = []  # where a compiler ran out of space
        self._said_waiting = False
        self._space: workspace.Workspace | None = None
        self._facts: dict[str, Any] = {}
        self._started = 0.0
        self._fill: Callable[[workspace.Workspace], tuple[list[str], dict[str, str]]]

    def step(self, may_start: bool) -> None:
        """Go on as far as possible without waiting."""
        try:
            if self.child is None:
                if may_start and self._have_lock():
                    self._start()
            elif self.child.poll() is not None:
                self._finish(self.child.returncode)
        except TejitError as error:
            self.result = error
            if isinstance(error, CompileError):
                self._lock.note_failure(error)
        except OSError as error:
            self.result = CacheError(
                f"building {self.part.label} failed: {error}", "set TMPDIR or TEJIT_CACHE_DIR to another disk"
            )
        if self.result is not None:
            self.close()

    def close(self) -> None:
        """End what runs, remove what is temporary, free the lock."""
        try:
            if self.child is not None:
                process.end_session(self.child)
            if self._space is not None:
                self._space.remove()
        finally:
            self._lock.release()

    def _have_lock(self) -> bool:
        settings, waited = self._build.settings, time.monotonic() - self._arrived
        if not self._lock.try_acquire():
            holder = self._lock.owner() or "another process"
            if waited >= settings.lock_timeout:
                warn_once(
                    f"{holder} has held the lock {self._lock.path} for over {settings.lock_timeout:g} s "
                    f"(TEJIT_LOCK_TIMEOUT): {self.part.label} is built here as well"
                )
                return True
            if waited >= WAIT_BEFORE_SAYING and not self._said_waiting:
                self._said_waiting = True
                say(f"waiting for {holder} ...", quiet=settings.quiet)
            return False
        return True

    def _start(self) -> None:
        build, part = self._build, self.part
        # Whoever held the lock before has probably published what is wanted here, or met what fails here too.
        self.result = cache.find(roots(build.settings), part, build.avoid).entry
        self.result = self.result or self._lock.failure_since(self._arrived_at)
        if self.result is not None:
            return
        tools = build.tools
        device = tools.device(part.arch) if part.arch else None
        if isinstance(device, Nvrtc):
            with_what = str(device)
            self._facts = {"builder": "nvrtc", "toolkit": device.version, "compiler": None}
            self._fill = workspace.Workspace.fill_nvrtc
        else:
            compiler, ninja = tools.host(device), tools.ninja()
            with_what = f"{device} + {compiler}" if device else str(compiler)
            self._facts = {
                "builder": "nvcc" if device else "c++",
                "toolkit": device.version if device else None,
                "compiler": str(compiler),
            }
            jobs = build.units_at_once()
            self._fill = lambda space: space.fill(compiler, device, ninja, jobs)
        self._started = time.monotonic()
        say(
            f"building kernels for {part.label} with {with_what} (first use here, usually 3-15 s) ...",
            quiet=build.settings.quiet,
        )
        self._compile()

    def _compile(self) -> None:
        """Start the child, in the first directory whose disk is not known to be full."""
        while True:
            space = self._space = workspace.Workspace(self.part, self._build.root, self._full)
            try:
                command, env = self._fill(space)
                self.child = process.start(command, space.folder, space.log, env)
                return
            except OSError as error:
                if not is_full(error):
                    raise
            self._leave_full_disk()

    def _leave_full_disk(self) -> None:
        assert self._space is not None
        if self.child is not None:
            process.end_session(self.child)
            self.child = None
        self._full.append(self._space.base)
        self._space.remove()

    def _finish(self, status: int) -> None:
        assert self._space is not None
        built = self._space.built
        if status != 0 or not os.path.isfile(built):
            if not self._space.ran_out_of_space():
                raise self._failure(status)
            self._leave_full_disk()
            self._compile()
            return
        seconds = time.monotonic() - self._started
        with open(built, "rb") as file:
            data = file.read()
        manifest = {
            "schema": SCHEMA,
            "key": self.part.key,
            "part": self.part.name,
            "identity": self.part.identity,
            "file": cache.CUBIN if built.endswith(".cubin") else cache.LIBRARY,
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "built": time.time(),
            "seconds": round(seconds, 2),
            **_torch_facts(),
            **self._facts,
        }
        entry = self._publish(built, manifest)
        say(f"built in {seconds:.1f} s -> {entry.file}", quiet=self._build.settings.quiet)
        self.result = entry
        if entry.root is not None:
            maintain.trim(entry.root, self._build.settings, keep=[entry.folder])

    def _publish(self, built: str, manifest: dict[str, Any]) -> Entry:
        assert self._space is not None
        root, refused = self._build.root, []
        reason = "no directory can hold it"
        while root is not None:
            try:
                return cache.publish(built, self._space.log, manifest, self.part, root)
            except OSError as error:
                reason = f"{root.path}: {error.strerror or error}"
                refused.append(root.path)
            root, _ = choose(self._build.settings, refused)
            if root is not None:
                warn_once(f"{reason}; {root.path} is used instead ({CHOOSE})")
        entry = workspace.keep_private(built, self._space.log, manifest, self.part)
        warn_once(f"{self.part.label} is compiled but not cached, it serves this process only: {reason}")
        return entry

    def _failure(self, status: int) -> TejitError:
        assert self._space is not None
        log = self._space.keep_log(self._build.root)
        return workspace.explain_failure(self.part, status, self._space, log)


class Build:
    """One call of `build`."""

    def __init__(self, settings: Settings, root: Root | None, avoid: Collection[str]) -> None:
        self.settings = settings
        self.root = root
        self.avoid = avoid
        self.tools = Toolchain(settings)
        self.parts_at_once = 1

    def units_at_once(self) -> int:
        """Units of one part that are compiled side by side, beside those of the other parts."""
        return max(1, job_limit(self.settings) // self.parts_at_once)


def build(
    missing: Sequence[tuple[Part, Found]], settings: Settings, avoid: Collection[str] = ()
) -> dict[str, Entry | TejitError]:
    """Build the missing parts and return, by part name, the entry or the error of each.

    Where the host part fails, the others are not tried: nothing could call their kernels.

    Raises:
        CacheDirError: TEJIT_CACHE_DIR is set and cannot take an entry.
    """
    try:
        interpreter.find()
    except ToolchainError as error:
        # Before any lock: whoever started this program for a build may hold it.
        return {part.name: error for part, _ in missing}
    for _, miss in missing:
        for folder, reason in miss.damaged:
            say(f"the cache entry {folder} cannot be used ({reason}): it is built again", quiet=settings.quiet)
    root, notes = choose(settings)
    for note in notes:
        warn_once(note)
    run = Build(settings, root, avoid)
    tasks = [Task(part, run) for part, _ in missing]
    limit = run.parts_at_once = job_limit(settings, len(tasks))
    try:
        while any(task.result is None for task in tasks):
            for task in tasks:
                if task.result is None:
                    running = sum(other.child is not None and other.result is None for other in tasks)
                    task.step(may_start=running < limit)
                if task.part.is_host and isinstance(task.result, TejitError):
                    _give_up(tasks, task.result)
            _pause(tasks)
    except BaseException:
        # Ctrl-C, or a fault of ours: no compiler, no half entry and no lock outlives it.
        for task in tasks:
            if task.result is None:
                task.close()
        raise
    return {task.part.name: task.result for task in tasks if task.result is not None}


def _give_up(tasks: Sequence[Task], error: TejitError) -> None:
    for task in tasks:
        if task.result is None:
            task.result = error
            task.close()


def _pause(tasks: Sequence[Task]) -> None:
    """Wait until a child ends, or a little, for locks give no sign."""
    open_tasks = [task for task in tasks if task.result is None]
    if not open_tasks:
        return
    poll, descriptors = select.poll(), []
    try:
        for task in open_tasks:
            if task.child is not None:
                descriptors.append(os.pidfd_open(task.child.pid))
                poll.register(descriptors[-1], select.POLLIN)
        poll.poll(POLL * 1000)
    except OSError:
        # A kernel without pidfds.
        time.sleep(POLL)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def job_limit(settings: Settings, units: int | None = None) -> int:
    """Units compiled at once, at least 1: the least of cores by affinity, MAX_JOBS, memory / 2 GB, units."""
    limits = [len(os.sched_getaffinity(0))]
    if units is not None:
        limits.append(units)
    memory = workspace.free_memory()
    if memory is not None:
        limits.append(memory // (2 << 30))
    if settings.max_jobs is not None:
        limits.append(settings.max_jobs)
    return max(1, min(limits))


def _torch_facts() -> dict[str, str]:
    import platform

    import torch

    return {"torch": str(torch.__version__), "python": platform.python_version()}

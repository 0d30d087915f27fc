"""A small set of sources, and ways to run the builder in processes of its own."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

HOST = """
#include "common/seam.h"
extern "C" int test_answer(void) { return 42; }
"""

SEAM = """
#pragma once
#include <map>
#include <string>
static std::map<int, std::string> parts;
static int (*part_callback)(int) = nullptr;
extern "C" {
int tejit_abi(void) { return 1; }
int tejit_register_part(int cc, const char* path, int kind) {
  parts[cc] = path + std::string(kind ? " cubin" : " so");
  return 0;
}
void tejit_set_part_callback(int (*callback)(int)) { part_callback = callback; }
const char* tejit_last_error(void) { return ""; }
int test_ask(int cc) { return part_callback(cc); }
const char* test_part(int cc) { return parts.count(cc) ? parts[cc].c_str() : nullptr; }
}
"""

DEVICE = """
#include "common/twice.cuh"
#if !defined(__CUDACC_RTC__)
#include <cuda_runtime.h>
#include <cstring>
extern "C" void* tejit_part_kernel(const char* name) {
  cudaKernel_t kernel = nullptr;
  if (!strcmp(name, "twice")) cudaGetKernel(&kernel, (const void*)twice);
  return (void*)kernel;
}
#endif
"""

TWICE = """
#pragma once
extern "C" __global__ void twice(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.0f * x[i];
}
"""


def write_sources(folder: Path) -> Path:
    files = {
        "TEJIT_SOURCES": "",
        "host.cpp": HOST,
        "common/seam.h": SEAM,
        "device.cu": DEVICE,
        "common/twice.cuh": TWICE,
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def foreign_settings() -> list[str]:
    """Variables of this process's environment that would reach a build."""
    names = ("MAX_JOBS", "CXX", "XDG_CACHE_HOME", "CUDA_HOME", "CUDA_PATH", "TMPDIR")
    return [name for name in os.environ if name.startswith("TEJIT_") or name in names]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No setting of the machine's reaches a test, and none of its directories is written to."""
    for name in foreign_settings():
        monkeypatch.delenv(name)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return write_sources(tmp_path / "sources")


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty TEJIT_CACHE_DIR."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TEJIT_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Sources, and a cache that holds their host part; never to be changed."""
    folder = tmp_path_factory.mktemp("filled")
    made = write_sources(folder / "sources")
    # This runs before `plain_environment`.
    env = {**dict.fromkeys(foreign_settings()), "TEJIT_CACHE_DIR": str(folder / "cache")}
    done = fork(load_here, str(made), env=env)
    assert done.value["loaded"], done.err
    return made, folder / "cache"


@pytest.fixture
def warm(filled: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """Sources, and a TEJIT_CACHE_DIR of the test's own that holds their host part."""
    made, cache = filled
    folder = tmp_path / "warm"
    shutil.copytree(cache, folder)
    folder.chmod(0o700)
    monkeypatch.setenv("TEJIT_CACHE_DIR", str(folder))
    return str(made), folder


def entries(cache: Path) -> list[Path]:
    """The entry folders of a cache."""
    store = cache / "v1"
    return sorted(p for p in store.iterdir() if len(p.name) == 64) if store.is_dir() else []


def load_here(sources: str) -> dict[str, Any]:
    """Load in this process and tell what came of it."""
    from tejit import jit
    from tejit.jit import loader

    jit.load(sources)
    error = jit.host_error()
    library = loader._state.library
    return {
        "loaded": jit.is_loaded(),
        "error": error,
        "path": loader.loaded_path(),
        "answer": library.test_answer() if library is not None else None,
    }


@dataclass
class Done:
    """What a process came to."""

    value: Any
    error: BaseException | None
    err: str
    status: int


_earlier: list[Any] = []


def forget_what_is_loaded() -> None:
    """Make this process one that has not called `load` yet: `import tejit` may have done so."""
    from tejit.jit import loader, messages

    _earlier.append(loader._state)  # its callback must outlive the library that points to it
    loader._state = loader._State()
    messages.forget()


def _show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


class Fork:
    """A fork of this process, which has imported torch, that runs a function; `join` tells what it came to.

    Args:
        env: changes to the environment; None removes a variable.
        uid: the user that it becomes.
        before: called in the fork first, still as this user (mounts, patches).
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        env: Mapping[str, str | None] | None = None,
        uid: int | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        import torch  # noqa: F401

        answer_file = os.memfd_create("answer")  # no pipe: an answer may be larger than one holds
        err_receive, err_send = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                atexit._clear()  # what this process registers is run at its end, and nothing else
                os.setpgid(0, 0)
                os.close(err_receive)
                os.dup2(err_send, 2)
                os.close(err_send)
                sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                forget_what_is_loaded()
                warnings.showwarning = _show  # pytest would keep them
                warnings.simplefilter("default")
                for name, value in (env or {}).items():
                    if value is None:
                        os.environ.pop(name, None)
                    else:
                        os.environ[name] = value
                tempfile.tempdir = None
                if before is not None:
                    before()
                if uid is not None:
                    os.setgroups([])
                    os.setgid(uid)
                    os.setuid(uid)
                try:
                    answer = (function(*arguments), None)
                except BaseException as error:
                    traceback.print_exc()
                    answer = (None, error)
                atexit._run_exitfuncs()
                with open(answer_file, "wb") as out:
                    out.write(pickle.dumps(answer))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(err_send)
        self._answer = os.fdopen(answer_file, "rb")
        self._err = os.fdopen(err_receive, "rb", buffering=0)
        self.said = b""

    def wait_until_said(self, text: str) -> None:
        """Return when the process has written `text` to its stderr."""
        while text.encode() not in self.said:
            more = self._err.read(65536)
            assert more, f"it ended without saying {text!r}: {self.said.decode()}"
            self.said += more

    def join(self) -> Done:
        """Wait for its end."""
        while more := self._err.read(65536):
            self.said += more
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._answer.seek(0)
        data = self._answer.read()
        self._err.close()
        self._answer.close()
        value, error = pickle.loads(data) if data else (None, None)
        return Done(value, error, self.said.decode(), status)


def fork(function: Callable[..., Any], *arguments: Any, **options: Any) -> Done:
    """Run a function in a `Fork` and wait for it."""
    return Fork(function, *arguments, **options).join()


QUICK_CHILD = """
import fcntl, importlib.util, os, shutil, signal, sys
spec = importlib.util.spec_from_file_location("child", {child!r})
child = importlib.util.module_from_spec(spec)
spec.loader.exec_module(child)
def compile(request):
    with open(os.environ["QUICK_COUNT"], "a") as file:
        file.write(f"{{os.getpid()}} {{request['folder']}}\\n")
    if os.environ.get("QUICK_GATE"):
        fcntl.flock(open(os.environ["QUICK_GATE"]), fcntl.LOCK_SH)
    fail = os.environ.get("QUICK_FAIL")
    if fail == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fail:
        sys.exit(fail)
    shutil.copy({library!r}, request["built"])
child._load_inline = compile
sys.exit(child.main(sys.argv[1]))
"""


@dataclass
class Quick:
    """A child that copies a library instead of compiling one, for what is not about compilers.

    With QUICK_GATE (the gate's path) in the environment it does so only while the gate is open.
    """

    sources: str
    started: Path
    gate: Path
    _closed: Any = None

    def count(self) -> int:
        """Compilations that were started."""
        return len(self.lines())

    def lines(self) -> list[str]:
        return self.started.read_text().splitlines()

    def wait_for(self, count: int) -> None:
        """Return when `count` compilations have been started; for children that wait at the gate."""
        deadline = time.monotonic() + 60
        while self.count() < count:
            assert time.monotonic() < deadline, self.lines()
            time.sleep(0.005)

    def close_gate(self) -> dict[str, str]:
        """Hold up the children that have the returned environment."""
        self._closed = self.gate.open()
        fcntl.flock(self._closed, fcntl.LOCK_EX)
        return {"QUICK_GATE": str(self.gate)}

    def open_gate(self) -> None:
        """Let all children go on."""
        # Forks of this process share the lock: closing the file here would not be enough.
        fcntl.flock(self._closed, fcntl.LOCK_UN)


@pytest.fixture
def quick(filled: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Quick:
    """Building takes no compiler and no time; environment QUICK_GATE and QUICK_FAIL say more."""
    from tejit.jit import workspace

    (folder,) = entries(filled[1])
    child = tmp_path / "quick_child.py"
    child.write_text(QUICK_CHILD.format(child=workspace.CHILD, library=str(folder / "tejit.so")))
    monkeypatch.setattr(workspace, "CHILD", str(child))
    started, gate = tmp_path / "started", tmp_path / "gate"
    started.write_text("")
    started.chmod(0o666)
    gate.write_text("")
    gate.chmod(0o666)
    monkeypatch.setenv("QUICK_COUNT", str(started))
    return Quick(str(filled[0]), started, gate)


@pytest.fixture
def tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A TMPDIR of the test's own, in which everything that is left over is seen."""
    folder = tmp_path / "tmpdir"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


MS_RDONLY, MS_NOEXEC, MS_REMOUNT, MS_REC, MS_PRIVATE = 1, 8, 32, 1 << 14, 1 << 18
_CLONE_NEWNS = 0x20000


def own_mounts() -> None:
    """Give this process mounts of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0 or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) != 0:
        raise OSError(ctypes.get_errno(), "no mounts of its own")


def mount_tmpfs(path: Path | str, options: str = "size=64m,mode=0700", flags: int = 0) -> None:
    """Mount an empty memory file system, in a process with mounts of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", flags, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"mounting {path}")


@pytest.fixture(scope="session")
def _mounts_allowed() -> bool:
    return fork(own_mounts).error is None


@pytest.fixture
def mounts(_mounts_allowed: bool) -> None:
    """Skips where a process may not have mounts of its own."""
    if not _mounts_allowed:
        pytest.skip("this user may not create a mount namespace")


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as other users")


def script(path: Path, body: str) -> Path:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def checkout(filled: tuple[Path, Path], tmp_path: Path) -> Path:
    """A folder in which `import tejit` finds this package with the small set of sources."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "tejit").symlink_to(REPOSITORY / "tejit")
    (folder / "cuda_src").symlink_to(filled[0])
    return folder


def python(
    *words: str, env: Mapping[str, str] | None = None, path: Path = REPOSITORY
) -> subprocess.CompletedProcess[str]:
    """Run a new interpreter that finds the package in `path`."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=path,
        env={**os.environ, "PYTHONPATH": str(path), **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

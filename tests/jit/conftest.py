"""A small set of sources, and ways to run the builder in processes of its own."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
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


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No setting of the machine's reaches a test, and none of its directories is written to."""
    for name in list(os.environ):
        if name.startswith("TEJIT_") or name in (
            "MAX_JOBS",
            "CXX",
            "XDG_CACHE_HOME",
            "CUDA_HOME",
            "CUDA_PATH",
        ):
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
    done = fork(load_here, str(made), env={"TEJIT_CACHE_DIR": str(folder / "cache")})
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
    return sorted(p for p in store.iterdir() if not p.name.startswith(".")) if store.is_dir() else []


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


def fork(
    function: Callable[..., Any],
    *arguments: Any,
    env: dict[str, str | None] | None = None,
    uid: int | None = None,
) -> Done:
    """Run a function in a fork of this process, which has imported torch; what it came to."""
    import torch  # noqa: F401

    receive, send = os.pipe()
    err_receive, err_send = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(receive)
            os.close(err_receive)
            os.dup2(err_send, 2)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            forget_what_is_loaded()
            warnings.showwarning = _show  # pytest would keep them
            warnings.simplefilter("default")
            for name, value in (env or {}).items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            if uid is not None:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            try:
                answer = (function(*arguments), None)
            except BaseException as error:
                traceback.print_exc()
                answer = (None, error)
            with open(send, "wb") as out:
                out.write(pickle.dumps(answer))
            status = 0
        finally:
            os._exit(status)
    os.close(send)
    os.close(err_send)
    with open(receive, "rb") as answer_file, open(err_receive, "rb") as err_file:
        data = answer_file.read()
        err = err_file.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    value, error = pickle.loads(data) if data else (None, None)
    return Done(value, error, err, status)


def python(code: str, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter that finds this package."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

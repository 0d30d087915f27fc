"""`import tejit` and `python -m tejit` as users start them: in interpreters of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tejit.jit import cli, toolchain

from .conftest import REPOSITORY, entries, python

pytestmark = pytest.mark.jit

WATCH = """
import os, sys, torch
events = []
def hook(name, arguments):
    if name in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.mkdir", "os.system",
                "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.chmod", "os.truncate"):
        events.append((name, arguments))
    if name == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        events.append((name, arguments))
before = set(sys.modules)
sys.dont_write_bytecode = True
sys.addaudithook(hook)
import tejit
assert tejit.jit.is_loaded(), tejit.jit.host_error()
assert not events, events
heavy = [name for name in set(sys.modules) - before
         if name.split(".")[0] in ("filelock", "cuda", "ninja")
         or name in ("torch.utils.cpp_extension", "tejit.jit.build")]
assert not heavy, heavy
assert not torch.cuda.is_initialized()
"""

LINEAR = """
import torch, tejit
torch.manual_seed(0)
layer = tejit.Linear(64, 64, device="cpu")
with tejit.autocast():
    y = layer(torch.randn(32, 64))
y.sum().backward()
print(tuple(y.shape), bool(y.isfinite().all()), tejit.jit.is_loaded())
"""


def test_a_second_import_starts_nothing_and_writes_nothing(warm: tuple[str, Path], checkout: Path) -> None:
    done = python("-c", WATCH, path=checkout)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_never_without_a_cache_is_an_error_of_the_import(checkout: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    done = python("-c", "import tejit", env={"TEJIT_COMPILE": "never", "TEJIT_CACHE_DIR": str(empty)}, path=checkout)
    assert done.returncode == 1
    assert "KernelNotCached: TEJIT_COMPILE=never, and no entry " in done.stderr
    assert str(empty) in done.stderr
    assert "python -m tejit warm" in done.stderr
    assert not empty.exists()


WRONG = """
import os, runpy, sys, torch
def run(action, error):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 9
        try:
            action()
            status = 0
        except SystemExit as leave:
            status = leave.code or 0
        except BaseException as caught:
            status = 1 if error in f"{type(caught).__name__}: {caught}" else 8
            if status != 1:
                print(type(caught).__name__, caught)
        sys.stdout.flush()
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
def info():
    sys.orig_argv = ["python", "-m", "tejit", "info"]
    sys.argv = ["tejit", "info"]
    runpy.run_module("tejit", run_name="__main__", alter_sys=True)
for name, value, error in (
    ("TEJIT_ARCH", "hopper", "ValueError: TEJIT_ARCH: cannot read the architecture 'hopper'; write it like 90a"),
    ("TEJIT_COMPILE", "maybe", "ValueError: TEJIT_COMPILE='maybe' is unknown; it is one of import, lazy, never"),
    ("TEJIT_BACKEND", "cuda", "ValueError: TEJIT_BACKEND"),
    ("TEJIT_CACHE_DIR", "/dev/null", "CacheDirError: TEJIT_CACHE_DIR=/dev/null cannot be used: it is no directory"),
):
    os.environ[name] = value
    status = run(lambda: __import__("tejit"), error)
    assert status == 1, (name, status)
    status = run(info, "")
    assert status == 0, (name, status)
    del os.environ[name]
"""


def test_a_wrong_setting_is_an_error_of_the_import_but_not_of_the_command_line(checkout: Path) -> None:
    done = python("-c", WRONG, path=checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    for value in ("hopper", "maybe", "cuda", "/dev/null"):
        assert value in done.stdout


def bare(tmp_path: Path, **more: str) -> dict[str, str]:
    """An environment in which there is no tool at all."""
    empty = tmp_path / "no-tools"
    empty.mkdir(exist_ok=True)
    return {"PATH": str(empty), "HOME": "/nonexistent", "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", **more}


def test_linear_works_where_nothing_can_be_built(checkout: Path, tmp_path: Path) -> None:
    done = python("-c", LINEAR, env=bare(tmp_path), path=checkout)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(32, 64) True False\n"
    assert done.stderr.count("RuntimeWarning") == 1
    assert "no C++ compiler that can be used" in done.stderr
    assert "apt-get install g++" in done.stderr
    assert "the slower reference computes" in done.stderr


def test_info_where_there_is_nothing(checkout: Path, tmp_path: Path) -> None:
    done = python("-m", "tejit", "info", env=bare(tmp_path), path=checkout)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    missing = done.stdout.partition("missing:\n")[2]
    assert "no C++ compiler that can be used" in missing
    assert "apt-get install g++" in missing
    report = json.loads(python("-m", "tejit", "doctor", "--json", env=bare(tmp_path), path=checkout).stdout)
    assert any("apt-get install g++" in line for line in report["missing"])
    assert [part["state"] for part in report["parts"]] == ["missing"]


def test_info_names_the_pip_line_where_nothing_compiles_for_gpus(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolchain, "SYSTEM_CUDA", "/nonexistent")
    monkeypatch.setattr(toolchain, "_packaged_nvcc", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert cli.main(["info"]) == 0
    assert 'pip install "cuda-toolkit[nvcc,cccl]==13.0.*"' in capsys.readouterr().out


def test_the_command_line_builds_only_when_asked_to(checkout: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cli"
    env = {"TEJIT_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)}
    assert python("-m", "tejit", "cache", "path", env=env, path=checkout).stdout == f"{cache}\n"
    assert entries(cache) == []
    done = python("-m", "tejit", "warm", env=env, path=checkout)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"host: {entries(cache)[0]}/tejit.so\n"
    assert "the host part only" in done.stderr
    failed = python("-m", "tejit", "warm", env={**env, "TEJIT_CACHE_DIR": "/dev/null"}, path=checkout)
    assert failed.returncode == 1
    assert "TEJIT_CACHE_DIR=/dev/null" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_the_key_of_the_cache_covers_the_architectures(
    sources: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = set()
    for more in ([], ["--arch", "90a"], ["--arch", "90a", "--arch", "80"], ["--arch", "80", "--arch", "9.0"]):
        assert cli.main(["cache", "key", *more], str(sources)) == 0
        keys.add(capsys.readouterr().out)
    assert all(len(key) == 65 for key in keys)
    assert len(keys) == (3 if torch.version.cuda else 1)


@pytest.mark.full
def test_four_interpreters_at_once(checkout: Path, tmp_path: Path) -> None:
    env = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "TEJIT_CACHE_DIR": str(tmp_path / "four"),
        "TMPDIR": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
    }
    code = "import tejit; from tejit.jit import loader; print(loader.loaded_path())"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=checkout,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(4)
    ]
    said = [one.communicate(timeout=300) for one in running]
    assert {one.returncode for one in running} == {0}, said
    (folder,) = entries(tmp_path / "four")
    assert {out for out, _ in said} == {f"{folder}/tejit.so\n"}
    assert sum(err.count("building kernels") for _, err in said) == 1


REAL = (REPOSITORY / "cuda_src" / "host.cpp").exists()

# Nothing is computed before the fork: torch's own thread pool does not survive one, whatever op has started it.
FORK = """
import os, torch, tejit
assert tejit.jit.is_loaded(), tejit.jit.host_error()
def same():
    x = torch.randn(384, 512, generator=torch.Generator().manual_seed(1))
    arguments = (x, 0, True, True, False, 0.0, None)
    here = torch.ops.tejit.fp8_quantize_current(*arguments)
    reference = torch.ops.tejit.fp8_quantize_current.reference(*arguments)
    return all(one.equal(other) for one, other in zip(here, reference, strict=True))
pid = os.fork()
if pid == 0:
    os._exit(0 if same() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert same()
assert not torch.cuda.is_initialized()
"""


@pytest.mark.skipif(not REAL, reason="the kernels' own sources are not here")
@pytest.mark.full
def test_the_real_kernels_build_load_and_compute_in_a_fork(tmp_path: Path) -> None:
    env = {"TEJIT_CACHE_DIR": str(tmp_path / "real"), "CUDA_VISIBLE_DEVICES": ""}
    done = python("-c", FORK, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("building kernels") == 1
    again = python("-c", FORK, env=env)
    assert again.returncode == 0, again.stderr
    assert again.stderr == ""

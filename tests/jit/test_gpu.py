"""What only a machine with a GPU can show: the query, no context, fork, both builders, times."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import pace

from .conftest import REPOSITORY, entries, python

pytestmark = [
    pytest.mark.jit,
    pytest.mark.gpu,
    pytest.mark.skipif(not (REPOSITORY / "cuda_src" / "host.cpp").exists(), reason="the kernels' sources are not here"),
]

PRELUDE = """
import glob, hashlib, json, os, sys, time
import torch
def nvidia_files():
    # Whoever has a CUDA context holds this device open.
    names = [os.readlink(path) for path in glob.glob("/proc/self/fd/*") if os.path.islink(path)]
    return [name for name in names if "nvidia-uvm" in name]
def hashes(device="cuda"):
    found = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.randn(1000, 528, generator=torch.Generator().manual_seed(7)).to(dtype).to(device)
        x[3, 5], x[7, 9] = float("nan"), 0.0
        for fp8 in (0, 1):
            for pow2 in (False, True):
                parts = torch.ops.tejit.fp8_quantize_current(x, fp8, True, True, pow2, 0.0, None)
                data = b"".join(part.cpu().numpy().tobytes() for part in parts)
                found[f"{dtype} {fp8} {pow2}"] = hashlib.sha256(data).hexdigest()
    return found
def built():
    from tejit.jit import loader
    cc = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    return loader._state.parts.get(cc, "none"), loader._state.paths.get(cc)
"""


def run(code: str, cache: Path, **env: str) -> Any:
    """What the code prints last, as JSON, in an interpreter with a cache of its own."""
    done = python("-c", PRELUDE + code, env={"TEJIT_CACHE_DIR": str(cache), **env})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def built_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the host part and the parts of this machine's GPUs."""
    cache = tmp_path_factory.mktemp("gpu") / "cache"
    done = python("-m", "tejit", "warm", env={"TEJIT_CACHE_DIR": str(cache), "TEJIT_COMPILE": "import"})
    assert done.returncode == 0, done.stderr
    return cache


def test_the_driver_is_asked_without_a_context(tmp_path: Path) -> None:
    code = """
from tejit.jit import gpus
name, found, plain = gpus.identity(), gpus.query(), gpus._query_library()
assert not torch.cuda.is_initialized() and not nvidia_files()
major, minor = torch.cuda.get_device_capability()
print(json.dumps([name, found, plain, 10 * major + minor]))
"""
    name, found, plain, cc = run(code, tmp_path, TEJIT_BACKEND="torch")
    assert name is not None
    assert found == plain
    assert cc in found


def test_import_makes_no_context_and_a_fork_computes_on_the_gpu(built_cache: Path) -> None:
    code = """
import tejit
assert tejit.jit.is_loaded(), tejit.jit.host_error()
assert not torch.cuda.is_initialized() and not nvidia_files(), nvidia_files()
receive, send = os.pipe()
pid = os.fork()
if pid == 0:
    os.write(send, json.dumps([hashes(), built()]).encode())
    os._exit(0)
os.close(send)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print(json.dumps([json.loads(os.read(receive, 1 << 16)), hashes(), hashes("cpu")]))
"""
    (in_fork, part), here, on_cpu = run(code, built_cache)
    assert part[0] is None, part
    assert in_fork == here
    assert here == on_cpu


def test_both_builders_give_the_same_bytes(built_cache: Path, tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("there is no nvcc here to compare with")
    without_nvcc = """
os.environ["TEJIT_BACKEND"] = "torch"
from tejit.jit import loader, toolchain
import tejit.jit.build
tejit.jit.build.find_nvcc = lambda settings: None
del os.environ["TEJIT_BACKEND"]
loader._state = loader._State()
tejit.jit.load()
"""
    compute = "import tejit\nprint(json.dumps([hashes(), built()]))"
    by_nvcc, (error, path) = run(compute, built_cache)
    assert error is None
    assert path.endswith("tejit.so")
    by_nvrtc, (error, path) = run(without_nvcc + compute, tmp_path / "nvrtc")
    assert error is None
    assert path.endswith("tejit.cubin")
    builders = {json.loads((folder / "manifest.json").read_text())["builder"] for folder in entries(tmp_path / "nvrtc")}
    assert builders == {"c++", "nvrtc"}
    assert by_nvrtc == by_nvcc


def test_a_part_is_built_at_the_first_op_where_that_was_asked_for(tmp_path: Path) -> None:
    code = """
import tejit
assert not tejit.jit.is_loaded() and not os.path.exists(os.environ["TEJIT_CACHE_DIR"])
first = hashes()
print(json.dumps([first, built(), hashes("cpu")]))
"""
    on_gpu, (error, path), on_cpu = run(code, tmp_path / "lazy", TEJIT_COMPILE="lazy")
    assert error is None
    assert path is not None
    assert on_gpu == on_cpu


def test_never_raises_at_the_first_op_on_a_gpu_without_its_part(built_cache: Path, tmp_path: Path) -> None:
    cache = tmp_path / "host only"
    shutil.copytree(built_cache, cache)
    cache.chmod(0o700)
    for folder in entries(cache):
        if json.loads((folder / "manifest.json").read_text())["part"] != "host":
            shutil.rmtree(folder)
    code = """
import tejit
assert tejit.jit.is_loaded()
hashes("cpu")
layer = tejit.Linear(64, 64, device="cuda", dtype=torch.bfloat16)
try:
    with tejit.autocast():
        layer(torch.ones(32, 64, device="cuda", dtype=torch.bfloat16))
    print(json.dumps("nothing raised"))
except tejit.KernelNotCached as error:
    print(json.dumps(str(error)))
"""
    said = run(code, cache, TEJIT_COMPILE="never")
    assert "TEJIT_COMPILE=never, and no entry" in said
    assert "python -m tejit warm --arch" in said


@pytest.mark.perf
def test_times_of_imports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = """
begin = time.perf_counter()
import tejit
print(json.dumps([time.perf_counter() - begin, tejit.jit.is_loaded()]))
"""
    written: dict[str, str] = {"PYTHONDONTWRITEBYTECODE": ""}  # the first run writes the .pyc files
    cold, loaded = run(code, tmp_path / "cold", **written)
    assert loaded
    warm = statistics.median(run(code, tmp_path / "cold", **written)[0] for _ in range(9))
    # On more than two processors a build takes as long as its longest unit on one, whose pace is that of imports.
    slower = pace.of_imports()
    with capsys.disabled():
        print(
            f"\nimport tejit, torch {torch.__version__}: cold {cold:.2f} s, warm {1e3 * warm:.1f} ms; the bars of 15 s"
            f" and 50 ms are {15 * slower:.1f} s and {50 * slower:.1f} ms at this pace"
        )
    assert cold < 15 * slower
    assert warm < 0.05 * slower

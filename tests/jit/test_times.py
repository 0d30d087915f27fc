"""The bars for the time of builds, on a machine that does nothing else: `pytest -m perf`."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tejit.jit import build
from tejit.jit.parts import device_part, host_part
from tejit.jit.settings import Settings
from tests import pace

from .conftest import REPOSITORY

SOURCES = REPOSITORY / "cuda_src"
pytestmark = [
    pytest.mark.jit,
    pytest.mark.perf,
    pytest.mark.skipif(not (SOURCES / "host.cpp").exists(), reason="the kernels' own sources are not here"),
]


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch")
@pytest.mark.parametrize(("builder", "bar"), [("nvcc", 15.0), ("nvrtc", 5.0)])
def test_a_cold_build(
    builder: str,
    bar: float,
    cache_dir: Path,
    tmp: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host part and one architecture with nvcc; with NVRTC that architecture alone."""
    parts = [device_part(str(SOURCES), "90a", str(torch.version.cuda).split(".")[0])]
    if builder == "nvrtc":
        monkeypatch.setattr(build, "find_nvcc", lambda settings: None)
    else:
        parts.append(host_part(str(SOURCES)))
    # nvcc's build is bound by the processors as NVRTC's is, and NVRTC is there with every CUDA build of torch.
    before = pace.of_nvrtc()
    for attempt in range(8):  # one round in a few is disturbed, and in some hours most are
        cache = cache_dir / str(attempt)
        cache.mkdir(parents=True, mode=0o700)
        begin = time.perf_counter()
        built = build.build([(part, build.Found()) for part in parts], Settings(cache_dir=str(cache), quiet=True))
        taken = time.perf_counter() - begin
        assert all(isinstance(entry, build.Entry) for entry in built.values()), built
        assert {entry.manifest["builder"] for entry in built.values()} <= {builder, "c++"}
        after = pace.of_nvrtc()
        paced = bar * max(before, after)  # the pace may change while the build runs
        if taken < paced:
            break
        before = after
    with capsys.disabled():
        print(f"\n{', '.join(built)} with {builder}: {taken:.1f} s; the bar of {bar:g} s is {paced:.1f} at this pace")
    assert taken < paced

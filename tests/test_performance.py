"""The CPU kernels are held to their bars: time over a copy of the same tensor, in the same run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]

#: By format: rowwise quantization of 4096x4096 bfloat16 with two threads, over a copy of the tensor.
BARS = {"fp8 current": 3.5, "fp8 block 1D": 4.0, "mxfp8": 4.0}


@pytest.mark.perf
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="the bars are for AVX2 and AVX-512"
)
def test_rowwise_quantization_is_within_its_bar_of_a_copy(need_kernels, tmp_path) -> None:
    need_kernels("cpu")
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "tests.benchmarks.cpu_formats", "--no-compile", "--threads", "2"]
    command += ["--formats", *BARS, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=300)
    results = json.loads(out.read_text())["results"]
    ratios = {name: results[f"{name} rowwise"]["ratio_of_medians"] for name in BARS}
    assert all(ratios[name] < bar for name, bar in BARS.items()), done.stdout


NVFP4_BAR = 9.0


@pytest.mark.perf
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="the bar is for AVX2 and AVX-512"
)
def test_nvfp4_rowwise_quantization_is_within_its_bar_of_a_copy(need_kernels, tmp_path) -> None:
    need_kernels("cpu")
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "tests.benchmarks.cpu_nvfp4", "--no-compile", "--threads", "2"]
    command += ["--modes", "rowwise", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=300)
    result = json.loads(out.read_text())["results"]["rowwise"]
    assert result["ratio_of_medians"] < NVFP4_BAR, done.stdout

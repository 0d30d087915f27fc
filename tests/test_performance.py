"""The CPU kernels are held to their bar: time over a copy of the same tensor, in the same run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
BAR = 3.5


@pytest.mark.perf
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="the bar is for AVX2 and AVX-512"
)
def test_rowwise_quantization_is_within_its_bar_of_a_copy(need_kernels, tmp_path) -> None:
    need_kernels("cpu")
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "tests.benchmarks.cpu_fp8_current", "--no-compile", "--threads", "2"]
    command += ["--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=300)
    result = json.loads(out.read_text())["results"]["tejit rowwise"]
    assert result["ratio_of_medians"] < BAR, done.stdout


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

"""FP8 current scaling against Transformer Engine 2.20.2's own kernels (recorded on an H200), to the bit."""

import re

import numpy as np
import pytest
import torch

from tejit import backend
from tejit.kernels import fp8
from tejit.kernels.fp8 import reference
from tests.common import DATA, DEVICES, assert_bitwise_equal, poisoned_memory

GOLDEN = np.load(DATA / "te_fp8_current.npz")
CASES = sorted(key.removesuffix("/row") for key in GOLDEN.files if key.endswith("/row"))
_FORM = re.compile(r"current\.(e4m3|e5m2)\.pow2=([01])\.eps=(.+)$")


def load(case: str) -> tuple[torch.Tensor, int, bool, float]:
    source, name = case.split("/")
    x = torch.from_numpy(GOLDEN[f"{source}/x"])
    x = x.view(torch.bfloat16) if source.split(".")[1] == "bf16" else x
    element, pow2, eps = _FORM.match(name).groups()
    return x, {"e4m3": 0, "e5m2": 1}[element], pow2 == "1", float(eps)


def wanted(case: str, buffer: str, like: torch.Tensor) -> torch.Tensor | None:
    key = f"{case}/{buffer}"
    return torch.from_numpy(GOLDEN[key].reshape(tuple(like.shape))) if key in GOLDEN.files else None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["kernels", "torch"])
@pytest.mark.parametrize("case", CASES)
def test_every_buffer(case: str, how: str, device: str, need_kernels) -> None:
    x, code, pow2, eps = load(case)
    x = x.to(device)
    if how == "kernels":
        need_kernels(device)
        ops = torch.ops.tejit
        amax, scale = ops.fp8_amax(x), lambda a: ops.fp8_scale(a, code, pow2, eps)
    else:
        amax, scale = reference.amax(x), lambda a: reference.scale(a, code, pow2, eps)
    multiplier, scale_inv = scale(amax)
    with poisoned_memory(), backend(how):
        row, col, fused_scale_inv = fp8.quantize_current(x, code, True, True, pow2, eps)
    assert_bitwise_equal(fused_scale_inv, scale_inv, "scale_inv of the fused call")
    compared = 0
    got = {"amax": amax, "scale": multiplier, "scale_inv": scale_inv, "row": row, "col": col}
    for buffer, tensor in got.items():
        want = wanted(case, buffer, tensor)
        if want is not None:
            assert_bitwise_equal(tensor.cpu(), want, buffer)
            compared += 1
    assert compared >= 4


def test_the_record_covers_what_it_should() -> None:
    kinds = {case.split(".")[0] for case in CASES}
    assert kinds == {"normal", "wide", "mixed", "zeros", "tiny", "huge", "nonfinite"}
    assert {case.split(".")[1] for case in CASES} == {"bf16", "fp16", "fp32"}
    assert any("pow2=1" in case for case in CASES)
    assert any("eps=0.001" in case for case in CASES)

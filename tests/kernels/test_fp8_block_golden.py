"""FP8 in blocks of 128 against Transformer Engine 2.20.2's own kernels (recorded on an H200), to the bit."""

import hashlib
import re

import numpy as np
import pytest
import torch

from tejit import backend
from tejit.kernels import fp8_block
from tests.common import DATA, DEVICES, assert_bitwise_equal, poisoned_memory

INPUTS = np.load(DATA / "te_fp8_current.npz")
GOLDEN = np.load(DATA / "te_fp8_block.npz")
CASES = sorted(key.removesuffix("/row") for key in GOLDEN.files if key.endswith("/row"))
_FORM = re.compile(r"b([12])d\.(e4m3|e5m2)\.pow2=([01])\.eps=(.+)$")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["kernels", "torch"])
@pytest.mark.parametrize("case", CASES)
def test_every_buffer(case: str, how: str, device: str, need_kernels) -> None:
    if how == "kernels":
        need_kernels(device)
    source, name = case.split("/")
    x = torch.from_numpy(INPUTS[f"{source}/x"])
    x = (x.view(torch.bfloat16) if source.split(".")[1] == "bf16" else x).to(device)
    dim, element, pow2, eps = _FORM.match(name).groups()
    with poisoned_memory(), backend(how):
        row, row_scale_inv, col, col_scale_inv = fp8_block.quantize(
            x, {"e4m3": 0, "e5m2": 1}[element], int(dim), True, True, pow2 == "1", float(eps)
        )
    assert_bitwise_equal(row_scale_inv.cpu(), torch.from_numpy(GOLDEN[f"{case}/rsinv"]), "row_scale_inv")
    assert_bitwise_equal(col_scale_inv.cpu(), torch.from_numpy(GOLDEN[f"{case}/csinv"]), "col_scale_inv")
    for buffer, codes in (("row", row), ("col", col)):
        assert hashlib.sha256(codes.cpu().numpy().tobytes()).digest() == GOLDEN[f"{case}/{buffer}"].tobytes(), buffer


def test_the_record_covers_what_it_should() -> None:
    assert {case.split(".")[0] for case in CASES} == {"normal", "wide", "mixed", "zeros", "tiny", "huge", "nonfinite"}
    assert {case.split(".")[1] for case in CASES} == {"bf16", "fp16", "fp32"}
    assert {case.split("/")[0].split(".")[2] for case in CASES} >= {"128x256", "160x288", "96x544"}
    settings = {case.split("/")[1] for case in CASES}
    assert len(settings) == 16  # two kinds of block, two element types, pow2 on and off, eps 0 and 0.001

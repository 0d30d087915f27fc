"""What the tests of NVFP4's tensors and quantizers share."""

import pytest
import torch

from tejit import NVFP4Quantizer
from tests.common import assert_bitwise_equal, provoking

USAGES = [(True, True), (True, False), (False, True)]
each_usage = pytest.mark.parametrize("usage", USAGES, ids=lambda u: "row" * u[0] + "col" * u[1])
SHAPE = (144, 272)
MODES = {
    "1x16": {},
    "16x16": {"with_2d_quantization": True},
    "rht": {"with_rht": True},
    "row-scaled": {"row_scaled_nvfp4": True},
    "4over6": {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256, "nvfp4_4over6_err_mode": "MSE"},
    "stochastic": {"stochastic_rounding": True},
    "swizzled": {"optimize_for_gemm": True},
}
each_mode = pytest.mark.parametrize("mode", MODES)


def quantizer(mode: str = "1x16", usage=(True, True), **arguments) -> NVFP4Quantizer:
    return NVFP4Quantizer(rowwise=usage[0], columnwise=usage[1], **MODES[mode], **arguments)


def make(shape=SHAPE, mode="1x16", usage=(True, True), dtype=torch.bfloat16, device="cpu", seed=0, **arguments):
    x = provoking("normal", shape, dtype, seed).to(device)
    torch.manual_seed(5)
    return x, quantizer(mode, usage, **arguments)(x)


def possible(mode: str, usage: tuple[bool, bool]) -> None:
    if mode == "row-scaled" and not usage[0]:
        pytest.skip("row-scaled NVFP4 needs rowwise usage")


def assert_same_buffers(one, other) -> None:
    for name in one._INNER_TENSORS:
        mine, theirs = getattr(one, name), getattr(other, name)
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            assert_bitwise_equal(mine, theirs, name)

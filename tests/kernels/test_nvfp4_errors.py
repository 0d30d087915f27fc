"""The NVFP4 ops' own errors, raised in C++: they name the value, what was needed and what to do."""

import pytest
import torch

from tejit import backend
from tejit.kernels import nvfp4
from tests.common import DEVICES

ops = torch.ops.tejit
SIGNS = 0xD7E8


def quantize(x: torch.Tensor, **changes):
    arguments = {
        "rowwise": True, "columnwise": True, "rht": False, "sign_mask": SIGNS, "square": False, "row_scaled": False,
        "four_over_six": 0, "e4m3_max": 448, "swizzled": False, "seed": None, "row_amax": None, "col_amax": None,
    }  # fmt: skip
    assert not changes.keys() - arguments.keys()
    arguments.update(changes)
    return ops.nvfp4_quantize(x, *arguments.values())


def out(x: torch.Tensor, **changes: torch.Tensor | None) -> None:
    names = ("row", "row_s", "col", "col_s", "amax_row", "amax_col")
    buffers = dict(zip(names, quantize(x), strict=True))
    noop = changes.pop("noop", None)
    assert not changes.keys() - buffers.keys()
    buffers.update(changes)
    ops.nvfp4_quantize_out(x, False, SIGNS, False, False, 0, 448, False, None, None, None, noop, *buffers.values())


def seed(x: torch.Tensor, *numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, device=x.device)


def no_bytes(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8, device=x.device)


CALLS = {
    "input": (lambda x: quantize(x.long()), ["int64", "x.to("]),
    "K": (lambda x: quantize(x[:, :40]), ["K (the last dimension)", "K = 40", "(32, 40)", "multiple of 16", "to 48"]),
    "M": (lambda x: quantize(x[:3]), ["M (all dimensions but the last", "M = 3", "multiple of 16", "to 16"]),
    "tiles": (lambda x: quantize(x[:3], columnwise=False, square=True), ["M = 3"]),
    "rotated amax": (lambda x: ops.nvfp4_amax(x[:3], True, True, True, SIGNS, False), ["M = 3"]),
    "row-scaled rht": (lambda x: quantize(x, row_scaled=True, rht=True), ["row-scaled", "RHT", "switch one"]),
    "row-scaled 2d": (lambda x: quantize(x, row_scaled=True, square=True), ["row-scaled", "2D"]),
    "row-scaled sr": (lambda x: quantize(x, row_scaled=True, seed=seed(x, 1, 2)), ["row-scaled", "stochastic"]),
    "4over6 rht": (lambda x: quantize(x, four_over_six=1, rht=True), ["4over6", "RHT"]),
    "4over6 sr": (lambda x: quantize(x, four_over_six=2, seed=seed(x, 1, 2)), ["4over6", "stochastic"]),
    "mode": (lambda x: quantize(x, four_over_six=3), ["four_over_six is 3", "0 (none), 1 (MAE) or 2 (MSE)"]),
    "e4m3_max": (lambda x: quantize(x, e4m3_max=0), ["e4m3_max is 0", "448 or 256"]),
    "mask": (lambda x: quantize(x, rht=True, sign_mask=1 << 16), ["sign_mask is 65536", "16 bits"]),
    "seed dtype": (lambda x: quantize(x, seed=seed(x, 1, 2).int()), ["seed", "int32", "int64"]),
    "seed size": (lambda x: quantize(x, seed=seed(x, 1)), ["seed", "(1,)", "(2,)"]),
    "amax size": (lambda x: quantize(x, row_amax=torch.ones(32, device=x.device)), ["row_amax", "(32,)", "(1,)"]),
    "amaxes": (
        lambda x: quantize(x, row_scaled=True, col_amax=torch.ones(32, device=x.device)),
        ["col_amax", "(32,)", "(48,)"],
    ),
    "shape": (lambda x: out(x, row=no_bytes(x, 32, 48)), ["row", "(32, 48)", "(32, 24)"]),
    "strides": (lambda x: out(x, col=no_bytes(x, 16, 48).t()), ["col", "not contiguous"]),
    "scales": (lambda x: out(x, row_s=no_bytes(x, 32, 3)), ["row_scale_inv", "(32, 3)", "(128, 4)"]),
    "dtype": (lambda x: out(x, col_s=no_bytes(x, 128, 4).float()), ["col_scale_inv", "float32", "uint8"]),
    "no scales": (lambda x: out(x, row_s=None), ["of row, row_scale_inv and amax_row only some", "all three"]),
    "no amax": (lambda x: out(x, amax_col=None), ["of col, col_scale_inv and amax_col only some", "all three"]),
    "noop": (lambda x: out(x, noop=torch.ones(2, device=x.device)), ["noop", "(2,)", "one float32"]),
    "size": (
        lambda x: ops.nvfp4_make_empty([16, -16], True, True, False, x.device, False),
        ["dimension 1", "negative"],
    ),
    "empty": (lambda x: ops.nvfp4_make_empty([16, 24], True, True, False, x.device, False), ["K = 24", "to 32"]),
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("call", "words"), CALLS.values(), ids=CALLS)
def test_each_names_what_was_wrong(call, words, device, need_kernels) -> None:
    need_kernels(device)
    with pytest.raises(RuntimeError) as caught:
        call(torch.ones(32, 48, device=device))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("how", ["kernels", "torch"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((3, True, True, False, False, 0, 448), "M = 3"),
        ((16, True, True, True, True, 0, 448), "row-scaled NVFP4 does not go with RHT"),
        ((16, True, True, True, False, 1, 448), "4over6 does not go with RHT"),
        ((16, True, True, False, False, 3, 448), "four_over_six is 3"),
        ((16, True, True, False, False, 0, 447), "e4m3_max is 447"),
    ],
    ids=str,
)
def test_the_entry_functions_raise_value_errors(arguments, words, how, need_kernels) -> None:
    if how == "kernels":
        need_kernels("cpu")
    rows, rowwise, columnwise, rht, row_scaled, four_over_six, e4m3_max = arguments
    mode = (rht, SIGNS, False, row_scaled, four_over_six, e4m3_max, False, None, None, None)
    with backend(how), pytest.raises(ValueError, match=words):
        nvfp4.quantize(torch.ones(rows, 32), rowwise, columnwise, *mode)

"""What inductor makes of the references: eager's bytes, for every tail and for one and several rows of blocks.

The oracle is the reference run eagerly, which other tests hold to recorded bytes and to other implementations.
"""

import itertools

import pytest
import torch

from tejit import backend
from tejit.format_info import FP8_BLOCK, MXFP8, NVFP4, NVFP4_SIGN_MASK
from tejit.kernels import fp8_block, mxfp8, nvfp4
from tests.common import DEVICES, assert_bitwise_equal

ROWS, COLUMNS = (1, 64, 128, 200), (128, 200, 256, 96)


def fp8(dim):
    def run(x):
        row, row_scales, col, col_scales = fp8_block.quantize(x, 0, dim, True, True, False, 0.0)
        values = (
            fp8_block.dequantize_row(row, row_scales, 0, dim, x.dtype),
            fp8_block.dequantize_col(col, col_scales, 0, dim, x.dtype),
        )
        turned = fp8_block.transpose_squares(row, row_scales) if dim == 2 else ()
        return row, row_scales, col, col_scales, *values, *turned

    return run


def mx(square, swizzled=False):
    def run(x):
        rowwise, columnwise = fits(x, MXFP8, square)
        row, row_scales, col, col_scales = mxfp8.quantize(x, 0, rowwise, columnwise, square, swizzled)
        values = []
        if rowwise:
            values += [row, row_scales, mxfp8.dequantize_row(row, row_scales, 0, swizzled, x.dtype)]
        if columnwise:
            values += [col, col_scales, mxfp8.dequantize_col(col, col_scales, 0, swizzled, x.dtype)]
        return values

    return run


def nv(square=False, rht=False, four_over_six=0, swizzled=False):
    def run(x):
        rowwise, columnwise = fits(x, NVFP4, square)
        mode = (rht, NVFP4_SIGN_MASK, square, False, four_over_six, 448, swizzled)
        row, row_scales, col, col_scales, amax_row, amax_col = nvfp4.quantize(
            x, rowwise, columnwise, *mode, None, None, None
        )
        values = []
        if rowwise:
            values += [row, row_scales, amax_row]
            values += [nvfp4.dequantize_row(row, row_scales, amax_row, 448, swizzled, x.dtype)]
        if columnwise:
            last = (swizzled, tuple(x.shape), rht, NVFP4_SIGN_MASK, x.dtype)
            values += [col, col_scales, amax_col]
            values += [nvfp4.dequantize_col(col, col_scales, amax_col, 448, *last)]
        if square:
            values += nvfp4.transpose_squares(row, row_scales, swizzled)
        return values

    return run


def fits(x, info, square=False):
    """Which directions the blocks cut evenly."""
    down, across = (size % info.block == 0 for size in x.shape)
    return across and (down or not square), down and (across or not square)


#: The reference's ops and values together, and the format.
REFERENCES = {
    "fp8 1x128": (fp8(1), FP8_BLOCK),
    "fp8 128x128": (fp8(2), FP8_BLOCK),
    "mxfp8 1x32": (mx(False), MXFP8),
    "mxfp8 32x32": (mx(True), MXFP8),
    "nvfp4 1x16": (nv(), NVFP4),
    "nvfp4 16x16": (nv(square=True), NVFP4),
}
MORE = {
    "mxfp8 1x32 swizzled": (mx(False, True), MXFP8),
    "mxfp8 32x32 swizzled": (mx(True, True), MXFP8),
    "nvfp4 1x16 swizzled": (nv(swizzled=True), NVFP4),
    "nvfp4 rht": (nv(rht=True), NVFP4),
    "nvfp4 16x16 4over6": (nv(square=True, four_over_six=2, swizzled=True), NVFP4),
}


def sample(rows, columns, dtype, device):
    """Each 16x16 of another magnitude, so that a block's scale in another block's place shows."""
    torch.manual_seed(rows * columns)
    x = torch.randn(rows, columns)
    for size, dim in zip(x.shape, ((-1, 1), (1, -1)), strict=True):
        x = x * torch.exp2(torch.randint(-4, 5, (-(-size // 16),)).float()).repeat_interleave(16)[:size].view(dim)
    return x.to(dtype).to(device)


def compare(name, shapes, dynamic, dtype, device) -> None:
    """Compile the reference, one graph for all ``shapes`` or one each, and compare every byte with eager."""
    run, info = (REFERENCES | MORE)[name]
    square = "32x32" in name or "16x16" in name
    if info is FP8_BLOCK:
        shapes = list(shapes)
    elif square or "rht" in name:
        shapes = [shape for shape in shapes if all(size % info.block == 0 for size in shape)]
    else:
        shapes = [shape for shape in shapes if any(size % info.block == 0 for size in shape)]
    assert shapes
    torch._dynamo.reset()
    with backend("torch"):
        for shape in shapes:
            compiled = torch.compile(run, fullgraph=True, dynamic=dynamic)
            x = sample(*shape, dtype, device)
            compiled(x * -3)  # what is freed here and allocated again must not hold the right bytes
            got, want = compiled(x), run(x)
            for index, (one, other) in enumerate(zip(got, want, strict=True)):
                assert_bitwise_equal(one, other, f"output {index} of {shape}")


@pytest.mark.parametrize(
    ("name", "dynamic", "shapes"),
    [
        ("fp8 1x128", False, [(64, 200)]),
        ("fp8 128x128", False, [(64, 200), (200, 200)]),
        ("fp8 128x128", True, [(64, 200)]),
        ("mxfp8 1x32", False, [(64, 96)]),
        ("mxfp8 32x32", False, [(64, 96)]),
        ("nvfp4 1x16", False, [(64, 96)]),
        ("nvfp4 16x16", False, [(64, 96)]),
    ],
)
def test_inductor_computes_eager_s_bytes(name, dynamic, shapes) -> None:
    """A tail behind the last whole block, and a single row of blocks: there inductor lost columns."""
    compare(name, shapes, dynamic, torch.float32, "cpu")


@pytest.mark.full
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", REFERENCES)
def test_inductor_computes_eager_s_bytes_of_every_shape(name, dynamic, device) -> None:
    dtype = torch.bfloat16 if dynamic else torch.float32
    compare(name, itertools.product(ROWS, COLUMNS), dynamic, dtype, device)


@pytest.mark.full
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MORE)
def test_inductor_computes_eager_s_bytes_in_other_modes(name, device) -> None:
    compare(name, [(64, 96), (128, 256)], False, torch.bfloat16, device)

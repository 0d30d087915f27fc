"""MXFP8: the kernels against the reference to the bit, and what every way to compute it promises."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tejit import backend
from tejit.kernels import mxfp8
from tejit.kernels.mxfp8 import reference
from tejit.kernels.swizzle import swizzle
from tests.common import DEVICES, DTYPES, KINDS, assert_bitwise_equal, poisoned_memory, provoking, short

NAMES = ("row", "row_scale_inv", "col", "col_scale_inv")
USAGES = [(True, True), (True, False), (False, True)]
#: Aligned in both directions, only along rows, only along columns; tails of vectors, tiles and pieces.
SHAPES = [
    *((32, 32), (64, 96), (160, 288), (128, 544), (2, 3, 32, 64)),
    *((1, 32), (5, 64), (127, 96), (129, 32), (32,), (3, 5, 64)),
    *((32, 1), (32, 7), (96, 63), (64, 100), (128, 265), (4, 8, 9)),
]
both_ways = pytest.mark.parametrize("how", ["kernels", "torch"])


def quantize(how: str, x: torch.Tensor, code: int = 0, row=True, col=True, square=False, swizzled=False):
    with poisoned_memory(), backend(how):
        return mxfp8.quantize(x, code, row, col, square, swizzled)


def agree(x: torch.Tensor, *arguments) -> None:
    got, want = quantize("kernels", x, *arguments), quantize("torch", x.cpu(), *arguments)
    for name, one, other in zip(NAMES, got, want, strict=True):
        assert_bitwise_equal(one.cpu(), other, f"{name} of {arguments}")


def allowed(shape: tuple[int, ...], row: bool, col: bool, square: bool) -> bool:
    rows, columns = mxfp8.matrix_shape(shape)
    return not ((row or square) and columns % 32) and not ((col or square) and rows % 32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("shape", SHAPES, ids=short)
def test_kernel_equals_reference(shape, dtype: torch.dtype, device: str, need_kernels) -> None:
    need_kernels(device)
    cases = [(row, col, square) for row, col in USAGES for square in (False, True)]
    cases = [case for case in cases if allowed(shape, *case)]
    assert cases
    for turn, kind in enumerate(KINDS):
        x = provoking(kind, shape, dtype).to(device)
        for number, case in enumerate(cases):  # every kind meets both element types and both orders of scales
            agree(x, (turn + number) % 2, *case, (turn + number) // 2 % 2 == 1)


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 200),
    columns=st.integers(1, 400),
    usage=st.sampled_from(USAGES),
    square=st.booleans(),
    swizzled=st.booleans(),
    start=st.integers(0, 17),
    spread=st.integers(0, 140),
    dtype=st.sampled_from(DTYPES),
    code=st.integers(0, 1),
    special=st.sampled_from([None, 0.0, -0.0, float("inf"), -float("inf"), float("nan")]),
    seed=st.integers(0, 2**31),
)
def test_random_inputs(
    device: str,
    need_kernels,
    rows,
    columns,
    usage,
    square,
    swizzled,
    start,
    spread,
    dtype,
    code,
    special,
    seed,
) -> None:
    """Any size that the usage allows, any exponents, any start in memory (pointers aligned to one element only), any
    special value."""
    need_kernels(device)
    if usage[0] or square:
        columns = -(-columns // 32) * 32
    if usage[1] or square:
        rows = -(-rows // 32) * 32
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(start + rows * columns, generator=generator)
    flat = (flat * torch.exp2(torch.randint(-spread, spread + 1, flat.shape, generator=generator).float())).to(dtype)
    if special is not None:
        flat[torch.randint(0, flat.numel(), (3,), generator=generator)] = special
    agree(flat.to(device)[start:].view(rows, columns), code, *usage, square, swizzled)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("square", [False, True], ids=["1x32", "32x32"])
def test_one_direction_alone_gives_the_bytes_of_both(square: bool, device: str, need_kernels) -> None:
    """Also at a size that many threads share, where whole lines are written past the caches."""
    need_kernels(device)
    x = provoking("wide", (1056, 2208), torch.bfloat16).to(device)
    both = quantize("kernels", x, 0, True, True, square)
    agree(x, 0, True, True, square)
    for row, col in ((True, False), (False, True), (False, False)):
        got = quantize("kernels", x, 0, row, col, square)
        for i, wanted in enumerate((row, row, col, col)):
            if wanted:
                assert_bitwise_equal(got[i], both[i], NAMES[i])
            else:
                assert got[i].shape == (0,)


@pytest.mark.parametrize("device", DEVICES)
def test_large_enough_to_write_past_the_caches(device: str, need_kernels) -> None:
    """Against the same blocks in pieces too small for that."""
    need_kernels(device)
    x = provoking("wide", (1024, 2080), torch.bfloat16).to(device)
    row, row_scale_inv, col, col_scale_inv = quantize("kernels", x)
    assert row.nbytes >= 2 << 20
    for first in range(0, 1024, 256):
        part = slice(first, first + 256)
        want = quantize("kernels", x[part].contiguous())
        assert_bitwise_equal(row[part], want[0])
        assert_bitwise_equal(row_scale_inv[part], want[1])
        assert_bitwise_equal(col[part], want[2])
        assert_bitwise_equal(col_scale_inv[first // 32 : first // 32 + 8], want[3])


@pytest.mark.parametrize("device", DEVICES)
@both_ways
def test_squares_are_the_same_in_both_directions(how: str, device: str, need_kernels) -> None:
    """And their scale is that of the tile's amax, by the rule for a row that holds it."""
    if how == "kernels":
        need_kernels(device)
    x = provoking("wide", (160, 96), torch.float32).to(device)
    row, row_scale_inv, col, col_scale_inv = quantize(how, x, 0, True, True, True)
    assert_bitwise_equal(row, col)
    tiles = row_scale_inv[:160:32, :3]
    assert_bitwise_equal(row_scale_inv[:160, :3].contiguous(), tiles.repeat_interleave(32, 0))
    assert_bitwise_equal(col_scale_inv[:5, :96].contiguous(), tiles.repeat_interleave(32, 1))
    amax = x.abs().view(5, 32, 3, 32).amax((1, 3))
    one_a_row = torch.zeros(15, 32, device=device)
    one_a_row[:, 0] = amax.view(-1)
    scales = quantize(how, one_a_row, 0, True, False)[1]
    assert_bitwise_equal(scales[:15, 0].contiguous(), tiles.reshape(-1))


@pytest.mark.parametrize("device", DEVICES)
@both_ways
@pytest.mark.parametrize("square", [False, True], ids=["1x32", "32x32"])
def test_swizzled_scales_are_the_plain_ones_in_another_order(square, how, device, need_kernels) -> None:
    if how == "kernels":
        need_kernels(device)
    x = provoking("wide", (288, 544), torch.bfloat16).to(device)
    plain, swizzled = (quantize(how, x, 0, True, True, square, order) for order in (False, True))
    assert_bitwise_equal(swizzled[0], plain[0])
    assert_bitwise_equal(swizzled[1], swizzle(plain[1]))
    assert_bitwise_equal(swizzled[2], plain[2])
    assert_bitwise_equal(swizzled[3], swizzle(plain[3].t()).view(plain[3].shape))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[32:, 32:],
        lambda x: x[:32, 8:40],
        lambda x: x[0].expand(64, -1),
        lambda x: x.view(2, 32, 2, 32).contiguous(memory_format=torch.channels_last),
        lambda x: x.view(4, 32, 32).movedim(1, 0),
        lambda x: x[:0],
        lambda x: x[:, :0],
    ],
    ids=["t", "stride2", "corner", "shifted", "expand", "channels_last", "movedim", "empty", "no columns"],
)
def test_strided_inputs_give_the_bytes_of_their_contiguous_copy(view, device: str, need_kernels) -> None:
    need_kernels(device)
    x = view(provoking("normal", (64, 64), torch.bfloat16).to(device))
    agree(x)
    for one, other in zip(quantize("kernels", x), quantize("torch", x.contiguous()), strict=True):
        assert_bitwise_equal(one, other)


@pytest.mark.parametrize("device", DEVICES)
@both_ways
@pytest.mark.parametrize("square", [False, True], ids=["1x32", "32x32"])
def test_noop_flag(square: bool, how: str, device: str, need_kernels) -> None:
    if how == "kernels":
        need_kernels(device)
    x = provoking("normal", (64, 160), torch.bfloat16).to(device)
    fresh = quantize(how, x, 0, True, True, square)
    for flag, skipped in ((1.0, True), (0.0, False), (0.5, False), (float("nan"), False)):
        outputs = [torch.full_like(t, 77) for t in fresh]
        with backend(how):
            mxfp8.quantize_out(x, 0, square, False, torch.full((1,), flag, device=device), *outputs)
        for out, new in zip(outputs, fresh, strict=True):
            assert_bitwise_equal(out, torch.full_like(new, 77) if skipped else new)


@pytest.mark.parametrize("device", DEVICES)
@both_ways
@pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])
def test_every_padding_byte_of_the_scales_is_zero(swizzled: bool, how: str, device: str, need_kernels) -> None:
    """Field case 4. Into buffers full of 77; a block of ones has a scale that is not 0, so the rest is padding."""
    if how == "kernels":
        need_kernels(device)
    for shape in ((1, 32), (5, 64), (127, 32), (129, 160), (32, 1), (160, 129), (32, 32), (160, 288)):
        rows, columns = shape
        row, col = columns % 32 == 0, rows % 32 == 0
        x = torch.ones(shape, device=device)
        outputs = [torch.full_like(t, 77) for t in quantize(how, x, 0, row, col)]
        given = [t if t.numel() else None for t in outputs]
        with backend(how):
            mxfp8.quantize_out(x, 0, False, swizzled, None, *given)
        if row:
            want = torch.zeros_like(outputs[1])
            want[:rows, : columns // 32] = 119
            assert_bitwise_equal(outputs[1], swizzle(want) if swizzled else want)
        if col:
            want = torch.zeros_like(outputs[3])
            want[: rows // 32, :columns] = 119
            assert_bitwise_equal(outputs[3], swizzle(want.t()).view(want.shape) if swizzled else want)


@pytest.mark.parametrize("device", DEVICES)
def test_flushing_denormals_in_the_caller_changes_nothing(device: str, need_kernels) -> None:
    need_kernels(device)
    x = provoking("subnormal", (160, 96), torch.float32).to(device)
    want = quantize("kernels", x)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        got = quantize("kernels", x)
    finally:
        torch.set_flush_denormal(False)
    for one, other in zip(got, want, strict=True):
        assert_bitwise_equal(one, other)


@pytest.mark.parametrize("square", [False, True], ids=["1x32", "32x32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
def test_the_reference_compiles_to_the_same_bytes(dtype: torch.dtype, square: bool) -> None:
    """Field case 12 for inductor, too: numbers beyond the largest, inf and NaN."""

    def roundtrip(x):
        four = reference.quantize(x * 1.5, 0, True, True, square, square)
        back = reference.dequantize_row(four[0], four[1], 0, square, torch.float32)
        return (*four, back, reference.dequantize_col(four[2], four[3], 0, square, torch.float32))

    compiled = torch.compile(roundtrip, fullgraph=True)
    for kind in KINDS:
        x = provoking(kind, (160, 224), dtype)
        got, want = compiled(x), roundtrip(x)
        for name, one, other in zip(NAMES, got[:4], want[:4], strict=True):
            assert_bitwise_equal(one, other, f"{name}, {kind}")
        for one, other in zip(got[4:], want[4:], strict=True):  # of two NaN the bits need not be the same
            assert_bitwise_equal(one.nan_to_num(7.0, None, None), other.nan_to_num(7.0, None, None), kind)
            assert torch.equal(one.isnan(), other.isnan())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])
def test_dequantize_from_either_direction(swizzled: bool, device: str) -> None:
    """Oracle: torch's own decoding of the codes, times ldexp of the block's exponent."""
    x = provoking("wide", (2, 80, 96), torch.float32).to(device)
    row, row_scale_inv, col, col_scale_inv = quantize("torch", x, 0, True, True, False, swizzled)
    plain = quantize("torch", x)

    def values(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
        decoded = codes.view(torch.float8_e4m3fn).double().view(160, 96)
        return torch.ldexp(decoded, exponents.int() - 127).float().view(2, 80, 96)

    got = reference.dequantize_row(row, row_scale_inv, 0, swizzled, torch.float32)
    assert_bitwise_equal(got, values(row, plain[1][:160, :3].repeat_interleave(32, 1)))
    got = reference.dequantize_col(col, col_scale_inv, 0, swizzled, torch.float32)
    assert got.is_contiguous()
    assert_bitwise_equal(got, values(col, plain[3][:5, :96].repeat_interleave(32, 0)))

"""NVFP4: kernels against the reference in every mode, to the bit; layouts, padding, NaN and inf, noop, strides."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tejit import backend
from tejit.kernels import nvfp4
from tejit.kernels.nvfp4 import elements, reference
from tejit.kernels.swizzle import swizzle, unswizzle
from tests.common import DEVICES, DTYPES, KINDS, assert_bitwise_equal, provoking, short
from tests.kernels.nvfp4_modes import MODES, NAMES, Mode, agree, each_mode, quantize, without

SHAPES = [(16, 16), (16, 32), (48, 144), (128, 256), (272, 80), (2, 24, 1040), (256, 2064)]
BOTH_WAYS = [(True, True), (True, False), (False, True)]


@pytest.mark.parametrize("device", DEVICES)
@each_mode
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_kernel_equals_reference(dtype: torch.dtype, mode: Mode, device: str, need_kernels) -> None:
    need_kernels(device)
    for shape in SHAPES:
        for kind in KINDS if shape[0] < 100 else ("normal", "wide"):
            agree(provoking(kind, shape, dtype).to(device), mode)
    agree(provoking("wide", (64, 96), dtype).to(device), mode, True, False)
    agree(provoking("wide", (64, 96), dtype).to(device), mode, False, True)


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 200),
    columns=st.integers(1, 200),
    usage=st.sampled_from(BOTH_WAYS),
    start=st.integers(0, 17),
    spread=st.integers(0, 140),
    dtype=st.sampled_from(DTYPES),
    name=st.sampled_from(list(MODES)),
    special=st.sampled_from([None, 0.0, -0.0, float("inf"), -float("inf"), float("nan")]),
    swizzled=st.booleans(),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_random_inputs(
    device, need_kernels, rows, columns, usage, start, spread, dtype, name, special, swizzled, seed
) -> None:
    """Any exponents, any start in memory, any special value; a direction that is not asked for need not fit."""
    need_kernels(device)
    mode = without(MODES[name], swizzled=swizzled)
    if mode.seed is not None:
        mode = without(mode, seed=(seed, rows * seed % 2**62))
    if usage[0] or mode.square:
        columns = -(-columns // 16) * 16
    if usage[1] or mode.square:
        rows = -(-rows // 16) * 16
    generator = torch.Generator().manual_seed(seed % 2**31)
    flat = torch.randn(start + rows * columns, generator=generator)
    flat = (flat * torch.exp2(torch.randint(-spread, spread + 1, flat.shape, generator=generator).float())).to(dtype)
    if special is not None:
        flat[torch.randint(0, flat.numel(), (3,), generator=generator)] = special
    agree(flat.to(device)[start:].view(rows, columns), mode, *usage)


@pytest.mark.parametrize("device", DEVICES)
@each_mode
def test_one_direction_alone_gives_the_bytes_of_both(mode: Mode, device: str, need_kernels) -> None:
    need_kernels(device)
    x = provoking("wide", (256, 1168), torch.bfloat16).to(device)
    both = quantize("kernels", x, mode)
    agree(x, mode)
    for row, col in ((True, False), (False, True), (False, False)):
        got = quantize("kernels", x, mode, row, col)
        for name, mine, of_both, wanted in zip(NAMES, got, both, (row, row, col, col, row, col), strict=True):
            if wanted:
                assert_bitwise_equal(mine, of_both, name)
            else:
                assert mine.shape == (0,)


@pytest.mark.parametrize("device", DEVICES)
@each_mode
@pytest.mark.parametrize("columns", [48, 4112])
def test_given_amaxes_replace_the_tensors_own(columns: int, mode: Mode, device: str, need_kernels) -> None:
    """As after a reduction over a process group: the amaxes of the op `nvfp4_amax`, larger than here."""
    need_kernels(device)
    x = provoking("normal", (64, columns), torch.bfloat16).to(device)
    for how in ("kernels", "torch"):
        with backend(how):
            own = nvfp4.amax(x, True, True, mode.rht, mode.sign_mask, mode.row_scaled)
        six = quantize(how, x, mode)
        for name, mine, theirs in zip(("row", "col"), own, six[4:], strict=True):
            assert_bitwise_equal(mine, theirs, name)
        for amaxes in ([a * 1.75 for a in own], [a * 0 + torch.inf for a in own], [a * 0.5 for a in own]):
            agree(x, mode, given=amaxes)
    assert [a.shape for a in nvfp4.amax(x, False, False, False, 0, False)] == [(0,), (0,)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["kernels", "torch"])
@pytest.mark.parametrize("kind", ["normal", "inf", "nan", "zeros", "subnormal", "huge"])
def test_amax_is_the_maximum_of_all_but_nan(kind: str, how: str, device: str, need_kernels) -> None:
    """Oracle: NumPy's nanmax. An odd shape: an amax needs no blocks."""
    if how == "kernels":
        need_kernels(device)
    import numpy as np

    x = provoking(kind, (37, 53), torch.float32)
    magnitude = np.nan_to_num(np.abs(x.numpy()), nan=0.0, posinf=np.inf)
    with backend(how):
        row, col = nvfp4.amax(x.to(device), True, True, False, 0, True)
        whole = nvfp4.amax(x.to(device), True, True, False, 0, False)
    assert_bitwise_equal(row.cpu(), torch.from_numpy(magnitude.max(1)))
    assert_bitwise_equal(col.cpu(), torch.from_numpy(magnitude.max(0)))
    for a in whole:
        assert_bitwise_equal(a.cpu(), torch.from_numpy(magnitude.max().reshape(1)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["kernels", "torch"])
@each_mode
def test_a_nan_makes_its_block_nan_and_nothing_else(mode: Mode, how: str, device: str, need_kernels) -> None:
    if how == "kernels":
        need_kernels(device)
    x = provoking("normal", (64, 80), torch.bfloat16)
    clean = quantize(how, x.to(device), mode)
    x[37, 21] = x[0, 0]  # no new maximum
    x[37, 21] = torch.nan
    row, row_scales, col, col_scales, amax_row, amax_col = quantize(how, x.to(device), mode)
    plain = (lambda s: unswizzle(s)) if mode.swizzled else (lambda s: s)
    rows = range(32, 48) if mode.square else [37]
    columns = range(16, 32) if mode.square else [21]
    for codes, scales, lines, first, block in ((row, row_scales, rows, 16, 1), (col, col_scales, columns, 32, 2)):
        scales = plain(scales)
        for line in lines:
            assert scales[line, block] == 0x7F
            assert (codes[line, first // 2 : first // 2 + 8] == 0).all()
        assert int((scales == 0x7F).sum()) == len(lines)
    values = reference.dequantize_row(row, row_scales, amax_row, mode.e4m3_max, mode.swizzled, torch.float32)
    expected = torch.zeros(64, 80, dtype=torch.bool)
    expected[rows[0] : rows[-1] + 1, 16:32] = True
    assert torch.equal(values.isnan().cpu(), expected)
    values = reference.values(col, col_scales, amax_col, mode.e4m3_max, mode.swizzled)
    assert int(values.isnan().sum()) == 16 * len(columns)
    if not mode.row_scaled and amax_row.equal(clean[4]):  # the others are what they were
        same = ~expected
        before = reference.dequantize_row(clean[0], clean[1], clean[4], mode.e4m3_max, mode.swizzled, torch.float32)
        after = reference.dequantize_row(row, row_scales, amax_row, mode.e4m3_max, mode.swizzled, torch.float32)
        assert_bitwise_equal(after.cpu()[same], before.cpu()[same])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["kernels", "torch"])
@each_mode
def test_an_inf_leaves_every_value_finite(mode: Mode, how: str, device: str, need_kernels) -> None:
    """An infinite amax is stored as the one that a scale of 1 means, so that nothing is multiplied by inf."""
    if how == "kernels":
        need_kernels(device)
    x = provoking("normal", (64, 80), torch.bfloat16)
    x[3, 5] = -torch.inf
    row, row_scales, col, col_scales, amax_row, amax_col = quantize(how, x.to(device), mode)
    full = 6.0 * mode.e4m3_max
    assert amax_row[3 if mode.row_scaled else 0] == full
    assert amax_col[5 if mode.row_scaled else 0] == full
    values = reference.dequantize_row(row, row_scales, amax_row, mode.e4m3_max, mode.swizzled, torch.float32)
    assert values.isfinite().all()
    assert values[3, 5] == -6.0 * 448
    assert reference.values(col, col_scales, amax_col, mode.e4m3_max, mode.swizzled).isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["kernels", "torch"])
@each_mode
def test_zeros_keep_their_sign_and_scale_nothing(mode: Mode, how: str, device: str, need_kernels) -> None:
    """pytorch/ao#4713."""
    if how == "kernels":
        need_kernels(device)
    x = torch.zeros(32, 48)
    x[:, 1::2] = -0.0
    row, row_scales, _, _, amax_row, _ = quantize(how, x.to(device), mode)
    assert (row == 0x80).all()
    assert (row_scales == 0).all()
    assert (amax_row == 0).all()
    x[1] = 3.0  # one row that is not zero
    row, row_scales, _, _, amax_row, _ = quantize(how, x.to(device), mode)
    values = reference.dequantize_row(row, row_scales, amax_row, mode.e4m3_max, mode.swizzled, torch.float32)
    assert (values[2:] == 0).all()
    if mode.seed is None:
        assert torch.allclose(values[1], torch.tensor(3.0), rtol=0.07)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["kernels", "torch"])
@pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])
def test_every_padding_byte_of_the_scales_is_zero(swizzled: bool, how: str, device: str, need_kernels) -> None:
    """vllm#37564. Into buffers full of 77."""
    if how == "kernels":
        need_kernels(device)
    for mode in (MODES["1x16"], MODES["16x16"], MODES["row-scaled"], MODES["4over6 mae"], MODES["sr"]):
        mode = without(mode, swizzled=swizzled)
        for shape in ((1, 16), (5, 80), (127, 32), (129, 144), (16, 16), (272, 2064)):
            col = shape[0] % 16 == 0
            if mode.square and not col:
                continue
            x = provoking("normal", shape, torch.float32).to(device)
            outputs = [torch.full_like(t, 77) for t in quantize(how, x, mode, True, col)]
            given = [t if t.dim() and t.numel() else None for t in outputs]
            if not col:
                given[2] = given[3] = given[5] = None
            with backend(how):
                nvfp4.quantize_out(x, *mode.arguments(device), None, None, None, *given)
            for scales, rows, contracted in ((given[1], *shape), (given[3], *reversed(shape))):
                if scales is not None:
                    whole = unswizzle(scales) if swizzled else scales
                    assert whole.shape == (-(-rows // 128) * 128, -(-(contracted // 16) // 4) * 4)
                    assert (whole[rows:] == 0).all()
                    assert (whole[:, contracted // 16 :] == 0).all()
                    assert (whole[:rows, : contracted // 16] > 0).all()


def test_swizzle_is_the_documented_order() -> None:
    """Oracles: the formula element by element, and torchao's to_blocked where it is installed."""
    scales = torch.randint(0, 256, (256, 12), dtype=torch.uint8)
    got = swizzle(scales)
    flat = got.reshape(-1)
    for i in range(256):
        for j in range(12):
            at = ((i // 128) * 3 + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4
            assert flat[at] == scales[i, j]
    assert_bitwise_equal(unswizzle(got), scales)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["kernels", "torch"])
@pytest.mark.parametrize("name", ["16x16", "rht 16x16", "1x16"])
def test_the_even_element_lies_in_the_low_half(name: str, how: str, device: str, need_kernels) -> None:
    if how == "kernels":
        need_kernels(device)
    x = torch.full((16, 16), 0.5)
    x[0, 0] = x[5, 3] = 6.0
    row, _, col, _, _, _ = quantize(how, x.to(device), without(MODES[name], rht=False, square=False))
    assert (row[0, 0].item(), row[5, 1].item(), row[3, 3].item()) == (0x17, 0x71, 0x77)
    assert (col[0, 0].item(), col[3, 2].item()) == (0x17, 0x71)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["kernels", "torch"])
def test_tiles_give_the_columnwise_buffers_as_the_transpose_of_the_rowwise_ones(how, device, need_kernels) -> None:
    if how == "kernels":
        need_kernels(device)
    for mode in (MODES["16x16"], without(MODES["16x16"], swizzled=True)):
        x = provoking("wide", (304, 208), torch.float32).to(device)
        row, row_scales, col, col_scales, amax_row, amax_col = quantize(how, x, mode)
        assert_bitwise_equal(elements.unpack(col), elements.unpack(row).t().contiguous())
        made = reference.transpose_squares(row, row_scales, mode.swizzled)
        for one, other in zip((*made, amax_row), (col, col_scales, amax_col), strict=True):
            assert_bitwise_equal(one, other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["1x16", "rht", "4over6 mae 16x16 256", "sr", "row-scaled"])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[16:, 32:],
        lambda x: x[0].expand(48, -1),
        lambda x: x.view(2, 16, 4, 32).contiguous(memory_format=torch.channels_last),
        lambda x: x.view(16, 4, 64).movedim(1, 0),
        lambda x: x[:0],
        lambda x: x[:, :0],
    ],
    ids=["t", "stride2", "corner", "expand", "channels_last", "movedim", "empty", "no columns"],
)
def test_strided_inputs_give_the_bytes_of_their_contiguous_copy(view, name: str, device: str, need_kernels) -> None:
    need_kernels(device)
    x = view(provoking("normal", (64, 64), torch.bfloat16).to(device))
    agree(x, MODES[name])
    for one, other in zip(
        quantize("kernels", x, MODES[name]), quantize("torch", x.contiguous(), MODES[name]), strict=True
    ):
        assert_bitwise_equal(one, other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["kernels", "torch"])
@each_mode
def test_noop_flag(mode: Mode, how: str, device: str, need_kernels) -> None:
    if how == "kernels":
        need_kernels(device)
    x = provoking("normal", (32, 144), torch.bfloat16).to(device)
    fresh = quantize(how, x, mode)
    for flag, skipped in ((1.0, True), (0.0, False), (0.5, False), (float("nan"), False)):
        outputs = [torch.full_like(t, 77) for t in fresh]
        noop = torch.full((1,), flag, device=device)
        with backend(how):
            nvfp4.quantize_out(x, *mode.arguments(device), None, None, noop, *outputs)
        for out, new in zip(outputs, fresh, strict=True):
            assert_bitwise_equal(out, torch.full_like(new, 77) if skipped else new)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["kernels", "torch"])
@pytest.mark.parametrize("given", [None, 3.0, float("inf"), float("nan")])
@pytest.mark.parametrize("shape", [(0, 48), (32, 0)])
@pytest.mark.parametrize("name", ["1x16", "rht", "row-scaled", "4over6 mse 256"])
def test_an_empty_tensor_s_amaxes_obey_noop_too(name: str, shape, given, how: str, device: str, need_kernels) -> None:
    """0 or what was given (an infinite one as the A of a scale of 1), and untouched where the flag is 1."""
    if how == "kernels":
        need_kernels(device)
    mode, x = MODES[name], torch.empty(shape, device=device)
    for flag in (None, 0.0, 0.5, float("nan"), 1.0):
        with backend(how):
            row, row_scale_inv, col, col_scale_inv, *amaxes = nvfp4.make_empty(
                shape, True, True, mode.square, mode.row_scaled, torch.device(device), False
            )
            amaxes = [torch.full_like(t, 77) for t in amaxes]
            givens = [None if given is None else torch.full_like(t, given) for t in amaxes]
            noop = None if flag is None else torch.full((1,), flag, device=device)
            outputs = (row, row_scale_inv, col, col_scale_inv, *amaxes)
            nvfp4.quantize_out(x, *mode.arguments(device), *givens, noop, *outputs)
        want = 77.0 if flag == 1.0 else 6.0 * mode.e4m3_max if given == float("inf") else given or 0.0
        for written in amaxes:
            assert_bitwise_equal(written, torch.full_like(written, want))
        if flag is None:
            with backend(how):
                fresh = nvfp4.quantize(x, True, True, *mode.arguments(device), *givens)
            for made, written in zip(fresh[4:], amaxes, strict=True):
                assert_bitwise_equal(made, written)


@pytest.mark.parametrize("device", DEVICES)
@each_mode
def test_flushing_denormals_in_the_caller_changes_nothing(mode: Mode, device: str, need_kernels) -> None:
    need_kernels(device)
    x = provoking("subnormal", (144, 272), torch.float32).to(device)
    want = quantize("kernels", x, mode)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        got = quantize("kernels", x, mode)
    finally:
        torch.set_flush_denormal(False)
    for one, other in zip(got, want, strict=True):
        assert_bitwise_equal(one, other)


@pytest.mark.parametrize(
    "name",
    [
        "rht",
        "row-scaled",
        *[pytest.param(name, marks=pytest.mark.full) for name in ("4over6 mse 16x16", "sr")],  # half a minute each
    ],
)
def test_the_reference_compiles_to_the_same_bytes(name: str) -> None:
    """Inductor on the CPU; a bfloat16 input and, with RHT, a rounding in between that it must not leave out."""
    mode = MODES[name]
    *arguments, seed = mode.arguments("cpu")

    @torch.compile(fullgraph=True)
    def compiled(x, seed):
        return computed(x, seed)

    def computed(x, seed):
        six = reference.quantize(x * 1.5, True, True, *arguments, seed, None, None)
        return (*six, reference.dequantize_row(six[0], six[1], six[4], mode.e4m3_max, mode.swizzled, torch.float32))

    x = provoking("wide", (48, 208), torch.bfloat16)
    for name, one, other in zip((*NAMES, "values"), compiled(x, seed), computed(x, seed), strict=True):
        assert_bitwise_equal(one, other, name)


@pytest.mark.parametrize("device", DEVICES)
@each_mode
def test_dequantize_from_either_direction(mode: Mode, device: str) -> None:
    """Oracle: code by code in Python, with NumPy's float32 products in the documented order."""
    import numpy as np

    x = provoking("wide", (2, 16, 80), torch.float32).to(device)
    six = [t.cpu() for t in quantize("torch", x, mode)]

    def values(codes, scales, amax) -> torch.Tensor:
        scales = (unswizzle(scales) if mode.swizzled else scales).view(torch.float8_e4m3fn).float().numpy()
        codes, amax = codes.numpy(), amax.numpy()
        out = np.empty((codes.shape[0], codes.shape[1] * 2), np.float32)
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
        for i, j in np.ndindex(*out.shape):
            code = codes[i, j // 2] >> (4 * (j % 2)) & 15
            factor = scales[i, j // 16] * amax[i if mode.row_scaled else 0] * np.float32(1 / (6 * mode.e4m3_max))
            out[i, j] = (-1 if code & 8 else 1) * table[code & 7] * factor
        return torch.from_numpy(out)

    row = values(six[0].reshape(32, 40), six[1], six[4])
    got = reference.dequantize_row(six[0].to(device), six[1].to(device), six[4].to(device), mode.e4m3_max,
                                   mode.swizzled, torch.float32)  # fmt: skip
    assert got.shape == x.shape
    assert torch.equal(got.cpu().reshape(32, 80), row)
    col = values(six[2], six[3], six[5])
    assert torch.equal(reference.values(six[2], six[3], six[5], mode.e4m3_max, mode.swizzled), col)
    back = reference.dequantize_col(
        *(t.to(device) for t in (six[2], six[3], six[5])), mode.e4m3_max, mode.swizzled, tuple(x.shape), mode.rht,
        mode.sign_mask, torch.float32,
    )  # fmt: skip
    assert back.shape == x.shape
    if not mode.rht:
        assert torch.equal(back.cpu().reshape(32, 80), col.t())
    else:  # rotated back: within what rounding to four bits loses of the block's largest rotated value
        assert (back - x).norm() < 0.2 * x.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_large_values_dequantize_to_finite_ones(device: str) -> None:
    """448 times the amax overflows where a value itself does not."""
    x = torch.full((16, 16), 2.0**127, device=device)
    six = quantize("torch", x, MODES["1x16"])
    got = reference.dequantize_row(six[0], six[1], six[4], 448, False, torch.float32)
    assert torch.allclose(got, x, rtol=1e-6)

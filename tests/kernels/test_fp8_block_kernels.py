"""FP8 in blocks of 128: the rule written out in NumPy, kernels against the reference, all to the bit."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tejit import backend
from tejit.format_info import FP8_ELEMENTS
from tejit.kernels import fp8_block
from tejit.kernels.fp8_block import reference
from tests.common import DEVICES, DTYPES, KINDS, SHAPES, assert_bitwise_equal, poisoned_memory, provoking, short

NAMES = ("row", "row_scale_inv", "col", "col_scale_inv")
MORE_SHAPES = [*SHAPES, (130, 520), (256, 256), (2, 3, 140), (9,), ()]
both_dims = pytest.mark.parametrize("dim", [1, 2], ids=["1x128", "128x128"])


def quantize(how: str, x: torch.Tensor, code: int, dim: int, row=True, col=True, pow2=False, eps=0.0):
    with poisoned_memory(), backend(how):
        return fp8_block.quantize(x, code, dim, row, col, pow2, eps)


def agree(x: torch.Tensor, *arguments) -> None:
    got, want = quantize("kernels", x, *arguments), quantize("torch", x.cpu(), *arguments)
    for name, one, other in zip(NAMES, got, want, strict=True):
        assert_bitwise_equal(one.cpu(), other, name)


def written_out(x: torch.Tensor, code: int, dim: int, pow2: bool, eps: float) -> tuple[np.ndarray, ...]:
    """The format in NumPy and ml_dtypes, block after block, for an (M, K) without NaN."""
    import ml_dtypes

    element = FP8_ELEMENTS[code]
    values = x.float().numpy()
    limit = np.float32(torch.finfo(x.dtype).max)
    dtype = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}[element.name]

    def cast(block: np.ndarray) -> tuple[np.ndarray, np.float32]:
        amax = max(np.abs(block).max(), np.float32(eps))
        with np.errstate(all="ignore"):
            scale = np.float32(element.max) / amax if 0 < amax < np.inf else np.float32(1)
            scale = limit if np.isinf(scale) else scale
            if pow2:
                scale = (np.float32(scale).view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
            codes = np.clip(block * scale, -element.max, element.max).astype(dtype).view(np.uint8)
        return codes, np.float32(1) / scale

    def one_direction(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows, columns = matrix.shape
        height = 1 if dim == 1 else 128
        codes = np.zeros((rows, columns), np.uint8)
        scales = np.zeros((-(-rows // height), -(-columns // 128)), np.float32)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                part = slice(i * height, (i + 1) * height), slice(j * 128, (j + 1) * 128)
                codes[part], scales[i, j] = cast(matrix[part])
        scales = scales.T if dim == 1 else scales
        return codes, np.pad(scales, ((0, 0), (0, -scales.shape[1] % 4)))

    return (*one_direction(values), *one_direction(np.ascontiguousarray(values.T)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["kernels", "torch"])
@both_dims
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nan"])
def test_the_rule_written_out(kind: str, dtype: torch.dtype, dim: int, how: str, device: str, need_kernels) -> None:
    """Oracle: NumPy's division and ml_dtypes' casts; sizes that leave partial blocks in both directions."""
    pytest.importorskip("ml_dtypes")
    if how == "kernels":
        need_kernels(device)
    x = provoking(kind, (150, 390), dtype)
    for code, pow2, eps in ((0, False, 0.0), (0, True, 0.0), (1, False, 1e-3), (1, True, 0.0)):
        got = quantize(how, x.to(device), code, dim, pow2=pow2, eps=eps)
        for name, one, other in zip(NAMES, got, written_out(x, code, dim, pow2, eps), strict=True):
            assert_bitwise_equal(one.cpu(), torch.from_numpy(np.ascontiguousarray(other)), name)


@pytest.mark.parametrize("device", DEVICES)
@both_dims
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("shape", MORE_SHAPES, ids=short)
def test_kernel_equals_reference(shape, dtype: torch.dtype, dim: int, device: str, need_kernels) -> None:
    need_kernels(device)
    for kind in KINDS:
        x = provoking(kind, shape, dtype).to(device)
        for row, col in ((True, True), (True, False), (False, True)):
            agree(x, 0, dim, row, col, False, 0.0)
            agree(x, 1, dim, row, col, True, 1e-3)


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    start=st.integers(0, 17),
    spread=st.integers(0, 140),
    dtype=st.sampled_from(DTYPES),
    code=st.integers(0, 1),
    dim=st.integers(1, 2),
    usage=st.sampled_from([(True, True), (True, False), (False, True)]),
    pow2=st.booleans(),
    special=st.sampled_from([None, 0.0, -0.0, float("inf"), -float("inf"), float("nan")]),
    seed=st.integers(0, 2**31),
)
def test_random_inputs(
    device: str, need_kernels, rows, columns, start, spread, dtype, code, dim, usage, pow2, special, seed
) -> None:
    """Any exponents, any start in memory (pointers aligned to one element only), any special value."""
    need_kernels(device)
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(start + rows * columns, generator=generator)
    flat = (flat * torch.exp2(torch.randint(-spread, spread + 1, flat.shape, generator=generator).float())).to(dtype)
    if special is not None:
        flat[torch.randint(0, flat.numel(), (3,), generator=generator)] = special
    agree(flat.to(device)[start:].view(rows, columns), code, dim, *usage, pow2, 0.0)


@pytest.mark.parametrize("device", DEVICES)
@both_dims
def test_one_direction_alone_gives_the_bytes_of_both(dim: int, device: str, need_kernels) -> None:
    """Also at a size that many threads share, where whole lines are written past the caches."""
    need_kernels(device)
    x = provoking("wide", (1030, 2200), torch.bfloat16).to(device)
    both = quantize("kernels", x, 0, dim)
    agree(x, 0, dim)
    for row, col in ((True, False), (False, True), (False, False)):
        got = quantize("kernels", x, 0, dim, row, col)
        for i, wanted in enumerate((row, row, col, col)):
            if wanted:
                assert_bitwise_equal(got[i], both[i], NAMES[i])
            else:
                assert got[i].shape == (0,)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["kernels", "torch"])
def test_squares_give_the_columnwise_buffers_as_the_transpose_of_the_rowwise_ones(how, device, need_kernels) -> None:
    if how == "kernels":
        need_kernels(device)
    row, row_scale_inv, col, col_scale_inv = quantize(
        how, provoking("wide", (300, 700), torch.float32).to(device), 0, 2
    )
    assert_bitwise_equal(col, row.t().contiguous())
    assert_bitwise_equal(col_scale_inv[:, :3], row_scale_inv[:, :6].t().contiguous())
    for one, other in zip(reference.transpose_squares(row, row_scale_inv), (col, col_scale_inv), strict=True):
        assert_bitwise_equal(one, other)


@pytest.mark.parametrize("device", DEVICES)
@both_dims
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[1:, 8:],
        lambda x: x[0].expand(7, -1),
        lambda x: x.view(2, 4, 4, 8).contiguous(memory_format=torch.channels_last),
        lambda x: x.view(4, 2, 32).movedim(1, 0),
        lambda x: x[:0],
        lambda x: x[:, :0],
        lambda x: x[3, 5],
        lambda x: x[3],
    ],
    ids=["t", "stride2", "corner", "expand", "channels_last", "movedim", "empty", "no columns", "0d", "1d"],
)
def test_strided_inputs_give_the_bytes_of_their_contiguous_copy(view, dim: int, device: str, need_kernels) -> None:
    need_kernels(device)
    x = view(provoking("normal", (8, 32), torch.bfloat16).to(device))
    agree(x, 0, dim)
    for one, other in zip(quantize("kernels", x, 0, dim), quantize("torch", x.contiguous(), 0, dim), strict=True):
        assert_bitwise_equal(one, other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["kernels", "torch"])
@both_dims
def test_noop_flag(dim: int, how: str, device: str, need_kernels) -> None:
    if how == "kernels":
        need_kernels(device)
    x = provoking("normal", (33, 150), torch.bfloat16).to(device)
    fresh = quantize(how, x, 0, dim)
    for flag, skipped in ((1.0, True), (0.0, False), (0.5, False), (float("nan"), False)):
        outputs = [torch.full_like(t, 77) for t in fresh]
        with backend(how):
            fp8_block.quantize_out(x, 0, dim, False, 0.0, torch.full((1,), flag, device=device), *outputs)
        for out, new in zip(outputs, fresh, strict=True):
            assert_bitwise_equal(out, torch.full_like(new, 77) if skipped else new)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["kernels", "torch"])
@both_dims
def test_every_padding_byte_of_the_scales_is_zero(dim: int, how: str, device: str, need_kernels) -> None:
    """Into buffers full of 77: a GEMM multiplies the padding with zeros, which only finite numbers survive."""
    if how == "kernels":
        need_kernels(device)
    for shape in ((1, 1), (129, 641), (641, 129), (130, 3)):
        x = provoking("normal", shape, torch.float32).to(device)
        outputs = [torch.full_like(t, 77) for t in quantize(how, x, 0, dim)]
        with backend(how):
            fp8_block.quantize_out(x, 0, dim, False, 0.0, None, *outputs)
        for scales, rows, contracted in ((outputs[1], *shape), (outputs[3], *reversed(shape))):
            inside = rows if dim == 1 else -(-contracted // 128)
            assert (scales[:, inside:] == 0).all()
            assert (scales[:, :inside] > 0).all()


@pytest.mark.parametrize("device", DEVICES)
@both_dims
def test_flushing_denormals_in_the_caller_changes_nothing(dim: int, device: str, need_kernels) -> None:
    need_kernels(device)
    x = provoking("subnormal", (140, 270), torch.float32).to(device)
    want = quantize("kernels", x, 0, dim)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        got = quantize("kernels", x, 0, dim)
    finally:
        torch.set_flush_denormal(False)
    for one, other in zip(got, want, strict=True):
        assert_bitwise_equal(one, other)


@pytest.mark.parametrize("device", DEVICES)
def test_an_overflowing_scale_becomes_the_largest_number_of_the_input_dtype(device: str, need_kernels) -> None:
    """Not float32's: the two differ for bfloat16. (float16 has no amax so small.)"""
    need_kernels(device)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.full((1, 128), 1e-40, device=device, dtype=torch.float32).to(dtype)
        for how in ("kernels", "torch"):
            scale_inv = quantize(how, x, 0, 1)[1]
            assert scale_inv[0, 0].item() == np.float32(1) / np.float32(torch.finfo(dtype).max)


@pytest.mark.parametrize("columns", [200, 256])
@both_dims
def test_the_reference_compiles_to_the_same_bytes(dim: int, columns: int) -> None:
    """Inductor drops the end of a row from some ways to write it, at sizes that are no multiple of the block."""

    @torch.compile(fullgraph=True)
    def compiled(x):
        four = reference.quantize(x * 1.5, 0, dim, True, True, False, 0.0)
        return (*four, reference.dequantize_row(four[0], four[1], 0, dim, torch.float32))

    x = provoking("wide", (150, columns), torch.float32)
    four = reference.quantize(x * 1.5, 0, dim, True, True, False, 0.0)
    want = (*four, reference.dequantize_row(four[0], four[1], 0, dim, torch.float32))
    for name, one, other in zip((*NAMES, "values"), compiled(x), want, strict=True):
        assert_bitwise_equal(one, other, name)


@pytest.mark.parametrize("device", DEVICES)
@both_dims
def test_dequantize_from_either_direction(dim: int, device: str) -> None:
    """Oracle: each block's codes times its factor, in NumPy."""
    x = provoking("wide", (2, 75, 390), torch.float32).to(device)
    row, row_scale_inv, col, col_scale_inv = (t.cpu() for t in quantize("torch", x, 0, dim))

    def values(codes: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
        decoded = codes.view(torch.float8_e4m3fn).float().numpy()
        factors = scales.numpy()
        out = np.empty_like(decoded)
        for i, j in np.ndindex(*decoded.shape):
            out[i, j] = decoded[i, j] * (factors[j // 128, i] if dim == 1 else factors[i // 128, j // 128])
        return out

    got = reference.dequantize_row(row.to(device), row_scale_inv.to(device), 0, dim, torch.float32)
    assert_bitwise_equal(got.cpu().view(150, 390), torch.from_numpy(values(row.view(150, 390), row_scale_inv)))
    got = reference.dequantize_col(col.to(device), col_scale_inv.to(device), 0, dim, torch.float32)
    assert got.shape == x.shape
    want = torch.from_numpy(values(col.reshape(390, 150), col_scale_inv).T.copy())
    assert_bitwise_equal(got.cpu().view(150, 390), want)

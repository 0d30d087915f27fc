"""GEMM on operands of every kind and every mix of kinds. Oracle: the dequantized operands multiplied in float64."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tejit import device as hardware
from tejit.kernels import fp8, fp8_block, mxfp8, nvfp4
from tejit.kernels.gemm import Operand, gemm, is_native, native
from tejit.kernels.swizzle import swizzle
from tests.common import DEVICES, provoking, short

MASK = 0xD7E8


def _fp8(x, code):
    codes, _, scale_inv = fp8.quantize_current(x, code, True, False, False, 0.0)
    return Operand(codes, scale_inv, code), fp8.dequantize(codes, scale_inv, code, torch.float32)


def _blocks(x, dim, pow2):
    codes, scale_inv, _, _ = fp8_block.quantize(x, 0, dim, True, False, pow2, 0.0)
    return Operand(codes, scale_inv, 0, dim, pow2), fp8_block.dequantize_row(codes, scale_inv, 0, dim, torch.float32)


def _mxfp8(x, code=0, columnwise=False, swizzled=False):
    if columnwise:  # the operand is the transpose of what is quantized
        source = x.t().contiguous()
        _, _, codes, scales = mxfp8.quantize(source, code, False, True, False, swizzled)
        values = mxfp8.dequantize_col(codes, scales, code, swizzled, torch.float32).t()
        return Operand(codes.t(), scales if swizzled else scales.t(), code, kind="mxfp8", swizzled=swizzled), values
    codes, scales, _, _ = mxfp8.quantize(x, code, True, False, False, swizzled)
    values = mxfp8.dequantize_row(codes, scales, code, swizzled, torch.float32)
    return Operand(codes, scales, code, kind="mxfp8", swizzled=swizzled), values


def _nvfp4(x, row_scaled=False, swizzled=False, e4m3_max=448, four_over_six=0):
    codes, scales, _, _, amax, _ = nvfp4.quantize(
        x, True, False, False, 0, False, row_scaled, four_over_six, e4m3_max, swizzled, None, None, None
    )
    values = nvfp4.dequantize_row(codes, scales, amax, e4m3_max, swizzled, torch.float32)
    return Operand(codes, scales, kind="nvfp4", amax=amax, e4m3_max=e4m3_max, swizzled=swizzled), values


def _rotated(x):
    """The operand that columnwise data with a random Hadamard transform is; its values are those before it."""
    source = x.t().contiguous()
    _, _, codes, scales, _, amax = nvfp4.quantize(
        source, False, True, True, MASK, False, False, 0, 448, False, None, None, None
    )
    values = nvfp4.dequantize_col(codes, scales, amax, 448, False, tuple(source.shape), True, MASK, torch.float32)
    return Operand(codes, scales, kind="nvfp4", amax=amax, sign_mask=MASK), values.t()


def _plain(x, dtype=torch.float32, transposed=False):
    values = x.to(dtype)
    codes = values.t().contiguous().t() if transposed else values
    return Operand(codes, None, kind="plain"), values


MAKERS = {
    "fp8 e4m3": lambda x: _fp8(x, 0),
    "fp8 e5m2": lambda x: _fp8(x, 1),
    "1x128 pow2": lambda x: _blocks(x, 1, True),
    "128x128": lambda x: _blocks(x, 2, False),
    "mxfp8": _mxfp8,
    "mxfp8 e5m2": lambda x: _mxfp8(x, 1),
    "mxfp8 columnwise": lambda x: _mxfp8(x, columnwise=True),
    "mxfp8 swizzled": lambda x: _mxfp8(x, swizzled=True),
    "mxfp8 swizzled columnwise": lambda x: _mxfp8(x, columnwise=True, swizzled=True),
    "nvfp4": _nvfp4,
    "nvfp4 swizzled": lambda x: _nvfp4(x, swizzled=True),
    "nvfp4 row-scaled": lambda x: _nvfp4(x, row_scaled=True),
    "nvfp4 4over6": lambda x: _nvfp4(x, four_over_six=1, e4m3_max=256),
    "nvfp4 rotated": _rotated,
    "float32": _plain,
    "bfloat16": lambda x: _plain(x, torch.bfloat16),
    "float16": lambda x: _plain(x, torch.float16, transposed=True),
}
PAIRS = list(itertools.product(MAKERS, MAKERS))
PLAIN_FP8 = {"fp8 e4m3", "fp8 e5m2", "1x128 pow2", "128x128"}  # pairs of these: test_gemm.py


def made(kind: str, shape: tuple[int, int], device: str, seed: int) -> tuple[Operand, torch.Tensor]:
    operand, values = MAKERS[kind](provoking("normal", shape, torch.bfloat16, seed).to(device))
    return operand, values.double()


def check(got, a, b, out_dtype, bias, accumulation) -> None:
    extra = 0 if bias is None else bias.double()
    exact = a @ b.t() + extra
    magnitude = a.abs() @ b.abs().t() + abs(extra)
    assert got.dtype == out_dtype
    assert got.shape == exact.shape
    bound = exact.abs() * torch.finfo(out_dtype).eps + magnitude * accumulation + 1e-30
    assert ((got.double() - exact).abs() <= bound).all(), ((got.double() - exact).abs() / bound).max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pair", [p for p in PAIRS if not set(p) <= PLAIN_FP8], ids=lambda p: f"{p[0]} by {p[1]}")
def test_every_pair_against_float64(pair, device) -> None:
    for m, n, k in ((32, 64, 96), (160, 48, 160)):
        a, a_values = made(pair[0], (m, k), device, 1)
        b, b_values = made(pair[1], (n, k), device, 2)
        rotated = (a.sign_mask is None) != (b.sign_mask is None)  # turned back in float32: 2^-22 of its block's norm
        accumulation = 2 * k * torch.finfo(torch.float32).eps * (4 if rotated or a.sign_mask else 1)
        accumulation = max(accumulation, 2**-9 if is_native(a, b) else 2**-12 if device == "cuda" else 0)
        for out_dtype in (torch.float32, torch.bfloat16):
            for bias in (None, provoking("normal", (n,), out_dtype, 3).to(device)):
                check(gemm(a, b, out_dtype, bias), a_values, b_values, out_dtype, bias, accumulation)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("whole", ["1x128 pow2", "128x128", "mxfp8", "float32", "bfloat16"])
@pytest.mark.parametrize("factored", ["fp8 e4m3", "fp8 e5m2", "nvfp4", "nvfp4 row-scaled", "nvfp4 rotated"])
def test_a_huge_operand_times_a_tiny_one_stays_finite(factored, whole, device) -> None:
    # Codes without their factor times values near float32's limit left its range before the factor came.
    torch.manual_seed(3)
    tiny, huge = torch.randn(32, 64, device=device) * 1e-30, torch.randn(48, 64, device=device) * 5e37
    for (left, a), (right, b) in (
        ((factored, tiny), (whole, huge)),
        ((whole, huge), (factored, tiny)),
        ((factored, huge), (whole, tiny)),
        ((whole, tiny), (factored, huge)),
    ):
        (a_operand, a_values), (b_operand, b_values) = MAKERS[left](a), MAKERS[right](b)
        want = a_values.double() @ b_values.double().t()
        terms = a_values.double().abs() @ b_values.double().abs().t()
        got = gemm(a_operand, b_operand, torch.float32)
        # 64 products and their sum in float32, the rotation by butterflies beside it.
        assert ((got.double() - want).abs() <= 1e-5 * terms).all(), (left, right)


@pytest.mark.parametrize("kind", list(MAKERS))
def test_traced_as_in_eager(kind: str) -> None:
    torch._dynamo.reset()
    a, _ = made(kind, (64, 96), "cpu", 1)
    b, _ = made("mxfp8", (32, 96), "cpu", 2)
    want = gemm(a, b, torch.float32)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def product(a, b):
        return gemm(a, b, torch.float32)

    assert torch.equal(product(a, b), want)


# -- the native GEMMs of MXFP8 and NVFP4, which no machine at hand runs ---------------------------------------
def _tensor_core(a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
    """What cuBLASLt documents for block-scaled operands, in float64, reading scales by its own formula."""
    assert a.stride(1) == 1
    assert b.stride(0) == 1
    assert bias is None
    assert b.shape[1] % 16 == 0
    assert a.shape[1] % 16 == 0

    def values(matrix, scales):
        assert scales.is_contiguous()
        fp4 = matrix.dtype == torch.float4_e2m1fn_x2
        block = 16 if fp4 else 32
        assert scales.dtype == (torch.float8_e4m3fn if fp4 else torch.float8_e8m0fnu)
        if fp4:
            codes = matrix.view(torch.uint8).long()
            table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.double)
            elements = table[torch.stack([codes & 15, codes >> 4], -1).flatten(1)]
        else:
            elements = matrix.double()
        rows, columns = elements.shape
        tiles = -(-columns // (4 * block))
        assert scales.numel() == -(-rows // 128) * 128 * tiles * 4
        i, j = torch.arange(rows)[:, None], torch.arange(columns)[None, :] // block
        place = ((i // 128) * tiles + j // 4) * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4
        return elements * scales.reshape(-1).float()[place].double()

    return (values(a, scale_a) @ values(b.t(), scale_b).t()).to(out_dtype)


NATIVE_PAIRS = [
    (left, right)
    for left, right in PAIRS
    if left.split()[0] == right.split()[0]
    and left.split()[0] in ("mxfp8", "nvfp4")
    and (left, right) != ("mxfp8 e5m2", "mxfp8 e5m2")
    and ("rotated" in left) == ("rotated" in right)
]


@pytest.fixture
def blackwell(monkeypatch) -> None:
    monkeypatch.setattr(hardware, "mxfp8_gemm_is_native", lambda device: True)
    monkeypatch.setattr(hardware, "nvfp4_gemm_is_native", lambda device: True)


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("pair", NATIVE_PAIRS, ids=lambda p: f"{p[0]} by {p[1]}")
def test_native_arguments_mean_the_product(pair, monkeypatch) -> None:
    """The call that the tensor cores get, computed by a double written from cuBLASLt's documentation."""
    monkeypatch.setattr(torch, "_scaled_mm", _tensor_core)
    for m, n, k in ((32, 48, 96), (160, 144, 32), (160, 64, 288)):
        a, a_values = made(pair[0], (m, k), "cpu", 1)
        b, b_values = made(pair[1], (n, k), "cpu", 2)
        assert is_native(a, b)
        rotated = 2**-20 if a.sign_mask else 0
        for out_dtype in (torch.float32, torch.bfloat16, torch.float16):
            for bias in (None, provoking("normal", (n,), out_dtype, 3)):
                got = native.gemm(a, b, out_dtype, bias, False)
                check(got, a_values, b_values, out_dtype, bias, 2**-22 + rotated)


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch cannot even describe a CUDA tensor")
@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("pair", NATIVE_PAIRS, ids=lambda p: f"{p[0]} by {p[1]}")
def test_native_calls_pass_torch_s_own_checks(pair) -> None:
    """Oracle: torch's description of the op for tensors without data, strides and scale sizes included."""
    a, _ = made(pair[0], (160, 96), "cpu", 1)
    b, _ = (
        made(pair[1], (52, 96), "cpu", 2)
        if "columnwise" not in pair[1] and "rotated" not in pair[1]
        else made(pair[1], (64, 96), "cpu", 2)
    )
    with FakeTensorMode() as mode:

        def fake(operand: Operand) -> Operand:
            moved = [
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda:0")
                if isinstance(t, torch.Tensor)
                else t
                for t in operand
            ]
            return Operand(*moved)

        assert mode is not None
        out = native.gemm(fake(a), fake(b), torch.bfloat16, None, False)
        assert out.shape == (160, b.codes.shape[0])
        assert out.dtype == torch.bfloat16


def test_which_pairs_are_native() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "mxfp8_gemm_is_native", lambda device: True)
        patch.setattr(hardware, "nvfp4_gemm_is_native", lambda device: True)
        for left, right in PAIRS:
            a, b = made(left, (32, 32), "cpu", 1)[0], made(right, (32, 32), "cpu", 2)[0]
            assert is_native(a, b) == ((left, right) in NATIVE_PAIRS), (left, right)
    a, b = made("nvfp4", (32, 32), "cpu", 1)[0], made("nvfp4", (32, 32), "cpu", 2)[0]
    assert not is_native(a, b)


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4", "float32"])
def test_empty_operands(kind: str) -> None:
    for m, n, k in ((0, 32, 32), (32, 0, 32), (32, 64, 0)):
        a, b = made(kind, (m, k), "cpu", 1)[0], made(kind, (n, k), "cpu", 2)[0]
        out = gemm(a, b, torch.float32, torch.ones(n))
        assert out.shape == (m, n)
        assert (out == 1).all()


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_padding_of_the_scales_is_never_read_as_a_factor(kind: str) -> None:
    """vllm#37564: M = 1, 5, 127, 129; what lies in padding rows must not reach a result."""
    for m in (1, 5, 127, 129):
        a, values = made(kind, (m, 96), "cpu", 1)
        b, b_values = made(kind, (32, 96), "cpu", 2)
        scales = a.scale_inv.clone()
        scales[m:] = 0xFF if kind == "mxfp8" else 0x7F  # NaN
        check(gemm(a._replace(scale_inv=scales), b, torch.float32), values, b_values, torch.float32, None, 2**-14)


def test_swizzle_is_its_own_proof() -> None:
    """Oracle: torchao's `to_blocked`."""
    to_blocked = pytest.importorskip("torchao.prototype.mx_formats.utils").to_blocked
    scales = torch.randint(0, 256, (256, 12), dtype=torch.uint8)
    assert torch.equal(swizzle(scales).reshape(-1), to_blocked(scales).reshape(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=short)
@pytest.mark.parametrize("device", DEVICES)
def test_identity_by_identity_is_torch_s_own_product(dtype, device) -> None:
    a, b = provoking("normal", (33, 70), dtype, 1).to(device), provoking("normal", (17, 70), dtype, 2).to(device)
    got = gemm(Operand(a, None, kind="plain"), Operand(b, None, kind="plain"), torch.float32)
    check(got, a.double(), b.double(), torch.float32, None, 2**-12 if device == "cuda" else 2**-16)

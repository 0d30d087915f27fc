"""Norms, plain and with quantized output: against torch in float64, and against each format's own op of the norm."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tejit.kernels import norm
from tejit.kernels.fused import FUSED_CURRENT, FUSED_MXFP8, Cast
from tejit.kernels.norm import reference
from tests.common import DEVICES, DTYPES, KINDS, assert_bitwise_equal, poisoned_memory, provoking, short
from tests.kernels.fused_casts import FORMATS, NAMES, USAGES, cast_of, plainly_quantized

#: Single elements, odd sizes, whole vectors, more than the 2048 sums of a row, more than a thread of a kernel keeps.
SHAPES = [(1, 1), (3, 5), (127, 767), (129, 256), (32, 1024), (5, 2056), (2, 8200), (64, 96)]


def parameters(columns: int, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(2, columns, generator=generator).to(dtype).to(device)
    return weight, bias


def same_floats(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Bitwise equal, but for the sign and payload of NaN."""
    assert_bitwise_equal(torch.where(got == got, got, torch.nan), torch.where(want == want, want, torch.nan), what)


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("shape", SHAPES, ids=short)
def test_reference_is_near_float64(shape: tuple[int, int], rms: bool) -> None:
    """float32 input, so that no last rounding hides an error: ten or so roundings, and the sums' tree."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3 + 1
    weight, bias = parameters(shape[1], torch.float32, "cpu")
    y, mean, rstd = reference.norm(x, weight, None if rms else bias, 1e-5, rms, True)
    wide, gamma = x.double(), weight.double() + 1
    if rms:
        want = F.rms_norm(wide, shape[1:], gamma, 1e-5)
    else:
        want = F.layer_norm(wide, shape[1:], gamma, bias.double(), 1e-5)
        torch.testing.assert_close(mean.double(), wide.mean(1, keepdim=True), rtol=0, atol=2e-6)
    spread = wide.square().mean(1, keepdim=True) if rms else wide.var(1, correction=0, keepdim=True)
    torch.testing.assert_close(rstd.double(), (spread + 1e-5).rsqrt(), rtol=2e-6, atol=0)
    # The mean's own rounding is relative to the largest element, of which a row with little spread keeps little.
    bound = 2e-6 * (want.abs() + gamma.abs() * (1 + wide.abs().amax(1, keepdim=True) * (spread + 1e-5).rsqrt()))
    assert ((y.double() - want).abs() <= bound).all()


def test_reference_sums_in_the_stated_order() -> None:
    """Numbers whose sum depends on the order: 2^24 swallows a 1 that is added alone, not two that are added first."""
    x = torch.zeros(1, 4096)
    x[0, 0], x[0, 2048], x[0, 1] = 2.0**24, 1.0, 1.0
    assert reference.sum_of_rows(x).item() == 2.0**24  # 2048 to sum 0, which swallows it; then sum 1 likewise
    x = torch.zeros(1, 1024)
    x[0, 0], x[0, 1], x[0, 5] = 2.0**24, 1.0, 1.0
    assert reference.sum_of_rows(x).item() == 2.0**24 + 2  # 1 and 5 meet (stride 4) before they meet 0
    x = torch.zeros(1, 1024)
    x[0, 0], x[0, 8], x[0, 8 * 17] = 2.0**24, 1.0, 1.0
    assert reference.sum_of_rows(x).item() == 2.0**24 + 2  # threads 1 and 17 meet (stride 16) before they meet 0
    x = torch.zeros(1, 1024)
    x[0, 0], x[0, 8 * 8], x[0, 8 * 4] = 2.0**24, 1.0, 1.0
    assert reference.sum_of_rows(x).item() == 2.0**24  # thread 0 meets 8, then 4, each alone


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_norm_matches_the_reference(dtype: torch.dtype, kind: str, device: str) -> None:
    for seed, shape in enumerate(SHAPES):
        x = provoking(kind, shape, dtype, seed).to(device)
        weight, bias = parameters(shape[1], (dtype, torch.float32)[seed % 2], device, seed)
        given = (
            weight if seed % 4 else None,
            bias if seed % 3 else None,
            1e-5 * (seed % 2),
            seed % 5 == 1,
            seed % 2 > 0,
        )
        want = reference.norm(x, *given)
        with poisoned_memory():
            got = torch.ops.tejit.norm.default(x, *given)
        for name, mine, theirs in zip(("y", "mean", "rstd"), got, want, strict=True):
            same_floats(mine, theirs, f"{name} of {shape}, {given[2:]}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("usage", USAGES.values(), ids=USAGES)
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_fused_output_is_the_quantized_norm(
    dtype: torch.dtype, format: int, usage: tuple[bool, bool], device: str
) -> None:
    for seed, shape in enumerate(SHAPES):
        if format == FUSED_MXFP8:
            shape = (shape[0], max(32, shape[1] // 32 * 32))
        multiple = 32 if format == FUSED_MXFP8 else (1, 16, 1)[seed % 3]
        x = provoking(KINDS[seed % len(KINDS)], shape, dtype, seed).to(device)
        weight, bias = parameters(shape[1], (torch.float32, dtype)[seed % 2], device, seed)
        given = (
            weight if seed % 4 else None,
            bias if seed % 3 else None,
            1e-5 * (seed % 2),
            seed % 5 == 1,
            seed % 2 > 0,
        )
        y, mean, rstd = reference.norm(x, *given)
        mine, theirs = cast_of(format, *usage, device, seed), cast_of(format, *usage, device, seed)
        want = plainly_quantized(reference.padded_rows(y, multiple), theirs)
        with poisoned_memory():
            got, got_mean, got_rstd = norm.norm_quantize(x, *given, multiple, mine)
        for name, a, b in zip(NAMES, got, want, strict=True):
            assert_bitwise_equal(a, b, f"{name} of {shape}, {given[2:]}")
        same_floats(got_rstd, rstd, "rstd")
        if got_mean is not None:
            same_floats(got_mean, mean, "mean")
        if mine.amax is not None and theirs.amax is not None:
            assert_bitwise_equal(mine.amax, theirs.amax, "amax")


@pytest.mark.parametrize("device", DEVICES)
def test_addresses_and_strides(device: str) -> None:
    """A view that starts at an odd element, a transposed one and a parameter at an odd address."""
    x = torch.randn(64 * 128 + 1, device=device).to(torch.bfloat16)
    weight = torch.randn(129, device=device)
    for view in (x[1:].view(64, 128), x[:-1].view(128, 64).t(), x[:-1].view(64, 128)[::2]):
        for gamma in (weight[1:], weight[:-1]):
            cast = Cast(FUSED_CURRENT, 0, True, True)
            got, _, _ = norm.norm_quantize(view, gamma, None, 1e-5, False, False, 16, cast)
            y, _, _ = reference.norm(view.contiguous(), gamma, None, 1e-5, False, False)
            for a, b in zip(got, plainly_quantized(y, cast), strict=True):
                assert_bitwise_equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_empty(format: int, device: str) -> None:
    for rms in (False, True):
        x = torch.empty(0, 64, dtype=torch.bfloat16, device=device)
        cast = cast_of(format, True, True, device)
        (row, scale_inv, col, _), mean, rstd = norm.norm_quantize(x, None, None, 1e-5, rms, False, 32, cast)
        assert (tuple(row.shape), col.numel(), tuple(rstd.shape)) == ((0, 64), 0, (0, 1))
        assert (mean is None) == rms
        if format == FUSED_CURRENT:
            assert scale_inv.item() == 1.0


@pytest.mark.parametrize("run", ["op", "reference"])
def test_errors_name_what_is_wrong(run: str) -> None:
    def call(x: torch.Tensor, **changed: object) -> None:
        given = {"weight": None, "bias": None, "eps": 1e-5, "rms": False, "zero_centered": False, "multiple": 1}
        cast = {"format": 0, "fp8": 0, "rowwise": True, "columnwise": True, "flag": False, "floor": 0.0}
        arguments = (*({**given, **cast, "scale": None, "amax": None} | changed).values(),)
        op = torch.ops.tejit.norm_quantize
        (op.default if run == "op" else op.reference)(x, *arguments)

    x, one = torch.randn(4, 8), torch.ones(1)
    with pytest.raises(RuntimeError, match=r"x has shape \(4, 8, 1\), but a matrix"):
        call(x[..., None])
    with pytest.raises(RuntimeError, match=r"weight has shape \(4,\), but \(8,\) is needed"):
        call(x, weight=x[:, 0])
    with pytest.raises(RuntimeError, match="eps is -1"):
        call(x, eps=-1.0)
    with pytest.raises(RuntimeError, match="format is 9"):
        call(x, format=9)
    with pytest.raises(RuntimeError, match="format 1 needs scale and amax both"):
        call(x, format=1, scale=one)
    with pytest.raises(RuntimeError, match="format 0 needs scale and amax not to be given"):
        call(x, scale=one, amax=one)


@pytest.mark.gpu
def test_kernels_repeat_on_the_gpu() -> None:
    """The same bits in every run: no sum depends on which block of threads comes first."""
    x = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    cast = Cast(FUSED_CURRENT, 0, True, True)
    first = norm.norm_quantize(x, None, None, 1e-5, False, False, 1, cast)
    for _ in range(5):
        again = norm.norm_quantize(x, None, None, 1e-5, False, False, 1, cast)
        for a, b in zip((*first[0], *first[1:]), (*again[0], *again[1:]), strict=True):
            assert_bitwise_equal(a, b)


#: Of the kernels for short, for middle and for long rows: their longest, and one with vectors of other rows' length.
LENGTHS = [2048, 4096, 4104, 6144, 8192, 8200, 12288]


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("columns", LENGTHS)
def test_blocks_of_threads_with_several_rows(columns: int, format: int) -> None:
    """More rows than the GPU holds blocks: each goes through several, and through padding before them.

    The CPU's kernels are the oracle; the tests above hold them against the reference.
    """
    if format == FUSED_MXFP8:
        columns = columns // 32 * 32
    rows = 4 * torch.cuda.get_device_properties(0).multi_processor_count * 2 + 37
    for seed, (kind, usage) in enumerate(zip(KINDS, [*USAGES.values()] * len(KINDS), strict=False)):
        x = provoking(kind, (rows, columns), torch.bfloat16, seed)
        weight, bias = parameters(columns, (torch.float32, torch.bfloat16)[seed % 2], "cpu", seed)
        given = (weight, bias if seed % 3 else None, 1e-5, seed % 4 == 1, seed % 2 > 0)
        want = norm.norm_quantize(x, *given, 32, cast_of(format, *usage, "cpu", seed))
        there = (weight.cuda(), None if given[1] is None else bias.cuda(), *given[2:])
        with poisoned_memory():
            got = norm.norm_quantize(x.cuda(), *there, 32, cast_of(format, *usage, "cuda", seed))
        for name, a, b in zip((*NAMES, "mean", "rstd"), (*got[0], *got[1:]), (*want[0], *want[1:]), strict=True):
            if a is not None:
                same = same_floats if name in ("mean", "rstd") else assert_bitwise_equal
                same(a.cpu(), b, f"{name} of {kind}, {usage}, {given[2:]}")

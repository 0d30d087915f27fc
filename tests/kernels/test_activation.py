"""Activations, plain and with quantized output: against torch in float64, and against each format's own op of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tejit.kernels import activation
from tejit.kernels.activation import KINDS, reference
from tejit.kernels.fused import FUSED_CURRENT, FUSED_MXFP8, Cast
from tests.common import DEVICES, DTYPES, assert_bitwise_equal, poisoned_memory, provoking, short
from tests.common import KINDS as INPUTS
from tests.kernels.fused_casts import FORMATS, NAMES, USAGES, cast_of, plainly_quantized

SHAPES = [(1, 2), (3, 10), (127, 766), (129, 256), (32, 1024), (2, 4112), (64, 192)]
TWINS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "srelu": lambda x: F.relu(x).square(),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "sigmoid": torch.sigmoid,
}


@pytest.mark.parametrize("kind", KINDS)
def test_reference_is_near_float64(kind: str) -> None:
    """All of the line: relative to x as well, where the result is a small part of it (0.044715 x^3 is rounded too)."""
    x = torch.cat([torch.linspace(-12, 12, 100_001), torch.linspace(-90, 90, 9_001), torch.tensor([0.0, -0.0])])
    want = TWINS[kind](x.double())
    got = reference.function(x, KINDS.index(kind)).double()
    assert ((got - want).abs() <= 2e-6 * want.abs() + 1e-7 * x.abs() * (x < 0)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_ends_of_the_line(kind: str) -> None:
    """inf, NaN and the largest numbers as torch has them (but for the sign of NaN)."""
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, torch.finfo().max, torch.finfo().min, 1e-45, -1e-45])
    got, want = reference.function(x, KINDS.index(kind)), TWINS[kind](x.double()).float()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-45, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("kind", KINDS)
def test_activation_matches_the_reference(kind: str, gated: bool, device: str) -> None:
    for dtype in DTYPES:
        for seed, shape in enumerate(SHAPES):
            x = provoking(INPUTS[seed % len(INPUTS)], shape, dtype, seed).to(device) * 3
            want = reference.activation(x, KINDS.index(kind), gated)
            with poisoned_memory():
                got = activation.activation(x, kind, gated)
            assert got.dtype == dtype
            got, want = (torch.where(value == value, value, torch.nan) for value in (got, want))
            assert_bitwise_equal(got, want, f"{shape} of {dtype}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("usage", USAGES.values(), ids=USAGES)
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_fused_output_is_the_quantized_activation(
    dtype: torch.dtype, format: int, usage: tuple[bool, bool], device: str
) -> None:
    for seed, shape in enumerate(SHAPES):
        if format == FUSED_MXFP8:
            shape = (shape[0], max(64, shape[1] // 64 * 64))
        multiple = 32 if format == FUSED_MXFP8 else (1, 16, 1)[seed % 3]
        x = provoking(INPUTS[seed % len(INPUTS)], shape, dtype, seed).to(device)
        # over the shapes, each kind with a gate and without
        for number, gated in ((seed % 6, seed % 3 != 0), ((seed + 3) % 6, seed % 3 == 0)):
            y = reference.activation(x, number, gated)
            mine, theirs = cast_of(format, *usage, device, seed), cast_of(format, *usage, device, seed)
            want = plainly_quantized(F.pad(y, (0, 0, 0, -y.shape[0] % multiple)), theirs)
            with poisoned_memory():
                got = activation.activation_quantize(x, KINDS[number], gated, multiple, mine)
            for name, a, b in zip(NAMES, got, want, strict=True):
                assert_bitwise_equal(a, b, f"{name} of {shape}, {KINDS[number]}")
            if mine.amax is not None and theirs.amax is not None:
                assert_bitwise_equal(mine.amax, theirs.amax, "amax")


@pytest.mark.gpu
def test_reciprocals_on_the_gpu() -> None:
    """1 / (1 + exp) is rounded right there: many of its mantissas, against the reference on the CPU."""
    x = torch.randn(2048, 4096, generator=torch.Generator().manual_seed(0)) * 4
    for kind in ("silu", "qgelu", "sigmoid"):
        want = reference.activation(x, KINDS.index(kind), False)
        assert_bitwise_equal(activation.activation(x.cuda(), kind, False), want, kind)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_empty(gated: bool, device: str) -> None:
    x = torch.empty(0, 64, dtype=torch.bfloat16, device=device)
    cast = Cast(FUSED_CURRENT, 0, True, True)
    row, scale_inv, col, _ = activation.activation_quantize(x, "gelu", gated, 16, cast)
    columns = 32 if gated else 64
    assert (tuple(row.shape), col.numel(), scale_inv.item()) == ((0, columns), 0, 1.0)


def test_errors_name_what_is_wrong() -> None:
    x = torch.randn(4, 7)
    with pytest.raises(
        ValueError, match="kind of activation is 'tanh', but one of gelu, relu, silu, srelu, qgelu, sigmoid"
    ):
        activation.activation(x, "tanh", False)
    for op in (torch.ops.tejit.activation.default, torch.ops.tejit.activation.reference):
        with pytest.raises(RuntimeError, match="kind is 6"):
            op(x, 6, False)
        with pytest.raises(RuntimeError, match="x has 7 columns, but a gated activation needs two halves"):
            op(x, 0, True)
        with pytest.raises(RuntimeError, match=r"x has shape \(7,\), but a matrix"):
            op(x[0], 0, False)

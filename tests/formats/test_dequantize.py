"""What every direction of every format stands for is within the format's error of the original."""

import pytest
import torch

import tejit
from tests.common import DEVICES, DTYPES, provoking, short
from tests.formats.registry import each_case, quantized


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@each_case(usages=True)
def test_the_error_is_the_format_s(case, usage, dtype, device) -> None:
    x = provoking("normal", (128, 288), dtype).to(device)
    for shape in ((128, 288), (2, 64, 288)):
        t = quantized(case.quantizer(usage, device=device), x.view(shape))
        values = t.dequantize(torch.float32)
        assert values.shape == shape
        error = (values.double() - x.view(shape).double()).norm() / x.double().norm()
        assert error <= case.error, error
        assert error > 0 or case.name == "identity" or "identity" in case.name
        nominal = t.dequantize()
        assert nominal.dtype == dtype
        assert torch.equal(nominal.float(), values.to(dtype).float())


@each_case()
def test_both_directions_stand_for_the_same_tensor(case) -> None:
    """Each within the format's error: a wrong layout of one direction would be far off."""
    x = provoking("normal", (64, 160), torch.float32)
    for usage in case.usages():
        t = quantized(case.quantizer(usage), x)
        error = (t.dequantize().double() - x.double()).norm() / x.double().norm()
        assert error <= case.error


@pytest.mark.parametrize("device", DEVICES)
@each_case()
def test_operands_multiply_to_the_product(case, device) -> None:
    """Forward, dgrad and wgrad of a layer from what a quantizer makes, each by name against float64."""
    from tejit.kernels.gemm import gemm

    x = provoking("normal", (64, 96), torch.bfloat16, 1).to(device)
    w = provoking("normal", (160, 96), torch.bfloat16, 2).to(device)
    dy = provoking("normal", (64, 160), torch.bfloat16, 3).to(device)
    q = case.quantizer(internal=True, device=device)
    inner = {}
    for name, tensor in (("x", x), ("w", w), ("dy", dy)):
        torch.manual_seed(5)
        inner[name] = q.quantize_inner(tensor)

    def row(name):
        return q.rowwise_operand(inner[name])

    def column(name):
        return q.columnwise_operand(q.columnwise_inner(inner[name]))

    xd, wd, dyd = x.double(), w.double(), dy.double()
    for name, a, b, want in (
        ("forward", row("x"), row("w"), xd @ wd.t()),
        ("dgrad", row("dy"), column("w"), dyd @ wd),
        ("wgrad", column("dy"), column("x"), dyd.t() @ xd),
    ):
        got = gemm(a, b, torch.float32)
        assert got.shape == want.shape, name
        error = (got.double() - want).norm() / want.norm()
        assert error <= 1.6 * case.error + 1e-5, (name, error)


@each_case()
def test_the_bytes_are_the_same_without_kernels(case) -> None:
    x = provoking("wide", (64, 96), torch.bfloat16)
    one = quantized(case.quantizer(), x)
    with tejit.backend("torch"):
        other = quantized(case.quantizer(), x)
    for mine, theirs in zip(one._inner(), other._inner(), strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))

"""Norms and activations against torch's own in float64, forward and backward, and their quantized output."""

import pytest
import torch
import torch.nn.functional as F

from tejit import Float8CurrentScalingQuantizer, MXFP8Quantizer
from tejit.nn import fused
from tests.common import DEVICES, DTYPES, assert_bitwise_equal, short

#: Torch's functions by the names of ours.
PLAIN = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "srelu": lambda x: F.relu(x).square(),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "geglu": lambda x: F.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1],
    "reglu": lambda x: F.relu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "sreglu": lambda x: F.relu(x.chunk(2, -1)[0]).square() * x.chunk(2, -1)[1],
    "qgeglu": lambda x: x.chunk(2, -1)[0] * torch.sigmoid(1.702 * x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "glu": lambda x: torch.sigmoid(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
}


def assert_rounded(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    """Within one rounding of the dtype, and what sums of float32 lose, of the float64 value."""
    assert got.dtype == dtype, what
    assert got.shape == want.shape, what
    error = (got.double() - want).abs()
    bound = torch.finfo(dtype).eps * want.abs() + 2e-6 * want.abs().max() + torch.finfo(dtype).tiny
    assert (error <= bound).all(), f"{what}: {(error / bound).max()} times the bound"


def plain_norm(x, weight, bias, kind, zero_centered):
    gamma = weight + 1 if zero_centered else weight
    if kind == "LayerNorm":
        return F.layer_norm(x, x.shape[-1:], gamma, bias, 1e-5)
    y = F.rms_norm(x, x.shape[-1:], gamma, 1e-5)
    return y if bias is None else y + bias


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", fused.NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("shape", [(33, 767), (5, 1), (1, 128), (0, 16)], ids=short)
def test_norm(shape, dtype, kind, zero_centered, device) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape, device=device) * 3 + 1).to(dtype)
    weight, bias = (torch.randn(shape[1], device=device).to(dtype) for _ in range(2))
    bias = bias if kind == "LayerNorm" else None
    grad = torch.randn(shape, device=device).to(dtype)
    y, mean, rstd = fused.norm(x, weight, bias, 1e-5, kind, zero_centered)
    wide = [t if t is None else t.double().requires_grad_() for t in (x, weight, bias)]
    want = plain_norm(*wide, kind, zero_centered)
    if shape[0] and shape[1] > 1:  # a row of one element has no spread: all rounding
        assert_rounded(y, want.detach(), dtype, "y")
    dx, dw, db = fused.norm_backward(grad, x, weight, mean, rstd, zero_centered)
    want.backward(grad.double())
    assert dx.dtype == dtype
    assert dx.shape == x.shape
    if shape[0] and shape[1] > 1:
        assert_rounded(dx, wide[0].grad, dtype, "dx")
    if shape[0]:
        torch.testing.assert_close(dw.double(), wide[1].grad, rtol=1e-5, atol=1e-4)
        if bias is not None:
            torch.testing.assert_close(db.double(), wide[2].grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", fused.ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_activation(dtype, kind, device) -> None:
    torch.manual_seed(0)
    x = (torch.randn(33, 134, device=device) * 3).to(dtype)
    x[0, :4] = torch.tensor([0.0, -0.0, 12.0, -12.0], dtype=dtype)
    y = fused.activate(x, kind)
    wide = x.double().requires_grad_()
    want = PLAIN[kind](wide)
    assert_rounded(y, want.detach(), dtype, "y")
    grad = torch.randn(y.shape, device=device).to(dtype)
    want.backward(grad.double())
    assert_rounded(fused.activate_backward(grad, x, kind), wide.grad, dtype, "dx")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["qgelu", "silu", "srelu", "qgeglu", "swiglu", "sreglu", "glu"])
def test_activations_of_the_ends_of_the_line(kind, device) -> None:
    """Issue 14: values and gradients of the largest numbers, subnormals, infinities and NaN, each of them with each as
    its gate, are the formula's: 1.702 x is infinite where x is not yet."""
    large = torch.finfo().max
    ends = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 80, -80, large, -large, torch.inf, -torch.inf, torch.nan])
    gated = kind in fused.GATED
    a, b = (torch.cartesian_prod(ends, ends) if gated else ends[:, None].expand(-1, 2)).to(device).split(1, 1)
    x = torch.cat((a, b), 1) if gated else a

    value = PLAIN[kind](torch.cat((a, torch.ones_like(a)), 1).double() if gated else x.double())
    want = value.float() * b if gated else value.float()  # what is too small for float32 is 0 times the gate
    torch.testing.assert_close(fused.activate(x, kind), want, rtol=1e-6, atol=1e-44, equal_nan=True)

    wide = x.double().requires_grad_()
    (gradient,) = torch.autograd.grad(PLAIN[kind](wide).sum(), wide)
    found = fused.activate_backward(torch.ones_like(a), x, kind).double()
    finite = x.isfinite().all(1)  # at an infinity the formula's derivative is inf * 0
    found, gradient = found[finite], gradient[finite]
    gradient = torch.where(gradient.abs() <= large, gradient, gradient * torch.inf)
    bound = 1e-6 * gradient.abs() + 1e-37 + (2e-7 * b[finite].double().abs() if gated else 2e-7)
    assert ((found == gradient) | ((found - gradient).abs() <= bound)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(
    "quantizer", [Float8CurrentScalingQuantizer(), MXFP8Quantizer()], ids=lambda q: type(q).__name__
)
def test_quantized_output_is_the_rounded_output_quantized(quantizer, dtype, device) -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(s, device=device).to(dtype) for s in ((33, 96), (96,), (96,)))
    multiple = quantizer.alignment()
    arguments = (x, weight, bias, 1e-5, "LayerNorm", True)
    got = {"norm": fused.normed(*arguments, quantizer, multiple)[0]}
    want = {"norm": fused.norm(*arguments)[0]}
    got["swiglu"], want["swiglu"] = fused.activated(x, "swiglu", quantizer, multiple), fused.activate(x, "swiglu")
    for name, value in want.items():
        padded = F.pad(value, (0, -value.shape[1] % multiple, 0, -value.shape[0] % multiple))
        for one, other in zip(got[name], quantizer.quantize_inner(padded), strict=True):
            assert_bitwise_equal(one, other, name)

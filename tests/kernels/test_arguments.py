"""What every function of ``tejit.kernels`` asks of the tensors it is given: derivatives refused, devices checked.

The oracle of field case 69: a gradient that is lost must be an error that says which classes train.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tejit.kernels import backend, fp8, fp8_block, mxfp8, nvfp4
from tejit.kernels import gemm as gemm_kernels
from tejit.kernels.activation import activation, activation_quantize
from tejit.kernels.fused import FUSED_CURRENT, FUSED_DELAYED, Cast
from tejit.kernels.norm import norm, norm_quantize
from tests.common import assert_bitwise_equal

BACKENDS = ["kernels", "torch"]
CAST = Cast(FUSED_CURRENT, 0, True, False)
NORM = (None, None, 1e-5, False, False)


def one(value: float = 1.0, device: str = "cpu") -> Tensor:
    return torch.full((1,), value, device=device)


def plain(values: Tensor) -> gemm_kernels.Operand:
    return gemm_kernels.Operand(values, None, kind="plain")


#: Every function that takes a tensor in high precision, as a function of that tensor, ``(128, 128)``.
FUNCTIONS: dict[str, Callable[[Tensor], object]] = {
    "kernels.fp8.amax": fp8.amax,
    "kernels.fp8.quantize_current": lambda x: fp8.quantize_current(x, 0, True, False, False, 0.0),
    "kernels.fp8.quantize_delayed": lambda x: fp8.quantize_delayed(x, 0, True, False, one(), one(0.0)),
    "kernels.fp8_block.quantize": lambda x: fp8_block.quantize(x, 0, 1, True, False, False, 0.0),
    "kernels.mxfp8.quantize": lambda x: mxfp8.quantize(x, 0, True, False, False, False),
    "kernels.nvfp4.quantize": lambda x: nvfp4.quantize(
        x, True, False, False, 0, False, False, 0, 448, False, None, None, None
    ),
    "kernels.nvfp4.amax": lambda x: nvfp4.amax(x, True, False, False, 0, False),
    "kernels.norm.norm": lambda x: norm(x, *NORM),
    "kernels.norm.norm_quantize": lambda x: norm_quantize(x, *NORM, 1, CAST),
    "kernels.activation.activation": lambda x: activation(x, "relu", False),
    "kernels.activation.activation_quantize": lambda x: activation_quantize(x, "relu", False, 1, CAST),
    "kernels.gemm.gemm": lambda x: gemm_kernels.gemm(plain(x), plain(x.detach()), torch.float32),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("where", BACKENDS)
def test_derivatives_are_refused_and_not_lost(where: str, name: str) -> None:
    call, x = FUNCTIONS[name], torch.randn(128, 128)
    with backend.backend(where):
        with pytest.raises(RuntimeError, match=rf"{name} has no derivative, and [ax] requires grad: tejit\..* train"):
            call(x.clone().requires_grad_())
        with torch.no_grad():
            call(x.clone().requires_grad_())
        with (
            forward_ad.dual_level(),
            pytest.raises(RuntimeError, match=rf"{name} has no derivative, and [ax] has a tang"),
        ):
            call(forward_ad.make_dual(x, x))

        def through_functorch(x: Tensor) -> Tensor:
            call(x)
            return x

        with pytest.raises(RuntimeError, match="has no derivative"):
            torch.func.jvp(through_functorch, (x,), (x,))
        with pytest.raises(RuntimeError, match="has no derivative"):
            torch.func.grad(lambda x: through_functorch(x).sum())(x)
        call(x)


def test_a_graph_loses_neither() -> None:
    """Under TorchDynamo: a bias's gradient was lost in the view of a rounding, and every tangent in the op."""
    x, bias = torch.randn(4, 8), torch.zeros(4, requires_grad=True)

    def product(bias: Tensor) -> Tensor:
        return gemm_kernels.gemm(plain(x), plain(x), torch.bfloat16, bias)

    def tangent(x: Tensor) -> Tensor:
        return torch.func.jvp(lambda x: norm(x, *NORM)[0], (x,), (x,))[1]

    for function, argument in ((product, bias), (tangent, x)):
        with pytest.raises(Exception, match="has no derivative"):
            torch.compile(function, backend="aot_eager", fullgraph=True)(argument)


def test_the_message_names_the_tensor() -> None:
    x, weight = torch.randn(4, 8), torch.ones(8, requires_grad=True)
    with pytest.raises(RuntimeError, match="and weight requires grad"):
        norm(x, weight, None, 1e-5, False, False)
    with pytest.raises(RuntimeError, match="and bias requires grad"):
        gemm_kernels.gemm(plain(x), plain(x), torch.bfloat16, torch.ones(4, requires_grad=True))


@pytest.mark.parametrize("where", BACKENDS)
def test_nothing_is_computed_of_tensors_half_of_which_have_no_data(where: str) -> None:
    x, meta = torch.randn(128, 128), torch.ones(128, device="meta")
    calls: list[Callable[[], object]] = [
        lambda: norm(x, meta, None, 1e-5, False, False),
        lambda: norm(x, None, meta, 1e-5, False, False),
        lambda: norm_quantize(x, *NORM, 1, Cast(FUSED_DELAYED, 0, True, False, scale=one(), amax=one(0, "meta"))),
        lambda: fp8.quantize_current(x, 0, True, False, False, 0.0, one(1, "meta")),
        lambda: fp8.quantize_current_out(
            x, 0, False, 0.0, None, None, torch.empty(x.shape, dtype=torch.uint8, device="meta"), None, one()
        ),
        lambda: torch.ops.tejit.norm.default(x, meta, None, 1e-5, False, False),
    ]
    with backend.backend(where):
        for call in calls:
            with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
                call()
        y, _, _ = norm(x.to("meta"), meta, None, 1e-5, False, False)
    assert y.is_meta
    assert y.shape == x.shape


@pytest.mark.parametrize("where", BACKENDS)
def test_checks_are_those_of_the_kernels_everywhere(where: str) -> None:
    """On each backend, and without data."""
    x = torch.randn(4, 8)
    with backend.backend(where):
        for given in (x, x.to("meta")):
            ones = torch.ones(8, dtype=torch.float64, device=given.device)
            with pytest.raises(RuntimeError, match="weight has dtype float64, but float32, float16 or bfloat16"):
                norm(given, ones, None, 1e-5, False, False)
            with pytest.raises(RuntimeError, match="x has dtype float64"):
                norm(given.double(), *NORM)
            with pytest.raises(RuntimeError, match=r"x has shape \(1, 4, 8\)"):
                norm(given[None], *NORM)
            with pytest.raises(RuntimeError, match=r"bias has shape \(7,\)"):
                norm(given, None, ones.float()[1:], 1e-5, False, False)
            with pytest.raises(RuntimeError, match="eps is -1"):
                norm(given, None, None, -1.0, False, False)
            with pytest.raises(RuntimeError, match="multiple is 0"):
                norm_quantize(given, *NORM, 0, CAST)
            with pytest.raises(RuntimeError, match="multiple is -3"):
                activation_quantize(given, "relu", False, -3, CAST)
            with pytest.raises(RuntimeError, match="x has dtype float64"):
                activation(given.double(), "relu", False)


def test_results_are_contiguous_on_both_backends() -> None:
    x = torch.randn(8, 4).t()
    results = []
    for where in BACKENDS:
        with backend.backend(where):
            results.append(norm(x, *NORM)[0])
    assert all(y.is_contiguous() for y in results)
    assert_bitwise_equal(*results, "a transposed x")

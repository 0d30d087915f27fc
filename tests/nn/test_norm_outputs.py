"""What LayerNormLinear and LayerNormMLP return beside their output, and that it changes nothing else."""

import contextlib
import copy
import dataclasses

import pytest
import torch

import tejit
from tejit import IdentityQuantizer
from tejit.recipe import CustomRecipe, Float8CurrentScaling, Format, MXFP8BlockScaling
from tests.common import DEVICES
from tests.nn import twins
from tests.nn.bounds import relative_error
from tests.nn.twins import made, results

pytestmark = pytest.mark.filterwarnings("ignore:MXFP8BlockScaling")


@pytest.mark.parametrize("kind", ["linear", "gelu"])
def test_what_they_return(kind) -> None:
    """The bias that was not added, and the norm's output, through which gradient flows."""
    module, twin = made(kind, 32, 32, return_bias=True, return_layernorm_output=True)
    x, grad = torch.randn(8, 32), torch.randn(8, 32)
    bias = module.bias if kind == "linear" else module.fc2_bias

    def ours(x):
        y, returned, norm = module(x)
        assert returned is bias
        return y + returned + norm

    want = results(lambda x: twin(module, x) + twins.norm(module, x), module, x, grad)
    for chosen, bound in ((None, 1e-6), (Float8CurrentScaling(fp8_format=Format.E4M3), 0.1)):
        with tejit.autocast(enabled=chosen is not None, recipe=chosen):
            got = results(ours, module, x, grad)
        for name, value in want.items():
            assert relative_error(got[name], value) < bound, name
    module.return_bias = False
    with tejit.autocast():
        y, norm = module(x)
        assert relative_error(norm, twins.norm(module, x)) < 1e-6
        assert relative_error(y, twin(module, x)) < 0.1


def test_norm_s_output_alone_may_carry_the_gradient() -> None:
    module, _ = made("linear", 32, 16, return_layernorm_output=True)
    x = torch.randn(8, 32, requires_grad=True)
    with tejit.autocast():
        _, norm = module(x)
    norm.square().sum().backward()
    (want,) = torch.autograd.grad(twins.norm(module, x).square().sum(), x)
    assert relative_error(x.grad, want) < 1e-5


#: Quantizes nothing: what is multiplied are the values.
NO_FORMAT = CustomRecipe(lambda role: IdentityQuantizer())
TWO_DTYPES = [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16), (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "amp"), [*TWO_DTYPES, (torch.bfloat16, None), (torch.bfloat16,) * 2], ids=str)
@pytest.mark.parametrize(
    "chosen",
    [NO_FORMAT, Float8CurrentScaling(), Float8CurrentScaling(backward_override="high_precision"), MXFP8BlockScaling()],
    ids=["no format", "current", "current with backward in high precision", "MXFP8"],
)
@pytest.mark.parametrize("kind", ["linear", "swiglu"])
def test_what_is_returned_changes_nothing_else(kind, chosen, dtype, amp, device) -> None:
    """Output and gradients are the same bytes with the norm's output returned and without."""
    parameters = dtype if amp is None else torch.float32
    alone, _ = made(kind, 64, 64, device=device, dtype=parameters)
    other, _ = made(kind, 64, 64, device=device, dtype=parameters, return_layernorm_output=True)
    x = torch.randn(32, 64, device=device, dtype=dtype)
    grad = torch.randn(32, 64, device=device, dtype=amp or dtype)
    amp_on = torch.autocast(device, amp) if amp is not None else contextlib.nullcontext()
    with amp_on, tejit.autocast(recipe=chosen):
        want, got = results(alone, alone, x, grad), results(lambda x: other(x)[0], other, x, grad)
        assert want["y"].dtype == (amp or dtype)
        for name, value in want.items():
            assert torch.equal(got[name], value), name
        with torch.no_grad():
            assert torch.equal(other(x)[0], alone(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chosen", [NO_FORMAT, dataclasses.replace(NO_FORMAT, backward_override="high_precision")])
@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize(("dtype", "amp"), TWO_DTYPES, ids=str)
def test_a_norm_is_rounded_once_whatever_the_dtypes(dtype, amp, normalization, returned, chosen, device) -> None:
    """To what is multiplied, and to what is returned: each from float32, and not one from the other."""
    module, _ = made("linear", 64, 64, device=device, normalization=normalization, return_layernorm_output=returned)
    with torch.no_grad():
        module.weight.copy_(torch.eye(64))  # the output is what was multiplied
        module.bias.zero_()
    x = torch.randn(256, 64, device=device, dtype=dtype)
    with torch.autocast(device, amp), tejit.autocast(recipe=chosen):
        found = module(x)
    exact = twins.norm(copy.deepcopy(module).double(), x.double())
    for value, rounded_to in zip(found if returned else (found,), (amp, dtype), strict=False):
        assert value.dtype == rounded_to
        step = torch.finfo(rounded_to).eps
        error = (value.double() - exact).abs()
        assert (error <= 1.001 * step / 2 * exact.abs() + 4e-6).all()

"""Parameters behind an ``IdentityQuantizer``: an ``IdentityTensor`` in each module (row of Identity, field cases)."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import tejit
from tejit import IdentityQuantizer, IdentityTensor
from tejit.recipe import CustomRecipe

pytestmark = pytest.mark.filterwarnings("ignore:tejit")

MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: tejit.Linear(64, 64),
    "LayerNormLinear": lambda: tejit.LayerNormLinear(64, 64),
    "LayerNormMLP": lambda: tejit.LayerNormMLP(64, 128),
    "GroupedLinear": lambda: tejit.GroupedLinear(2, 64, 64),
}
FACTORIES = {
    "kept": lambda role: IdentityQuantizer(),
    "bfloat16": lambda role: IdentityQuantizer(dtype=torch.bfloat16),
    "weights alone": lambda role: (
        IdentityQuantizer() if role.tensor_type == "weight" else tejit.Float8CurrentScalingQuantizer()
    ),
}


def build(module: str, recipe: CustomRecipe) -> nn.Module:
    torch.manual_seed(0)
    with tejit.quantized_model_init(recipe=recipe):
        return MODULES[module]()


def call(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x, [16, 16]) if isinstance(module, tejit.GroupedLinear) else module(x)


def step(module: nn.Module, recipe: CustomRecipe, run: Callable[..., torch.Tensor] = call) -> list[torch.Tensor]:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    with tejit.autocast(recipe=recipe):
        y = run(module, x)
    module.zero_grad()
    y.square().sum().backward()
    return [y.detach(), x.grad, *[parameter.grad for parameter in module.parameters()]]


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.dim() == 2]


def test_identity_with_another_nominal_dtype_keeps_it() -> None:
    tensor = IdentityQuantizer(dtype=torch.bfloat16)(torch.randn(4, 8)).to(torch.float32)
    assert tensor.dtype == torch.float32
    assert tensor._hp_data.dtype == torch.bfloat16
    for other in (torch.empty_like(tensor), tensor.new_empty(2, 2), tensor.clone(), copy.deepcopy(tensor)):
        assert other.dtype == torch.float32
        assert other._hp_data.dtype == torch.bfloat16


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("module", MODULES)
def test_identity_parameters_are_identity_tensors_and_train_as_plain_ones(module, factory) -> None:
    recipe = CustomRecipe(FACTORIES[factory])
    ours = build(module, recipe)
    torch.manual_seed(0)
    plain = MODULES[module]()
    assert matrices(ours)
    assert all(type(parameter) is IdentityTensor for parameter in matrices(ours))
    assert all(isinstance(parameter, nn.Parameter) and parameter.dtype == torch.float32 for parameter in matrices(ours))
    for got, want in zip(step(ours, recipe), step(plain, recipe), strict=True):
        assert torch.equal(got, want)
    call(ours, torch.randn(32, 64)).sum().backward()  # outside of autocast


@pytest.mark.parametrize("module", MODULES)
def test_identity_parameters_are_copied_converted_and_loaded(module, tmp_path) -> None:
    recipe = CustomRecipe(FACTORIES["kept"])
    ours = build(module, recipe)
    want = step(ours, recipe)
    torch.save(ours.state_dict(), tmp_path / "state.pt")
    loaded = build(module, recipe)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    loaded.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    on_meta = build(module, recipe).to("meta")
    on_meta.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), assign=True)
    for other in (copy.deepcopy(ours), loaded, on_meta, build(module, recipe).to("cpu").float()):
        assert all(type(parameter) is IdentityTensor for parameter in matrices(other))
        for got, right in zip(step(other, recipe), want, strict=True):
            assert torch.equal(got, right)
    half = build(module, recipe).bfloat16()
    assert all(parameter.dtype == torch.bfloat16 for parameter in half.parameters())
    with tejit.autocast(recipe=recipe):
        assert call(half, torch.randn(32, 64).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("module", [name for name in MODULES if name != "GroupedLinear"])
def test_identity_parameters_compile_whole(module, factory) -> None:
    recipe = CustomRecipe(FACTORIES[factory])
    ours = build(module, recipe)
    want = step(ours, recipe)
    torch._dynamo.reset()
    got = step(ours, recipe, torch.compile(call, fullgraph=True, backend="aot_eager"))
    for one, right in zip(got, want, strict=True):
        torch.testing.assert_close(one, right, rtol=1e-5, atol=1e-5)


def test_a_recipe_that_names_no_quantizer_leaves_parameters_plain() -> None:
    recipe = CustomRecipe(lambda role: None if role.tensor_type == "weight" else IdentityQuantizer())
    assert type(build("Linear", recipe).weight) is nn.Parameter

"""Recipes that look at names, in one graph: CustomRecipe and overrides."""

import pytest
import torch
import torch._dynamo.testing
from torch import nn

import tejit
from tejit import Float8BlockQuantizer, Float8CurrentScalingQuantizer, HybridQuantizer
from tejit.recipe import CustomRecipe, Float8BlockScaling, Float8CurrentScaling
from tests.nn.test_compile import close


def current(role):
    return Float8CurrentScalingQuantizer(
        torch.float8_e5m2 if role.tensor_type == "grad_output" else torch.float8_e4m3fn
    )


def by_name(role):
    return (
        None
        if role.name == "block.1"
        else Float8BlockQuantizer(block_scaling_dim=2 if role.tensor_type == "weight" else 1)
    )


def mixed(role):
    if role.tensor_type == "weight":
        return None
    columnwise = Float8BlockQuantizer(block_scaling_dim=1)
    return HybridQuantizer(rowwise_quantizer=Float8CurrentScalingQuantizer(), columnwise_quantizer=columnwise)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[tejit.Linear(32, 32, name=f"block.{i}") for i in range(3)])  # torch 2.14 minds the dot


def step(function, module, x):
    x = x.clone().requires_grad_()
    torch._dynamo.mark_dynamic(x, 0)
    module.zero_grad()
    y = function(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *[p.grad.clone() for p in module.parameters()]]


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_nested_custom_recipes_are_one_graph(compiler) -> None:
    """Three recipes of one type, entered inside each other, left and entered again; three batch sizes."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module, (outer, middle, inner) = layers(), [CustomRecipe(f) for f in (current, by_name, mixed)]

    def run(x):
        with tejit.autocast(recipe=outer):
            x = module[0](x)
            with tejit.autocast(recipe=middle):
                x = module[1](module[0](x))
                with tejit.autocast(recipe=inner):
                    x = module[2](x)
                x = module[2](x)
            return module[1](x)

    counter = torch._dynamo.testing.CompileCounterWithBackend(compiler)
    compiled = torch.compile(run, backend=counter, fullgraph=True)
    for rows in (4, 6, 10, 4, 6, 10):
        x = torch.randn(rows, 32)
        for got, want in zip(step(compiled, module, x), step(run, module, x), strict=True):
            assert close(got, want, compiler == "aot_eager")
        with torch.no_grad():
            for p in module.parameters():
                p.add_(torch.randn_like(p), alpha=0.01)
    assert counter.frame_count == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_switching_custom_recipes_and_returning_recompiles_nothing() -> None:
    torch._dynamo.reset()
    module, other = layers(), layers()
    recipes = [
        *[CustomRecipe(f) for f in (current, by_name, mixed)],
        Float8CurrentScaling(overrides=(("block.1", Float8BlockScaling()), ("block.2", None))),
    ]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    compiled_other = torch.compile(other[1], backend=counter, fullgraph=True)
    for count, recipe in enumerate([*recipes, *recipes, recipes[0]], 1):
        with tejit.autocast(recipe=recipe):
            x = torch.randn(4, 32)
            for got, want in zip(step(compiled, module, x), step(module, module, x), strict=True):
                assert torch.equal(got, want)
        assert counter.frame_count == min(count, len(recipes))
    # What a recipe says of another module is no business of the graph above.
    other[1].name = "somewhere else"
    with tejit.autocast(recipe=recipes[0]):
        compiled_other(torch.randn(4, 32))
        assert counter.frame_count == len(recipes) + 1
        step(compiled, module, torch.randn(4, 32))
    assert counter.frame_count == len(recipes) + 1


def test_a_recipe_of_another_instance_recompiles() -> None:
    """Keyed by the instance: a graph made for one never runs for another, even of the same function."""
    torch._dynamo.reset()
    module, answers = layers(), {"now": Float8CurrentScalingQuantizer()}
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    x, seen = torch.randn(4, 32), []
    for number, quantizer in enumerate((answers["now"], Float8BlockQuantizer()), 1):
        answers["now"] = quantizer
        with tejit.autocast(recipe=CustomRecipe(lambda role: answers["now"])):
            seen.append(compiled(x))
            assert torch.equal(seen[-1], module(x))
        assert counter.frame_count == number
    assert not torch.equal(*seen)


def test_rotated_by_unrotated_is_one_graph_from_one_block_to_several() -> None:
    """A product that must undo one operand's Hadamard transform: 6 rows are one block of 16 and 40 are three."""
    torch._dynamo.reset()
    module = layers()
    recipe = CustomRecipe(lambda role: tejit.NVFP4Quantizer(with_rht=role.tensor_type == "input"))
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    with tejit.backend("auto"), tejit.autocast(recipe=recipe):
        for rows in (6, 40, 64):
            x = torch.randn(rows, 32)
            for got, want in zip(step(compiled, module, x), step(module, module, x), strict=True):
                assert torch.equal(got, want)
    assert counter.frame_count == 1

"""Row 85: nested, sparse and other inputs that are no plain tensors. The oracle is the same module on the values, which
are those of all parts one after the other, or on each part by itself."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import tejit
from tejit.recipe import (
    Float8CurrentScaling,
    MXFP8BlockScaling,
)
from tests.nn.recipes import ONE_A_FORMAT, context

RECIPES = {
    "none": None,
    **ONE_A_FORMAT,
    "dequantized": Float8CurrentScaling(backward_override="dequantized"),
    "high_precision": MXFP8BlockScaling(backward_override="high_precision"),
}
MODULES = {
    "Linear": lambda: tejit.Linear(32, 48),
    "return_bias": lambda: tejit.Linear(32, 48, return_bias=True),
    "LayerNorm": lambda: tejit.LayerNorm(32),
    "RMSNorm": lambda: tejit.RMSNorm(32, zero_centered_gamma=True),
    "LayerNormLinear": lambda: tejit.LayerNormLinear(32, 48, return_bias=True, return_layernorm_output=True),
    "LayerNormMLP": lambda: tejit.LayerNormMLP(32, 48),
    "checkpoint": lambda: tejit.LayerNormMLP(32, 48, checkpoint=True, activation="swiglu"),
    "GroupedLinear": lambda: tejit.GroupedLinear(2, 32, 48),
}
SEQUENCES = {
    "MultiheadAttention": lambda: tejit.MultiheadAttention(32, 2, attention_dropout=0.0),
    "input_layernorm": lambda: tejit.MultiheadAttention(
        32, 2, attention_dropout=0.0, input_layernorm=True, return_layernorm_output=True, return_bias=True
    ),
    "TransformerLayer": lambda: tejit.TransformerLayer(32, 48, 2, hidden_dropout=0.0, attention_dropout=0.0),
}


def jagged(*lengths: int, shape: tuple[int, ...] = (32,)) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(length, *shape, generator=generator) for length in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def called(module: nn.Module, x: Tensor) -> list[Tensor]:
    found = module(x, [6, 8]) if isinstance(module, tejit.GroupedLinear) else module(x)
    return list(found) if isinstance(found, tuple) else [found]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MODULES)
def test_85_a_jagged_input_is_computed_on_its_values_forward_and_backward(kind, recipe) -> None:
    torch.manual_seed(0)
    module = MODULES[kind]()
    twin, x = copy.deepcopy(module), jagged(5, 0, 9)
    values = x.values().detach().clone().requires_grad_()
    with context(RECIPES[recipe]):
        got, want = called(module, x), called(twin, values)
    assert got[0].is_nested
    assert torch.equal(got[0].offsets(), x.offsets())
    assert len(got) == len(want)
    for mine, others in zip(got, want, strict=True):
        assert torch.equal(mine.values() if mine.is_nested else mine, others)
    grad = torch.randn(want[0].shape, generator=torch.Generator().manual_seed(1))
    got[0].backward(torch.nested.nested_tensor_from_jagged(grad, x.offsets()))
    want[0].backward(grad)
    assert x.grad.is_nested
    assert torch.equal(x.grad.values(), values.grad)
    for mine, others in zip(module.parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (others.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, others.grad)
    with torch.no_grad(), context(RECIPES[recipe]):
        assert called(module, x)[0].is_nested


@pytest.mark.parametrize("recipe", ["none", "current", "mxfp8"])
@pytest.mark.parametrize("kind", SEQUENCES)
def test_85_attention_takes_each_sequence_by_itself(kind, recipe) -> None:
    """Under ``current`` the projections of all sequences share a scale, and one sequence by itself has another one, so
    the tolerance is that of FP8."""
    torch.manual_seed(0)
    module, x = SEQUENCES[kind](), jagged(5, 9, 1)
    parts = [part.detach().clone()[None].requires_grad_() for part in x.unbind()]
    with context(RECIPES[recipe]):
        got = called(module, x)
        want = [called(module, part) for part in parts]
    got[0].values().sum().backward()
    torch.stack([found[0].sum() for found in want]).sum().backward()
    assert got[0].is_nested
    assert torch.equal(got[0].offsets(), x.offsets())
    tolerance = 1e-5 if recipe == "none" else 0.1
    for i, part in enumerate(parts):
        for mine, others in (
            (got[0].unbind()[i], want[i][0][0]),
            (x.grad.unbind()[i], part.grad[0]),
        ):
            assert (mine - others).norm() <= tolerance * others.norm()
    rotary = tejit.RotaryPositionEmbedding(16)(16)
    with torch.no_grad(), context(RECIPES[recipe]):
        turned = module(x, rotary_pos_emb=rotary)
        turned = turned[0] if isinstance(turned, tuple) else turned
    assert not torch.equal(turned.values(), got[0].values())


@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
@pytest.mark.parametrize("transposed", [False, True])
def test_85_more_dimensions_and_a_ragged_one_further_on(kind, transposed) -> None:
    torch.manual_seed(0)
    module, x = MODULES[kind](), jagged(5, 2, shape=(3, 32))
    x = x.transpose(1, 2) if transposed else x
    with tejit.autocast(recipe=RECIPES["mxfp8"]):
        got = module(x)
        want = [module(part) for part in x.unbind()]
    assert got.shape[:-1] == x.shape[:-1]
    for mine, others in zip(got.unbind(), want, strict=True):
        assert torch.equal(mine, others)


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_85_a_jagged_input_is_one_graph(kind) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = MODULES[kind]()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    results = []
    with tejit.autocast():
        for run in (module, compiled):
            x = jagged(5, 0, 9)
            found = run(x)
            found = found[0] if isinstance(found, tuple) else found
            found.values().square().sum().backward()
            results.append((found.values().detach(), x.grad.values()))
    for mine, others in zip(*results, strict=True):
        assert torch.equal(mine, others)


DENSE = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
REFUSED = {
    "coo": (lambda: DENSE.to_sparse(), "sparse_coo.*to_dense"),
    "csr": (lambda: DENSE.to_sparse_csr(), "sparse_csr.*to_dense"),
    "mkldnn": (lambda: DENSE.to_mkldnn(), "_mkldnn.*to_dense"),
    "qint8": (lambda: torch.quantize_per_tensor(DENSE, 0.1, 0, torch.qint8), r"qint8.*dequantize\(\)"),
    "strided": (lambda: torch.nested.nested_tensor([DENSE, DENSE[:3]]), "nested tensor.*layout=torch.jagged"),
    "gaps": (
        lambda: torch.nested.narrow(
            DENSE.reshape(2, 4, 32), 1, torch.tensor([0, 2]), torch.tensor([3, 2]), layout=torch.jagged
        ),
        r"without gaps between its parts \(contiguous\(\)\)",
    ),
    "ragged features": (lambda: jagged(5, 9).transpose(1, 2), "the features, of one size, as its last dimension"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", [name for name, recipe in RECIPES.items() if recipe is not None])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"])
@pytest.mark.parametrize("layout", REFUSED)
def test_85_what_no_product_takes_is_refused_by_name(layout, kind, recipe) -> None:
    make, text = REFUSED[layout]
    with tejit.autocast(recipe=RECIPES[recipe]), pytest.raises(TypeError, match=f"the input is .*{text}"):
        called(MODULES[kind](), make())


@pytest.mark.filterwarnings("ignore")
def test_85_a_sparse_weight_is_refused_and_a_sparse_input_is_torch_s_without_autocast() -> None:
    module, x = tejit.Linear(32, 48), DENSE.to_sparse()
    assert torch.equal(module(x), nn.functional.linear(x, module.weight, module.bias))
    module.weight = nn.Parameter(module.weight.detach().to_sparse())
    with tejit.autocast(), pytest.raises(TypeError, match=r"the weight is .*sparse_coo"):
        module(DENSE)


def test_85_gaps_go_by_contiguous() -> None:
    module, x = tejit.Linear(32, 48), REFUSED["gaps"][0]().contiguous()
    with tejit.autocast(recipe=RECIPES["mxfp8"]):
        for mine, part in zip(module(x).unbind(), x.unbind(), strict=True):
            assert torch.equal(mine, module(part))


QUANTIZERS = {
    "current": tejit.Float8CurrentScalingQuantizer(),
    "block": tejit.Float8BlockQuantizer(),
    "mxfp8": tejit.MXFP8Quantizer(),
    "nvfp4": tejit.NVFP4Quantizer(),
    "identity": tejit.IdentityQuantizer(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", [*REFUSED, "jagged"])
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_85_quantizers_and_ops_refuse_them_by_name(quantizer, layout) -> None:
    q, x = QUANTIZERS[quantizer], jagged(32) if layout == "jagged" else REFUSED[layout][0]()
    way = r"its values\(\)" if x.layout is torch.jagged else REFUSED[layout][1]
    for run in (
        lambda: q(x),
        lambda: tejit.ops.quantize(x, q),
        lambda: tejit.ops.fake_quantize(x, q),
        lambda: tejit.ops.quantize_split(x, [8], [q]),
    ):
        with pytest.raises(TypeError, match=f"cannot quantize .*{way}"):
            run()

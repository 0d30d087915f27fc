"""LayerNormLinear, LayerNormMLP and TransformerLayer in one graph: no break, no recompile, and eager's result."""

import pytest
import torch
import torch._dynamo.testing
import torch._inductor.config as inductor_config
from torch.nn.attention import SDPBackend, sdpa_kernel

import tejit
from tejit import LayerNormLinear, LayerNormMLP, TransformerLayer
from tejit.recipe import (
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tests.common import DEVICES, short
from tests.nn.test_compile import close
from tests.nn.twins import randomised, results

torch._dynamo.config.cache_size_limit = 64


def custom(role):
    if role.tensor_type == "weight":
        return tejit.Float8BlockQuantizer()
    return tejit.Float8CurrentScalingQuantizer()


RECIPES = {
    "none": None,
    "current": Float8CurrentScaling(),
    "blocks": Float8BlockScaling(),
    "MXFP8": MXFP8BlockScaling(),
    "NVFP4": NVFP4BlockScaling(),
    "custom": CustomRecipe(custom),
    "one product only": Float8CurrentScaling(overrides=(("*fc1", None), ("*proj", Float8BlockScaling()))),
}

MODULES = {
    "linear": lambda **k: LayerNormLinear(40, 24, return_layernorm_output=True, zero_centered_gamma=True, **k),
    "gelu": lambda **k: LayerNormMLP(40, 56, **k),
    "swiglu": lambda **k: LayerNormMLP(40, 56, normalization="RMSNorm", activation="swiglu", checkpoint=True, **k),
    "qgelu": lambda **k: LayerNormMLP(40, 56, activation="qgelu", **k),
    "qgeglu": lambda **k: LayerNormMLP(40, 56, activation="qgeglu", **k),
    "sreglu": lambda **k: LayerNormMLP(40, 56, activation="sreglu", **k),
    "glu": lambda **k: LayerNormMLP(40, 56, normalization="RMSNorm", activation="glu", **k),
    "transformer": lambda **k: TransformerLayer(
        40, 56, 4, 2, hidden_dropout=0.0, attention_dropout=0.0, activation="swiglu", normalization="RMSNorm", **k
    ),
}


def case(name, dtype, device):
    """The module, a function of one input that uses it, and inputs of three sizes, batch and sequence."""
    module = randomised(MODULES[name](name="m", dtype=dtype, device=device))
    rotary = tejit.RotaryPositionEmbedding(10, device=device)

    def run(x):
        if name == "transformer":
            return module(x, rotary_pos_emb=rotary(x.shape[1]))
        y = module(x)
        return torch.cat(y, -1) if name == "linear" else y

    return module, run


def near(got: torch.Tensor, want: torch.Tensor) -> bool:
    """As tensors, within 2^-10. Inductor's attention differs from eager's in last bits; where such a bit decides which
    way an element of the next operand rounds, that element moves by a step of FP8, 2^-3 of its size, and few of the
    operand's thousands do. A wrong scale or a lost term moves them all, by at least 2^-4."""
    return ((got.double() - want.double()).norm() <= 2.0**-10 * want.double().norm()).item()


#: (compiler, module, recipe) of the fast tier; `full` has them all, in aot_eager.
FAST = [
    ("aot_eager", "linear", "MXFP8"),
    ("aot_eager", "gelu", "current"),
    ("aot_eager", "swiglu", "NVFP4"),
    ("aot_eager", "qgelu", "MXFP8"),
    ("aot_eager", "qgeglu", "blocks"),
    ("aot_eager", "sreglu", "current"),
    ("aot_eager", "glu", "MXFP8"),
    ("aot_eager", "transformer", "current"),
    ("inductor", "linear", "current"),
]
ALL = [("aot_eager", name, recipe) for name in MODULES for recipe in RECIPES] + [("inductor", "transformer", "blocks")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.bfloat16], ids=short)
@pytest.mark.parametrize(
    ("compiler", "name", "recipe"),
    [*FAST, *[pytest.param(*one, marks=pytest.mark.full) for one in ALL if one not in FAST]],
)
def test_one_graph_and_eager_s_result(compiler, name, recipe, dtype, device) -> None:
    """Four steps of three batch sizes and, where there are any, sequences of three lengths."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module, run = case(name, dtype, device)
    counter = torch._dynamo.testing.CompileCounterWithBackend(compiler)
    compiled = torch.compile(run, backend=counter, fullgraph=True)
    chosen = RECIPES[recipe]
    for step, size in enumerate([(4, 6), (6, 9), (3, 33), (4, 6)]):
        x = torch.randn(*size, 40, device=device, dtype=dtype) * (step + 1)
        grad = torch.randn_like(run(x))
        found = []
        # torch's faster attention adds up its gradients in no fixed order on the GPU
        # and inductor leaves roundings to bfloat16 out, each of which could turn one to FP8 another way
        rounding = inductor_config.patch(emulate_precision_casts=True)
        with sdpa_kernel(SDPBackend.MATH), rounding, tejit.autocast(enabled=chosen is not None, recipe=chosen):
            for function in (run, compiled):
                torch.manual_seed(step)
                found.append(results(function, module, x, grad, dynamic=(0, 1)))
        want, got = found
        for what, value in want.items():
            if (compiler, name, dtype) == ("inductor", "transformer", torch.float32):
                assert near(got[what], value), f"step {step}: {what}"
            else:
                assert close(got[what], value, compiler == "aot_eager"), f"step {step}: {what}"
        with torch.no_grad():
            for p in module.parameters():
                p.add_(torch.randn_like(p), alpha=0.01)
    assert counter.frame_count == 1
    assert not torch._dynamo.utils.counters["graph_break"]

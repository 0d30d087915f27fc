"""explain: what ran in which format and why, and no trace of having asked."""

import contextlib
import itertools
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.utils.prune
from torch import nn

import tejit
from tejit import device as hardware
from tejit import recipe as recipes
from tejit.inspect.explain import GEMMS
from tejit.kernels.gemm import emulation_reason, is_native
from tejit.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tests.common import DEVICES


def rows(explanation, layer: str) -> dict[str, tuple[str, str, str]]:
    return {p.gemm: (p.operands, p.runs, p.reason) for p in explanation.products if p.layer == layer}


def linear(i: int = 1024, o: int = 1024, **arguments) -> tejit.Linear:
    return tejit.Linear(i, o, name="layer", **arguments)


FORMATS = [
    (Float8CurrentScaling(), "FP8 E4M3 x FP8 E4M3", "FP8 E5M2 x FP8 E4M3", "FP8 E5M2 x FP8 E4M3"),
    (
        DelayedScaling(),
        "FP8 E4M3 delayed x FP8 E4M3 delayed",
        "FP8 E5M2 delayed x FP8 E4M3 delayed",
        "FP8 E5M2 delayed x FP8 E4M3 delayed",
    ),
    (
        Float8BlockScaling(),
        "FP8 E4M3 1x128 x FP8 E4M3 128x128",
        "FP8 E4M3 1x128 x FP8 E4M3 128x128",
        "FP8 E4M3 1x128 x FP8 E4M3 1x128",
    ),
    (MXFP8BlockScaling(), *["MXFP8 E4M3 x MXFP8 E4M3"] * 3),
    (
        NVFP4BlockScaling(),
        "NVFP4 x NVFP4 2D",
        "NVFP4 stochastic x NVFP4 2D",
        "NVFP4 stochastic RHT x NVFP4 RHT",
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("recipe", "fprop", "dgrad", "wgrad"), FORMATS, ids=[type(f[0]).__name__ for f in FORMATS])
def test_each_gemm_is_told_with_its_operands(recipe, fprop, dgrad, wgrad, device) -> None:
    x = torch.randn(32, 1024, device=device, dtype=torch.bfloat16, requires_grad=True)
    found = rows(tejit.explain(linear(device=device, dtype=torch.bfloat16), x, recipe=recipe), "(root)")
    assert list(found) == list(GEMMS)
    assert [operands for operands, _, _ in found.values()] == [fprop, dgrad, wgrad]
    available = {
        DelayedScaling: tejit.is_fp8_available,
        Float8CurrentScaling: tejit.is_fp8_available,
        Float8BlockScaling: tejit.is_fp8_block_scaling_available,
        MXFP8BlockScaling: tejit.is_mxfp8_available,
        NVFP4BlockScaling: tejit.is_nvfp4_available,
    }[type(recipe)]
    native, reason = available(return_reason=True, device=device)
    for _, runs, why in found.values():
        assert (runs, why) == ("native" if native else "emulated", reason)


def test_layers_that_stay_in_high_precision_say_why() -> None:
    """LLaMA-Factory#9500: a layer that cannot run in the format that was asked for is listed."""

    class Off(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, x):
            with tejit.autocast(enabled=False):
                return self.inner(x)

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(
        tejit.Linear(1024, 1024),
        nn.Linear(1024, 1024),
        nn.Linear(1024, 16),
        nn.Linear(16, 1024),
        Doubled(1024, 1024),
        Off(),
        nn.LayerNorm(1024),
        nn.Unflatten(1, (1, 1024)),
        nn.Conv1d(1, 1, 1),
    )
    tejit.name_modules(model)
    explanation = tejit.explain(model, torch.randn(4, 1024), recipe=Float8CurrentScaling(overrides=(("0", None),)))
    found = {p.layer: p for p in explanation.products}
    assert len(found) == len(explanation.products) == 7
    assert {(p.gemm, p.operands, p.runs) for p in found.values()} == {
        ("fprop, dgrad, wgrad", "float32", "high precision")
    }
    assert {name: p.reason for name, p in found.items()} == {
        "0": "override '0'",
        "1": "tejit.convert makes it a tejit.Linear",
        "2": "too small to gain: 1024 -> 16, and a square layer starts at 730",
        "3": "too small to gain: 16 -> 1024, and a square layer starts at 730",
        "4": "not a module of tejit: Doubled is a class of its own: it defines forward",
        "5.inner": "tejit.autocast is switched off around it",
        "8": "not a module of tejit",
    }
    assert found["2"].module == "Linear 1024 -> 16"


def test_products_that_do_not_run_and_operands_that_do_not_fit_say_why() -> None:
    model = nn.Sequential(linear(), tejit.Linear(1024, 1024, name="frozen").requires_grad_(False))
    first, second = (rows(tejit.explain(model, torch.randn(4, 1024)), str(index)) for index in range(2))
    assert first["dgrad"][1:] == ("not run", "the input needs no gradient")
    assert first["wgrad"][1] == "emulated"
    assert second["dgrad"][1] == "emulated"
    assert second["wgrad"][1:] == ("not run", "the weight needs no gradient")

    def qfactory(role):
        kinds = {"input": tejit.MXFP8Quantizer(), "weight": tejit.Float8CurrentScalingQuantizer(), "grad_output": None}
        return kinds[role.tensor_type]

    mixed = rows(tejit.explain(linear(), torch.randn(4, 1024), recipe=recipes.CustomRecipe(qfactory)), "(root)")
    assert mixed["fprop"] == ("MXFP8 E4M3 x FP8 E4M3", "emulated", "the operands are of two formats")
    assert mixed["wgrad"] == ("float32 x MXFP8 E4M3", "emulated", "only one operand is quantized")


@pytest.mark.parametrize("quantized", list(itertools.product([False, True], repeat=3)), ids=str)
@pytest.mark.parametrize("nothing", [None, tejit.IdentityQuantizer()], ids=["None", "Identity"])
def test_a_product_of_two_plain_operands_is_in_high_precision(nothing, quantized) -> None:
    """Which operands a GEMM multiplies is written down here: input, weight and grad_output, in this order."""
    chosen = dict(zip(("input", "weight", "grad_output"), quantized, strict=True))

    def qfactory(role):
        return tejit.MXFP8Quantizer() if chosen[role.tensor_type] else nothing

    x = torch.randn(4, 1024, requires_grad=True)
    explanation = tejit.explain(linear(), x, recipe=recipes.CustomRecipe(qfactory))
    found = {gemm.strip(): p.runs for p in explanation.products for gemm in p.gemm.split(",")}
    low = {
        "fprop": chosen["input"] or chosen["weight"],
        "dgrad": chosen["grad_output"] or chosen["weight"],
        "wgrad": chosen["grad_output"] or chosen["input"],
    }
    assert found == {gemm: "emulated" if low[gemm] else "high precision" for gemm in GEMMS}
    emulated = sum(low.values())
    assert f"; 0 GEMMs native, {emulated} GEMMs emulated;" in str(explanation)
    assert str(explanation).splitlines()[0].endswith(f"layers in high precision: {int(emulated == 0)}")


def test_a_small_layer_of_ours_is_quantized_and_told_to_gain_nothing() -> None:
    found = rows(tejit.explain(linear(16, 16), torch.randn(4, 16, requires_grad=True)), "(root)")
    reason = "too small to gain: 16 -> 16, and a square layer starts at 730"
    assert [why.endswith(reason) for *_, why in found.values()] == [True] * 3


def test_modules_with_several_products_are_told_by_product() -> None:
    """The names are those that patterns match; a quantized weight is told as what it is."""
    recipe = Float8CurrentScaling(overrides=(("mlp.fc1", MXFP8BlockScaling()), ("mlp.fc2", None)))
    with tejit.quantized_model_init(recipe=recipe):
        model = nn.ModuleDict(
            {"mlp": tejit.LayerNormMLP(1024, 2048, name="mlp"), "out": tejit.LayerNormLinear(1024, 1024)}
        )
    tejit.name_modules(model)
    model.forward = lambda x: model["out"](model["mlp"](x))
    explanation = tejit.explain(model, torch.randn(4, 1024), recipe=recipe)
    first, second, out = (rows(explanation, name) for name in ("mlp.fc1", "mlp.fc2", "out"))
    assert {operands for operands, *_ in first.values()} == {"MXFP8 E4M3 x MXFP8 E4M3"}
    assert {runs for _, runs, _ in first.values()} == {"emulated"}  # the norm's parameters need dgrad
    assert second == {"fprop, dgrad, wgrad": ("float32", "high precision", "override 'mlp.fc2'")}
    assert out["fprop"][0] == "FP8 E4M3 x FP8 E4M3"
    modules = {p.layer: p.module for p in explanation.products}
    assert modules["mlp.fc1"] == "LayerNormMLP 1024 -> 2048"


@pytest.mark.parametrize(("recipe", "fprop", "dgrad", "wgrad"), FORMATS, ids=[type(f[0]).__name__ for f in FORMATS])
def test_groups_are_told_as_one(recipe, fprop, dgrad, wgrad) -> None:
    model = nn.ModuleDict({"experts": tejit.GroupedLinear(3, 1024, 2048)})
    model.forward = lambda x: model["experts"](x, [1, 0, 3])
    tejit.name_modules(model)
    explanation = tejit.explain(model, torch.randn(4, 1024), recipe=recipe)
    assert {p.module for p in explanation.products} == {"GroupedLinear 3 x 1024 -> 2048"}
    found = rows(explanation, "experts")
    assert [operands for operands, *_ in found.values()] == [fprop, dgrad, wgrad]
    assert [runs for _, runs, _ in found.values()] == ["emulated", "not run", "emulated"]
    for weight in ("weight0", "weight1"):  # the last one trains
        getattr(model["experts"], weight).requires_grad_(False)
    assert rows(tejit.explain(model, torch.randn(4, 1024), recipe=recipe), "experts") == found
    model["experts"].requires_grad_(False)
    frozen = rows(tejit.explain(model, torch.randn(4, 1024), recipe=recipe), "experts")
    assert frozen["wgrad"][1:] == ("not run", "the weight needs no gradient")


@pytest.mark.parametrize("how", ["pruned", "weight_norm", "spectral_norm", "a buffer"])
def test_weights_that_are_no_parameters_are_told_too(how) -> None:
    model = nn.Sequential(linear())
    if how == "pruned":
        nn.utils.prune.l1_unstructured(model[0], "weight", 0.5)
    elif how == "a buffer":
        values = model[0].weight.detach()
        del model[0].weight
        model[0].register_buffer("weight", values)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            getattr(nn.utils, how)(model[0])
    found = rows(tejit.explain(model, torch.randn(4, 1024)), "0")
    assert found["fprop"][:2] == ("FP8 E4M3 x FP8 E4M3", "emulated")
    assert found["wgrad"][1] == ("not run" if how == "a buffer" else "emulated")


def test_groups_are_told_as_the_recipe_has_them() -> None:
    model = nn.ModuleDict({"experts": tejit.GroupedLinear(2, 1024, 1024)})
    model.forward = lambda x: model["experts"](x, [1, 3])
    tejit.name_modules(model)
    x = torch.randn(4, 1024)

    def qfactory(role):
        return tejit.MXFP8Quantizer() if role.module_type == "grouped_linear" else None

    found = rows(tejit.explain(model, x, recipe=recipes.CustomRecipe(qfactory)), "experts")
    assert found["fprop"][0] == "MXFP8 E4M3 x MXFP8 E4M3"
    off = rows(tejit.explain(model, x, recipe=Float8CurrentScaling(overrides=(("exp*", None),))), "experts")
    assert off == {"fprop, dgrad, wgrad": ("float32", "high precision", "override 'exp*'")}


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_a_backward_in_high_precision_is_told(override) -> None:
    x = torch.randn(4, 1024, requires_grad=True)
    found = rows(tejit.explain(linear(), x, recipe=Float8CurrentScaling(backward_override=override)), "(root)")
    assert found["fprop"][:2] == ("FP8 E4M3 x FP8 E4M3", "emulated")
    assert {found["dgrad"], found["wgrad"]} == {("float32", "high precision", f"backward_override={override!r}")}


def test_a_layer_without_a_name_under_overrides_says_so() -> None:
    recipe = Float8CurrentScaling(overrides=(("no_name_matches_this", None),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.randn(4, 1024, requires_grad=True)
        found = rows(tejit.explain(tejit.Linear(1024, 1024), x, recipe=recipe), "(root)")
    assert all("it has no name, so that no override can match it" in why for *_, why in found.values())


def test_a_weight_that_is_read_past_its_layer_is_told() -> None:
    """nn.TransformerEncoderLayer in evaluation reads the weights and calls no linear layer."""
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    tejit.convert(layer, filter_fn=lambda module, name: name.startswith("linear"))
    with torch.no_grad():
        explanation = tejit.explain(layer, torch.randn(2, 5, 32))
    assert rows(explanation, "linear1")["fprop, dgrad, wgrad"][1:] == (
        "not run",
        "its forward was not called; a caller may read its weight",
    )


def test_nothing_is_left_behind() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm, self.calls = linear(), nn.BatchNorm1d(1024), 0

        def forward(self, x):
            self.calls += 1
            if len(x) == 3:
                raise RuntimeError("not run to its end")
            self.last = x
            self.norm.register_buffer("late", torch.zeros(1))
            return nn.functional.dropout(self.norm(self.layer(x))) * random.random() * np.random.random()

    torch.manual_seed(0)
    model, seen = Model(), []
    handle = model.layer.register_forward_hook(lambda *_: seen.append("hook"))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    held = model.norm._buffers
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    x = torch.randn(8, 1024, requires_grad=True)
    generators = torch.get_rng_state(), *generators[1:]

    with pytest.raises(RuntimeError, match="not run"):
        tejit.explain(model, torch.randn(3, 1024))
    torch.set_rng_state(generators[0])
    tejit.explain(model, x, recipe=NVFP4BlockScaling())
    assert seen == ["hook"]
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert model.calls == 0
    assert model.norm._buffers is held
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert x.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert np.array_equal(np.random.get_state()[1], generators[2])
    assert not model.layer._forward_pre_hooks
    handle.remove()
    assert not model.layer._forward_hooks


@pytest.mark.parametrize("nested", [False, True])
def test_the_state_of_delayed_scaling_is_as_before(nested) -> None:
    recipe, x = DelayedScaling(amax_history_len=4), torch.randn(4, 1024)
    layer = linear()
    keys = list(layer.state_dict())
    with tejit.autocast(recipe=recipe) if nested else contextlib.nullcontext():
        tejit.explain(layer, x, recipe=recipe)
    assert list(layer.state_dict()) == keys
    with tejit.autocast(recipe=recipe):
        layer(x).sum().backward()
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    with tejit.autocast(recipe=recipe) if nested else contextlib.nullcontext():
        tejit.explain(layer, 100 * x, recipe=recipe)
    assert all(torch.equal(buffer, before[name]) for name, buffer in layer.named_buffers())


def test_a_compiled_model_is_explained_without_compiling() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(linear(), linear())
    want = tejit.explain(model, torch.randn(4, 1024))
    model.compile(backend="aot_eager", fullgraph=True)
    assert tejit.explain(model, torch.randn(4, 1024)).products == want.products
    wrapped = tejit.explain(torch.compile(model, backend="aot_eager"), torch.randn(4, 1024))
    assert [p[2:] for p in wrapped.products] == [p[2:] for p in want.products]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


def test_the_recipe_is_the_one_given_the_one_around_or_the_default() -> None:
    layer, x = linear(), torch.randn(4, 1024)
    assert tejit.explain(layer, x).recipe == recipes.default_recipe()
    with tejit.autocast(recipe=MXFP8BlockScaling()):
        assert tejit.explain(layer, x).recipe == MXFP8BlockScaling()
        assert tejit.explain(layer, x, recipe=NVFP4BlockScaling()).recipe == NVFP4BlockScaling()
    with pytest.raises(TypeError, match="recipe is 'mxfp8'"):
        tejit.explain(layer, x, recipe="mxfp8")
    with pytest.raises(TypeError, match="module is 3"):
        tejit.explain(3, x)


def test_amp_and_named_inputs_count() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1024, 1024)

        def forward(self, *, states):
            return self.layer(states)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        explanation = tejit.explain(Model(), states=torch.randn(4, 1024))
    assert rows(explanation, "layer")["fprop, dgrad, wgrad"][0] == "bfloat16"


def test_text_and_html_tell_the_same() -> None:
    model = nn.ModuleDict({"a<b": nn.Linear(1024, 1024)})
    model.forward = lambda x: model["a<b"](x)
    explanation = tejit.explain(model, torch.randn(4, 1024))
    text, html = str(explanation), explanation._repr_html_()
    assert text.splitlines()[0] == (
        "Float8CurrentScaling on cpu: 1 layers; 0 GEMMs native, 0 GEMMs emulated; layers in high precision: 1"
    )
    assert text.splitlines()[2].split() == ["layer", "module", "gemm", "operands", "runs", "reason"]
    assert "a<b    Linear 1024 -> 1024  fprop, dgrad, wgrad  float32   high precision  tejit.convert makes" in text
    assert "<td" in html
    assert "a&lt;b" in html
    assert "a<b" not in html


def sample_operands():
    """Operands of every format, element type and block, in both directions."""
    makers = [tejit.Float8CurrentScalingQuantizer(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]
    makers += [
        tejit.Float8BlockQuantizer(dtype, block_scaling_dim=dim)
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        for dim in (1, 2)
    ]
    makers += [tejit.MXFP8Quantizer(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]
    makers += [tejit.NVFP4Quantizer(), tejit.NVFP4Quantizer(with_rht=True), tejit.IdentityQuantizer()]
    for maker in makers:
        made = maker.replace(internal=True).quantize_inner(torch.ones(32, 32))
        yield maker.rowwise_operand(made)
        yield maker.columnwise_operand(made)


@pytest.mark.parametrize("every_gemm_is_there", [False, True])
def test_a_reason_is_given_exactly_where_a_pair_is_emulated(every_gemm_is_there, monkeypatch) -> None:
    if every_gemm_is_there:
        for name in ("fp8_gemm_reason", "fp8_block_gemm_reason", "mxfp8_gemm_reason", "nvfp4_gemm_reason"):
            monkeypatch.setattr(hardware, name, lambda device: None)
        monkeypatch.setattr(hardware, "_fp8_gemm", {})  # what was asked before
    operands, native = list(sample_operands()), 0
    for a, b in itertools.product(operands, repeat=2):
        assert (emulation_reason(a, b) is None) == is_native(a, b), (a, b)
        native += is_native(a, b)
    assert (native > 0) == every_gemm_is_there


def test_hybrid_gradients_in_blocks_name_what_torch_lacks(monkeypatch) -> None:
    monkeypatch.setattr(hardware, "fp8_block_gemm_reason", lambda device: None)
    quantizers = Float8BlockScaling(fp8_format=Format.HYBRID).linear
    x = torch.ones(32, 32)
    a = quantizers.grad_output.rowwise.rowwise_operand(quantizers.grad_output.rowwise.quantize_inner(x))
    b = quantizers.weight.columnwise.columnwise_operand(quantizers.weight.columnwise.quantize_inner(x))
    assert emulation_reason(a, b) == "torch multiplies blocks of 128 in E4M3 only"

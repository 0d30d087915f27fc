"""Rows 84 and 94: tracers. To ``torch.fx`` a module of tejit's is one call, so that the graph quantizes where the model
would; ``torch.jit`` refuses it. The oracle is the model itself."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import tejit
from tejit.nn.twins import TransposedLinear
from tests.nn.recipes import ONE_A_FORMAT, context

RECIPES = {
    "none": None,
    **ONE_A_FORMAT,
}


def transposed() -> nn.Module:
    module = tejit.Linear(32, 32)
    module.__class__ = TransposedLinear
    return module


class Net(nn.Module):
    """Every module of tejit's, one whose input the tracer takes for a constant, and a quantized parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = tejit.Linear(32, 32)
        self.norm = tejit.LayerNorm(32)
        self.centered = tejit.RMSNorm(32, zero_centered_gamma=True)
        self.norm_linear = tejit.LayerNormLinear(32, 32, return_bias=True)
        self.mlp = tejit.LayerNormMLP(32, 64)
        self.experts = tejit.GroupedLinear(2, 32, 32)
        self.rotary = tejit.RotaryPositionEmbedding(16)
        self.layer = tejit.TransformerLayer(32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0)
        self.attention = tejit.MultiheadAttention(32, 2, attention_dropout=0.0)
        self.transposed = transposed()
        self.inner = nn.Sequential(tejit.Linear(32, 32), nn.GELU(), tejit.Linear(32, 32))
        self.register_buffer("constant", torch.randn(4, 32))
        self.quantized = nn.Parameter(tejit.MXFP8Quantizer()(torch.randn(32, 32)))

    def forward(self, x: Tensor, first: bool | None = None) -> Tensor:
        x = self.centered(self.norm(self.linear(x, first)))
        x, bias = self.norm_linear(x)
        x = self.experts(self.mlp(x + bias, is_first_microbatch=first), [4, 12])
        x = self.layer(x, rotary_pos_emb=self.rotary(x.shape[1]))
        x = self.transposed(self.attention(x)) + self.inner(self.constant).sum()
        return F.linear(x, self.quantized)


INPUT = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))


class EverythingInside(fx.Tracer):
    """A tracer with leaves of its own choice, none of them ours: torch.ao.quantization and others have such."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.GELU)


def with_own_tracer(net: nn.Module) -> fx.GraphModule:
    return fx.GraphModule(net, EverythingInside().trace(net))


def under_autocast(net: nn.Module) -> fx.GraphModule:
    with tejit.autocast(recipe=RECIPES["current"]):
        net(INPUT)
        return fx.symbolic_trace(net)


TRACED = {
    "symbolic_trace": fx.symbolic_trace,
    "own tracer": with_own_tracer,
    "under autocast": under_autocast,
    "traced again": lambda net: fx.symbolic_trace(fx.symbolic_trace(net)),
    "deepcopy": lambda net: copy.deepcopy(fx.symbolic_trace(net)),
    "Interpreter": lambda net: fx.Interpreter(fx.symbolic_trace(net)).run,
    "Transformer": lambda net: fx.Transformer(fx.symbolic_trace(net)).transform(),
}


@pytest.mark.filterwarnings("ignore:tejit. aten")
@pytest.mark.parametrize("way", TRACED)
def test_84_a_traced_model_quantizes_where_the_model_does(way) -> None:
    torch.manual_seed(0)
    net = Net()
    traced = TRACED[way](net)
    plain = net(INPUT)
    for name, recipe in RECIPES.items():
        with torch.no_grad(), context(recipe):
            want = net(INPUT)
            assert torch.equal(traced(INPUT), want), name
        assert torch.equal(want, plain) == (recipe is None), name


@pytest.mark.filterwarnings("ignore:tejit. aten")
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_84_a_traced_model_trains_as_the_model_does(recipe) -> None:
    torch.manual_seed(0)
    net = Net()
    other = copy.deepcopy(net)
    traced = fx.symbolic_trace(other)
    for _ in range(2):
        for run in (net, traced):
            run.zero_grad()
            with context(RECIPES[recipe]):
                out = run(INPUT)
            out.square().sum().backward()
        for (name, mine), others in zip(other.named_parameters(), net.parameters(), strict=True):
            assert torch.equal(mine.grad, others.grad), name


def test_84_every_module_is_a_leaf() -> None:
    called = [node.target for node in fx.symbolic_trace(Net()).graph.nodes if node.op == "call_module"]
    ours = [name for name, _ in Net().named_children() if name != "inner"]
    assert set(called) == {*ours, "inner.0", "inner.1", "inner.2"}


def test_84_features_are_extracted_from_a_traced_model() -> None:
    """As torchvision's ``create_feature_extractor`` does: outputs become those of nodes inside."""
    net = Net()
    traced = fx.symbolic_trace(net)
    node = next(node for node in traced.graph.nodes if node.target == "norm_linear")
    traced.graph.erase_node(next(node for node in traced.graph.nodes if node.op == "output"))
    with traced.graph.inserting_after(node):
        traced.graph.output(node)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    with torch.no_grad(), tejit.autocast():
        want = net.norm_linear(net.centered(net.norm(net.linear(INPUT))))
        assert torch.equal(traced(INPUT)[0], want[0])


class Sub(tejit.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def hooked(kind: str) -> nn.Module:
    module = tejit.Linear(32, 32)
    if kind == "pre":
        module.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    elif kind == "post":
        module.register_forward_hook(lambda module, inputs, output: output * 2)
    elif kind == "replaced":
        forward = module.forward
        module.forward = lambda x: forward(x) * 2
    return module


WHOLE = {
    "pre": lambda: hooked("pre"),
    "post": lambda: hooked("post"),
    "replaced": lambda: hooked("replaced"),
    "subclass": lambda: Sub(32, 32),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_84_what_a_call_would_do_twice_is_refused_and_right_as_a_leaf(kind) -> None:
    model = nn.Sequential(WHOLE[kind]())
    with pytest.raises(RuntimeError, match=r"is_leaf_module returns True.*torch\.compile or torch\.export"):
        fx.symbolic_trace(model)

    class Leaves(fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return isinstance(module, tejit.Linear)

    traced = fx.GraphModule(model, Leaves().trace(model))
    with torch.no_grad(), tejit.autocast():
        assert torch.equal(traced(INPUT), model(INPUT))


def test_84_a_norm_of_a_class_of_its_own_is_traced_through() -> None:
    class Twice(tejit.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    model = nn.Sequential(Twice(32))
    assert torch.equal(fx.symbolic_trace(model)(INPUT), model(INPUT))


ROOTS = {
    "Linear": lambda: tejit.Linear(32, 32),
    "LayerNormLinear": lambda: tejit.LayerNormLinear(32, 32),
    "LayerNormMLP": lambda: tejit.LayerNormMLP(32, 32),
    "GroupedLinear": lambda: tejit.GroupedLinear(1, 32, 32),
    "MultiheadAttention": lambda: tejit.MultiheadAttention(32, 2),
    "TransformerLayer": lambda: tejit.TransformerLayer(32, 32, 2),
}


@pytest.mark.parametrize("kind", ROOTS)
def test_84_a_module_by_itself_says_how_it_is_traced(kind) -> None:
    module = ROOTS[kind]()
    with pytest.raises(RuntimeError, match=r"torch\.nn\.Sequential\(module\)"):
        fx.symbolic_trace(module)
    node = fx.Graph().placeholder("x")
    with pytest.raises(RuntimeError, match="no submodule of what is traced"):
        module(fx.Proxy(node), [1]) if kind == "GroupedLinear" else module(fx.Proxy(node))


class Inside(nn.Module):
    def __init__(self, **arguments) -> None:
        super().__init__()
        self.linear, self.arguments = tejit.Linear(32, 32), arguments

    def forward(self, x: Tensor) -> Tensor:
        with tejit.autocast(**self.arguments):
            return self.linear(x)


@pytest.mark.parametrize("enabled", [False, True])
def test_84_an_autocast_inside_what_is_traced_is_refused(enabled) -> None:
    """The graph would lose it. So are one that switches off, and one around leaves of torch's that hold our modules."""
    model = nn.Sequential(Inside(enabled=enabled))
    torch.compile(lambda x: x + 1, backend="eager")(INPUT)
    with pytest.raises(RuntimeError, match="around the call of the traced module"):
        fx.symbolic_trace(model)
    with tejit.autocast(), pytest.raises(RuntimeError, match="the graph would lose it"):
        fx.symbolic_trace(model)
    with tejit.autocast():  # nothing of it is left
        assert model[0].linear(INPUT).shape == INPUT.shape
    encoder = tejit.convert(nn.TransformerEncoderLayer(32, 2, 32, batch_first=True))

    @tejit.autocast()
    def run(x: Tensor) -> Tensor:
        return encoder(x)

    with pytest.raises(RuntimeError, match="the graph would lose it"):
        fx.symbolic_trace(run)


def test_84_another_thread_may_trace_meanwhile() -> None:
    model, inside, go_on, found = nn.Sequential(tejit.Linear(32, 32)), threading.Event(), threading.Event(), []

    class Waits(fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            inside.set()
            assert go_on.wait(60)
            return True

    thread = threading.Thread(target=lambda: found.append(Waits().trace(model)))
    thread.start()
    try:
        assert inside.wait(60)
        with tejit.autocast():
            pass
    finally:
        go_on.set()
        thread.join()
    assert found


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("recipe", [name for name, recipe in RECIPES.items() if recipe is not None])
def test_84_make_fx_records_the_operations_that_quantize(recipe, pre_dispatch, dynamo) -> None:
    """Also once TorchDynamo was at work, which wraps torch.fx's tracers."""
    torch.manual_seed(0)
    if dynamo:
        torch.compile(lambda x: x + 1, backend="eager")(INPUT)
    model = nn.Sequential(Inside(recipe=RECIPES[recipe]), nn.GELU())
    with torch.no_grad():
        graph = make_fx(model, pre_dispatch=pre_dispatch)(INPUT)
        want = model(INPUT)
        assert not torch.equal(want, F.gelu(model[0].linear(INPUT)))
        assert torch.equal(graph(INPUT), want)
    assert any(str(node.target).startswith("tejit.") for node in graph.graph.nodes)


def test_84_ops_take_what_is_traced_and_quantizers_say_so() -> None:
    q = tejit.MXFP8Quantizer()
    graph = fx.symbolic_trace(lambda x: tejit.ops.fake_quantize(x, q) * 2)
    x = torch.randn(32, 32)
    assert torch.equal(graph(x), q(x).dequantize() * 2)
    with pytest.raises(TypeError, match=r"Proxy.*tejit\.ops\.quantize"):
        fx.symbolic_trace(lambda x: q(x))


@pytest.mark.filterwarnings("ignore:tejit. aten", "ignore::DeprecationWarning")
def test_84_torch_ao_leaves_the_modules_alone() -> None:
    from torch.ao.quantization import get_default_qconfig_mapping, quantize_fx

    model = nn.Sequential(tejit.Linear(32, 32), nn.ReLU()).eval()
    prepared = quantize_fx.prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping("x86"), (INPUT,))
    assert type(prepared.get_submodule("0")) is tejit.Linear


# -- torch.jit ----------------------------------------------------------------------------------------------
REFUSED_BY_JIT = r"torch\.jit\.trace and torch\.jit\.script cannot record .*torch\.compile or torch\.export"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", ["none", "current", "mxfp8", "delayed"])
@pytest.mark.parametrize("kind", ROOTS)
def test_94_torch_jit_is_refused_by_name(kind, recipe) -> None:
    """Without autocast too: the program would not quantize where it is called under one."""
    module = ROOTS[kind]()
    x = (INPUT, [16]) if kind == "GroupedLinear" else (INPUT,)
    with context(RECIPES[recipe]):
        module(*x)
        for model in (module, nn.Sequential(module)) if kind != "GroupedLinear" else (module,):
            with pytest.raises(RuntimeError, match=REFUSED_BY_JIT):
                torch.jit.script(model)
            with pytest.raises(RuntimeError, match=REFUSED_BY_JIT):
                torch.jit.trace(lambda y, model=model: model(y, *x[1:]), INPUT)
        if kind != "GroupedLinear":
            with pytest.raises(RuntimeError, match=REFUSED_BY_JIT):
                torch.jit.trace_module(module, {"forward": INPUT})
        assert module(*x) is not None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [lambda: tejit.LayerNorm(32), lambda: tejit.RotaryPositionEmbedding(16)])
def test_94_scripting_any_module_is_refused_by_name(make) -> None:
    with pytest.raises(RuntimeError, match=REFUSED_BY_JIT):
        torch.jit.script(make())


@pytest.mark.filterwarnings("ignore")
def test_94_a_norm_is_traced_as_torch_s() -> None:
    module = tejit.LayerNorm(32)
    assert torch.equal(torch.jit.trace(module, INPUT)(INPUT), module(INPUT))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "q",
    [
        tejit.Float8CurrentScalingQuantizer(),
        tejit.Float8BlockQuantizer(),
        tejit.MXFP8Quantizer(),
        tejit.NVFP4Quantizer(),
        tejit.IdentityQuantizer(),
    ],
    ids=lambda q: type(q).__name__,
)
def test_94_quantized_tensors_and_quantizers_in_torch_jit(q) -> None:
    x, w, other = torch.randn(32, 32), q(torch.randn(32, 32)), q(torch.randn(32, 32))
    for function in (
        lambda x: q(x).dequantize(),
        lambda x: q.replace(internal=True)(x).dequantize(),
        lambda x: x @ w.dequantize(),
        lambda x: tejit.ops.fake_quantize(x, q),
        lambda x: tejit.ops.quantize(x, q)[0],
    ):
        with pytest.raises(RuntimeError, match=REFUSED_BY_JIT):
            torch.jit.trace(function, x)
    program = torch.jit.trace(F.linear, (x, w))
    for each in (w, other):
        assert torch.equal(program(x, each), F.linear(x, each))

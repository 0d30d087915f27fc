"""``q(x)`` in a graph, of every quantizer and from every place; and what it takes of TorchDynamo."""

import subprocess
import sys
import threading

import pytest
import torch
import torch._dynamo.testing
from torch import nn

import tejit
from tejit import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    MXFP8Quantizer,
    traced_constants,
)
from tejit.dynamo import register_value_opaque_quantizer
from tests.dynamo.samples import QUANTIZERS, SHAPE


@register_value_opaque_quantizer
class Mine(Float8CurrentScalingQuantizer):
    """A user's class."""


class Unregistered(Float8CurrentScalingQuantizer):
    """A user's class that is compared by identity."""


GLOBAL = MXFP8Quantizer()
ALL = {**QUANTIZERS, "mine": Mine(), "unregistered": Unregistered()}


class Holder(nn.Module):
    def __init__(self, q):
        super().__init__()
        self.q = q

    def forward(self, x):
        return self.q(x).dequantize()


def compiled(function, backend="aot_eager"):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True), counter


def check(function, *arguments):
    run, counter = compiled(function)
    want = function(*arguments)
    for _ in range(2):
        got = run(*arguments)
        assert torch.equal(got, want)
    assert counter.frame_count == 1


@pytest.mark.parametrize("internal", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_every_quantizer_is_called_in_a_graph(name, internal) -> None:
    check(lambda x, q: q(x).dequantize(), torch.randn(SHAPE), ALL[name].replace(internal=internal))


def made(x):
    q = Float8CurrentScalingQuantizer(torch.float8_e5m2, amax_epsilon=0.5, columnwise=False)
    return q(x).dequantize() + Mine()(x).dequantize() + MXFP8Quantizer(internal=True)(x).dequantize()


def with_usage(x, q):
    return q.with_usage(columnwise=False)(x).dequantize() + q.replace(internal=True)(x).dequantize()


def out(x, q):
    target = q.make_empty(tuple(x.shape), device=x.device)
    return q(x, out=target).dequantize()


PLACES = {
    "argument": (lambda x, q: q(x).dequantize(), GLOBAL),
    "closure": (lambda x, q=GLOBAL: q(x).dequantize(),),
    "global": (lambda x: GLOBAL(x).dequantize(),),
    "module": (Holder(GLOBAL),),
    "list": (lambda x, many: many[0](x).dequantize() + many[1](x).dequantize(), [GLOBAL, Mine()]),
    "dict": (lambda x, many: many["a"](x).dequantize(), {"a": GLOBAL}),
    "made in the region": (made,),
    "another usage": (with_usage, GLOBAL),
    "child of a hybrid": (lambda x, q: q.rowwise_quantizer(x).dequantize(), QUANTIZERS["hybrid"]),
    "dtype": (lambda x, q: q(x, dtype=torch.bfloat16).dequantize(), GLOBAL),
    "keywords": (lambda x, q: q(**{"x": x}).dequantize(), GLOBAL),
    "default device": (out, GLOBAL),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_quantizer_is_called_wherever_it_comes_from(place) -> None:
    function, *arguments = PLACES[place]
    check(function, torch.randn(SHAPE), *arguments)


def test_a_call_writes_into_out_and_has_a_gradient() -> None:
    x = torch.randn(SHAPE)
    for q in (GLOBAL, Mine()):
        target, want = q(torch.zeros(SHAPE)), q(x)
        run, _ = compiled(lambda x, q, target: q(x, out=target).dequantize())
        assert torch.equal(run(x, q, target), want.dequantize())
        assert torch.equal(target.dequantize(), want.dequantize())
        leaf = x.clone().requires_grad_()
        run, _ = compiled(lambda x, q: q(x).dequantize() * 3)
        run(leaf, q).sum().backward()
        assert torch.equal(leaf.grad, torch.full(SHAPE, 3.0))


@pytest.mark.parametrize("name", ["current", "current_e5m2", "mxfp8", "mxfp8_2d", "identity"])
def test_what_a_graph_wrote_into_a_tensor_the_same_graph_reads(name) -> None:
    """It read the old values, silently, and the new ones were there when it had ended."""
    q, x = QUANTIZERS[name], torch.randn(SHAPE)
    ways = [
        lambda x, t: q.quantize(x, out=t).dequantize(),
        lambda x, t: (q(x, out=t), t.dequantize())[1],
        lambda x, t: (q.update_quantized(x, t), t.dequantize())[1],
    ]
    for maker in (q, q.with_usage(columnwise=False)):
        want = maker(x)
        for way in ways:
            target = maker(torch.zeros(SHAPE))
            run, _ = compiled(way)
            assert torch.equal(run(x, target), want.dequantize())
            for got, wanted in zip(target._inner(), want._inner(), strict=True):
                assert (got is None and wanted is None) or torch.equal(got, wanted)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_delayed_scaling_s_quantizer_collects_amax_in_a_graph(backend) -> None:
    """Its tensors do not know it there, for it is no value; whoever needs it is told."""
    mine, want = [Float8Quantizer(scale=torch.full((1,), 3.0), amax=torch.zeros(1)) for _ in range(2)]
    run, counter = compiled(lambda x, q: q(x), backend)
    for factor in (1.0, 5.0, 2.0):
        x = torch.randn(SHAPE) * factor
        got = run(x, mine)
        assert torch.equal(got.dequantize(), want(x).dequantize())
        assert torch.equal(mine.amax, want.amax)
    assert counter.frame_count == 1
    with pytest.raises(TypeError, match="does not know its quantizer"):
        tejit.dynamo.to_tensor_spec(got)


def test_a_hybrid_over_live_state_says_why_it_cannot() -> None:
    live = Float8Quantizer(scale=torch.ones(1), amax=torch.zeros(1))
    q = HybridQuantizer(rowwise_quantizer=live, columnwise_quantizer=Float8BlockQuantizer())
    run, _ = compiled(lambda x, q: q(x).dequantize())
    with pytest.raises(Exception, match="compared by identity"):
        run(torch.randn(SHAPE), q)


def test_a_call_checks_its_arguments() -> None:
    run, _ = compiled(lambda x, q: q(x))
    with pytest.raises(Exception, match=r"cannot quantize with input torch\.int32"):
        run(torch.ones(SHAPE, dtype=torch.int32), GLOBAL)


FLOATS = {
    "current": (Float8CurrentScalingQuantizer, [0.0, 1e-4, 1e-4, 1e-3, 0.0, 1e-2]),
    "block": (Float8BlockQuantizer, [0.0, 1e-4, 1e-4, 1e-3, 0.0, 1e-2]),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", FLOATS)
def test_a_changed_float_field_compiles_once(name, backend) -> None:
    cls, values = FLOATS[name]
    run, counter = compiled(lambda x, q: q.quantize(x).dequantize(), backend)
    x = torch.randn(SHAPE) * 1e-4
    for value, graphs in zip(values, (1, 2, 2, 3, 3, 4), strict=True):
        q = cls().replace(amax_epsilon=value)
        assert torch.equal(run(x, q), q.quantize(x).dequantize())
        assert counter.frame_count == graphs, value


# -- how it is done ------------------------------------------------------------------------------------------------
def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]  # the code prints one word


def test_nothing_of_it_loads_dynamo() -> None:
    assert python("import sys, torch, tejit; tejit.MXFP8Quantizer(); print('torch._dynamo' in sys.modules)") == "False"


CALL = """
q = tejit.Float8CurrentScalingQuantizer(internal=True)
x = torch.randn(16, 16)
run = torch.compile(lambda x: q(x).dequantize(), backend="eager", fullgraph=True)
print(torch.equal(run(x), q(x).dequantize()))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "before",
    [
        "import torch._dynamo, tejit",
        "import tejit, torch._dynamo",
        "import importlib, tejit.traced_constants as t, tejit; importlib.reload(t)",
        "import importlib, tejit; import torch._dynamo.variables.script_object as s; importlib.reload(s)",
    ],
)
def test_the_order_of_imports_and_reloads_do_not_matter(before) -> None:
    if "reload(s)" in before:
        assert python(f"import torch; {before}; print(True)") == "True"
    else:
        assert python(f"import torch; {before}{CALL}") == "True"


def test_it_acts_for_quantizers_alone_and_once() -> None:
    """Of other constants torch's own methods are called; threads that come at the same time do no harm."""
    check(lambda x: GLOBAL(x).dequantize(), torch.randn(SHAPE))  # TorchDynamo is there now
    tracer = sys.modules["torch._dynamo.variables.script_object"]
    handler = next(vars(tracer)[name] for name in traced_constants._HANDLERS if name in vars(tracer))
    methods = dict(vars(handler))
    threads = [threading.Thread(target=traced_constants._mend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dict(vars(handler)) == methods
    opaque = traced_constants.torch._library.opaque_object
    ours = [cls for cls in opaque._OPAQUE_TYPES if getattr(type(cls), traced_constants.MARK, False)]
    assert MXFP8Quantizer in ours
    assert not any(cls.__module__.startswith("torch") for cls in ours)


@pytest.mark.skipif(traced_constants.TORCH_VERSION > traced_constants.LAST, reason="a torch that is left alone")
def test_a_later_torch_is_left_alone(monkeypatch) -> None:
    tracer = type(sys)("tracer")
    tracer.CustomClassObjectVariable = type("CustomClassObjectVariable", (), {"call_function": None})
    monkeypatch.setitem(sys.modules, traced_constants._TRACER, tracer)
    monkeypatch.setattr(traced_constants, "TORCH_VERSION", (traced_constants.LAST[0], traced_constants.LAST[1] + 1))
    before = dict(vars(tracer.CustomClassObjectVariable))
    traced_constants._mend()
    assert dict(vars(tracer.CustomClassObjectVariable)) == before

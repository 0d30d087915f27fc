"""What a graph answers of quantizers, tensors and recipes is what eager code answers."""

import pytest
import torch
import torch._dynamo.testing

import tejit
from tejit import Float8CurrentScalingQuantizer, Float8Quantizer, MXFP8Quantizer, NVFP4Quantizer, Quantizer
from tejit.dynamo import TensorSpec, is_value_opaque_quantizer, to_tensor_spec
from tests.dynamo.samples import QUANTIZERS, SHAPE

Q, EQUAL, OTHER = MXFP8Quantizer(), MXFP8Quantizer(), MXFP8Quantizer(columnwise=False)
HYBRID = QUANTIZERS["hybrid"]
DELAYED = Float8Quantizer(scale=torch.ones(1), amax=torch.zeros(1))
X = torch.randn(SHAPE)


class Unregistered(MXFP8Quantizer):
    pass


QUESTIONS = {
    "value: quantizer": lambda x: is_value_opaque_quantizer(Q),
    "value: hybrid": lambda x: is_value_opaque_quantizer(HYBRID),
    "value: class": lambda x: is_value_opaque_quantizer(MXFP8Quantizer),
    "value: made": lambda x: is_value_opaque_quantizer(MXFP8Quantizer()),
    "value: delayed": lambda x: is_value_opaque_quantizer(DELAYED),
    "value: its class": lambda x: is_value_opaque_quantizer(Float8Quantizer),
    "value: unregistered": lambda x: is_value_opaque_quantizer(Unregistered),
    "value: other things": lambda x: (is_value_opaque_quantizer(3), is_value_opaque_quantizer(None)),
    "==": lambda x: (Q == EQUAL, Q == OTHER, Q == HYBRID, Q == None, Q == 3),  # noqa: E711
    "!=": lambda x: (Q != EQUAL, Q != OTHER, Q != HYBRID, Q != None, Q != 3),  # noqa: E711
    "== of what was made": lambda x: (MXFP8Quantizer() == Q, Q.with_usage(columnwise=False) == OTHER),
    "hash": lambda x: hash(Q) == hash(EQUAL),
    "in a list": lambda x: (Q in [OTHER, EQUAL], Q in [OTHER, HYBRID], Q not in (OTHER,), [OTHER, Q].index(EQUAL)),
    "in a set": lambda x: (Q in {EQUAL}, Q in {OTHER}, len({Q, EQUAL, OTHER})),
    "in a dict": lambda x: ({EQUAL: 1, OTHER: 2}[Q], {OTHER: 2}.get(Q, 0)),
    "truth": lambda x: (bool(Q), not Q, Q is None, 1 if Q else 2, callable(Q)),
    "isinstance": lambda x: (isinstance(Q, MXFP8Quantizer), isinstance(Q, Quantizer), isinstance(Q, NVFP4Quantizer)),
    "isinstance of several": lambda x: isinstance(Q, (NVFP4Quantizer, MXFP8Quantizer)),
    "isinstance of what was made": lambda x: isinstance(MXFP8Quantizer(), Quantizer),
    "issubclass": lambda x: (issubclass(type(Q), Quantizer), issubclass(type(Q), NVFP4Quantizer)),
    "class name": lambda x: type(Q).__name__,
    "usages": lambda x: (OTHER.get_usages(), MXFP8Quantizer(columnwise=False).get_usages(), DELAYED.get_usages()),
    "fields": lambda x: (OTHER.rowwise_usage, OTHER.columnwise_usage, OTHER.internal, OTHER.fp8_dtype),
    "attributes": lambda x: (hasattr(Q, "nothing"), getattr(Q, "nothing", 5), hasattr(Q, "internal")),
    "quantizable": lambda x: (Q.is_quantizable(x), Q.is_quantizable(x[:3]), MXFP8Quantizer().is_quantizable(x[:3])),
    "alignment": lambda x: (Q.alignment(), Q.needs_rowwise(), Q.inner_tensor_specs((64, 64))),
    "specs": lambda x: (
        TensorSpec(SHAPE, x.dtype, Q) == TensorSpec(SHAPE, x.dtype, EQUAL),
        TensorSpec(SHAPE, x.dtype, Q) != TensorSpec(SHAPE, x.dtype, OTHER),
        TensorSpec(SHAPE, x.dtype, Q) in [TensorSpec(SHAPE, x.dtype, OTHER)],
        TensorSpec(SHAPE, x.dtype, Q).is_quantized,
        TensorSpec(SHAPE, x.dtype).is_quantized,
    ),
    "available": lambda x: (
        tejit.is_fp8_available(),
        tejit.is_fp8_block_scaling_available(return_reason=True),
        tejit.is_mxfp8_available(device=x.device),
        tejit.is_nvfp4_available(True, "cpu"),
    ),
    "recipes": lambda x: (
        tejit.recipe.default_recipe() == tejit.recipe.default_recipe(),
        tejit.recipe.current_recipe() is None,
    ),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_graph_answers_as_eager_code_does(question) -> None:
    torch._dynamo.reset()
    function = QUESTIONS[question]
    run = torch.compile(lambda x: (x + 1, function(x)), backend="eager", fullgraph=True)
    assert run(X)[1] == function(X)


def test_another_quantizer_gets_another_answer() -> None:
    torch._dynamo.reset()
    run = torch.compile(lambda x, a, b: (x + 1, a == b, a in {b}), backend="eager", fullgraph=True)
    for a, b in ((Q, EQUAL), (Q, OTHER), (EQUAL, Q), (OTHER, Q), (HYBRID, Q)):
        assert run(X, a, b)[1:] == (a == b, a in {b})


SPECS = {
    "made": lambda x, q: to_tensor_spec(q.quantize(x)),
    "called": lambda x, q: to_tensor_spec(q(x)),
    "viewed": lambda x, q: to_tensor_spec(q.quantize(x).view(-1, 64)),
    "transposed": lambda x, q: to_tensor_spec(q.quantize(x).t()),
    "sliced": lambda x, q: to_tensor_spec(q.quantize(x)[:32]),
    "detached": lambda x, q: to_tensor_spec(q.quantize(x).detach()),
    "plain": lambda x, q: to_tensor_spec(x * 2),
}
GIVEN = {
    "given": to_tensor_spec,
    "given and viewed": lambda t: to_tensor_spec(t.view(-1, 64)),
    "given and sliced": lambda t: to_tensor_spec(t[:32]),
}
FEW = ("current", "mxfp8", "nvfp4_2d", "hybrid")


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.full) for n in QUANTIZERS])
def test_the_spec_of_a_tensor_that_a_graph_made_or_viewed(name) -> None:
    q = QUANTIZERS[name]
    for function in SPECS.values():
        torch._dynamo.reset()
        run = torch.compile(function, backend="aot_eager", fullgraph=True)
        assert run(X, q) == function(X, q)
    bare = q.replace(internal=True)  # torch 2.11 lets no quantizer out of a graph that was made in it
    assert torch.compile(SPECS["made"], backend="aot_eager", fullgraph=True)(X, bare) == SPECS["made"](X, bare)
    for function in GIVEN.values():
        for t in (q(X), q.with_usage(columnwise=False)(X)):
            torch._dynamo.reset()
            run = torch.compile(function, backend="aot_eager", fullgraph=True)
            assert run(t) == function(t)


def test_a_spec_that_a_graph_made_makes_tensors_there() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def function(x):
        spec = to_tensor_spec(Q.quantize(x))
        return spec.create_tensor(), spec.inner_names(), spec.quantizer.get_usages()

    run = torch.compile(function, backend=counter, fullgraph=True)
    for rows in (32, 64, 96):
        x = torch.randn(rows, 64)
        torch._dynamo.mark_dynamic(x, 0)
        tensor, names, usages = run(x)
        assert (tuple(tensor.shape), usages) == ((rows, 64), {"rowwise": True, "columnwise": True})
        assert names == to_tensor_spec(tensor).inner_names()
    assert counter.frame_count == 1


def test_current_scaling_s_own_recipe_is_told_apart_in_a_graph() -> None:
    torch._dynamo.reset()
    recipe = tejit.recipe.Float8CurrentScaling()

    def function(x):
        with tejit.autocast(recipe=recipe):
            return x + 1, tejit.recipe.current_recipe() == tejit.recipe.Float8CurrentScaling(amax_epsilon=0.5)

    assert torch.compile(function, backend="eager", fullgraph=True)(X)[1] is False
    assert isinstance(Float8CurrentScalingQuantizer(), Quantizer)

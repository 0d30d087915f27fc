"""Quantizers as constants of compiled graphs: guards, equality, caches of a second process."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch._dynamo.exc import TorchDynamoException

import tejit
from tejit import Float8CurrentScalingQuantizer, Quantizer, ops
from tejit.dynamo import register_value_opaque_quantizer
from tests.dynamo import future_quantizers, test_value_classes
from tests.dynamo.samples import QUANTIZERS, SHAPE
from tests.dynamo.test_value import Everything


@register_value_opaque_quantizer
class Bounded(Float8CurrentScalingQuantizer):
    """A user's class whose own field decides the bytes: values beyond the bound become 0."""

    bound: float

    def __init__(self, *arguments, bound=float("inf"), **named):
        super().__init__(*arguments, **named)
        self._init_fields(bound=bound)

    _unbounded = Float8CurrentScalingQuantizer.quantize_inner  # torch 2.11 does not trace super() in a quantizer

    def quantize_inner(self, x, amax_reduction_group=None):
        return self._unbounded(torch.where(x.abs() > self.bound, 0, x), amax_reduction_group)


def compiled(function, backend="aot_eager"):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True), counter


def by_op(x, q):
    return ops.fake_quantize(x, q)


def by_method(x, q):
    return q.quantize(x).dequantize()


@pytest.mark.parametrize("function", [by_op, by_method])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_user_s_class_recompiles_once_when_changed_and_never_when_equal(function, backend) -> None:
    x = torch.randn(4, 16)
    run, counter = compiled(function, backend)
    for bound, graphs in ((1.0, 1), (1.0, 1), (0.5, 2), (0.5, 2), (1.0, 2), (float("inf"), 3), (float("inf"), 3)):
        q = Bounded(bound=bound)
        assert torch.equal(run(x, q), function(x, q))
        assert counter.frame_count == graphs, bound


@pytest.mark.parametrize("name", QUANTIZERS)
def test_every_quantizer_of_the_table_recompiles_once_when_changed(name) -> None:
    first = QUANTIZERS[name]
    changed, x = first.with_usage(columnwise=False), torch.randn(SHAPE)
    run, counter = compiled(lambda x, q: ops.quantize(x, q))
    for q, graphs in ((first, 1), (first.replace(), 1), (changed, 2), (changed.replace(), 2), (first, 2)):
        for got, want in zip(run(x, q), ops.quantize(x, q), strict=True):
            assert torch.equal(got, want)
        assert counter.frame_count == graphs


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_classes_of_one_name_and_awkward_values_live_in_one_graph(backend) -> None:
    """test_value_classes.Twin and future_quantizers.Twin, with inf and nan, as arguments of one user's op."""
    seen = []

    def implementation(x, many):
        seen.append(many)
        return x.clone()

    op = ops.register_quantized_op(
        "tejit_test::look",
        "(Tensor x, tejit.Quantizer[] many)",
        implementation,
        lambda x, many: tejit.dynamo.TensorSpec(tuple(x.shape), x.dtype, None, device=x.device),
    )
    many = [
        test_value_classes.Twin(mode=test_value_classes.Other.FAST),
        future_quantizers.Twin(factor=float("nan"), child=future_quantizers.Twin(level=1)),
        Everything(factor=float("-inf"), name="\"'\\\n", mode=type(Everything().mode).EXACT),
        QUANTIZERS["hybrid"],
    ]
    run, counter = compiled(lambda x: op(x, many) + 1, backend)
    for _ in range(2):
        run(torch.randn(3))
    assert counter.frame_count == 1
    for got in seen:
        assert list(got) == many
        assert [type(q) for q in got] == [type(q) for q in many]
        assert type(got[0]) is not type(got[1])


class Holding(Quantizer):
    """A value class in whose field somebody keeps a process group."""

    level: int

    def __init__(self, *, level=0, **base):
        super().__init__(**base)
        self._init_fields(level=level)


register_value_opaque_quantizer(Holding)


@pytest.fixture
def group():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_process_group_in_the_value_raises_at_comparison_and_compile(group) -> None:
    class Annotated(Quantizer):
        group: dist.ProcessGroup

    with pytest.raises(TypeError, match=r"Annotated\.group is annotated"):
        register_value_opaque_quantizer(Annotated)
    q = Holding(level=group)
    message = r"Holding\.level is .*ProcessGroup.*amax_reduction_group="
    for use in (lambda: q == q, lambda: q != Holding(), lambda: hash(q), q.__fx_repr__, q.__reduce__):
        with pytest.raises(TypeError, match=message):
            use()
    run, _ = compiled(lambda x: ops.fake_quantize(x, q))
    with pytest.raises((TypeError, TorchDynamoException, RuntimeError), match=message):
        run(torch.randn(2, 2))


PROGRAM = pathlib.Path(__file__).with_name("cached_program.py")


def test_a_second_process_finds_the_graphs_in_both_caches(tmp_path) -> None:
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(PROGRAM.parents[2]), os.environ.get("PYTHONPATH", "")]),
    }
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "pickle" not in done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    cold, warm = found
    assert cold["right"]
    assert warm["right"]
    assert cold["aot"] == [0, 1, 0]
    assert warm["aot"] == [1, 0, 0]
    assert cold["fx"][0] == 0
    assert cold["fx"][1] >= 2  # forward and backward
    assert warm["fx"][1:] == [0, 0]
    assert warm["fx"][0] >= 2
    assert warm["grad"] == cold["grad"]

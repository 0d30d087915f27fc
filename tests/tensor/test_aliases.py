"""Tensors that share buffers, autograd around writes, and files from elsewhere: never silently wrong."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import tejit
from tejit import Float8CurrentScalingQuantizer
from tejit.dynamo.value import load_quantizer, rebuild_quantizer
from tests.common import assert_bitwise_equal

q = Float8CurrentScalingQuantizer()


def consistent(t) -> bool:
    return t._data is None or t._transpose is None or torch.equal(t._transpose, t._data.movedim(-1, 0))


def test_update_usage_leaves_aliases_consistent() -> None:
    for change in ({"columnwise_usage": False}, {"rowwise_usage": False}):
        for alias_of in (nn.Parameter, lambda t: t.detach(), lambda t: t.view(4, 8)):
            t = q(torch.randn(4, 8))
            alias = alias_of(t)
            before = alias.dequantize().detach()
            t.update_usage(**change)
            t.copy_(torch.ones(4, 8))
            assert consistent(alias)
            assert_bitwise_equal(alias.dequantize().detach(), before)
    storage = q.replace(internal=True)(torch.randn(4, 8))
    alias = storage.detach()
    before = alias.dequantize()
    storage.update_usage(rowwise_usage=False)
    storage.quantize_(torch.ones(4, 8))
    assert_bitwise_equal(alias.dequantize(), before)


def test_making_the_transpose_after_an_alias_was_made() -> None:
    t = q.with_usage(columnwise=False)(torch.randn(4, 8))
    alias = t.detach()
    t.update_usage(columnwise_usage=True)
    alias.copy_(torch.ones(4, 8))
    assert consistent(t)
    assert (alias.dequantize() == 1).all()


@pytest.mark.parametrize(
    "pass_on",
    [
        lambda v: copy.copy(v),
        lambda v: v.detach(),
        lambda v: torch.compile(lambda w: w.view(-1), backend="aot_eager")(v),
        lambda v: pickle.loads(pickle.dumps((v, v)))[0],
    ],
    ids=["copy", "detach", "compile", "pickle"],
)
def test_a_view_stays_a_view(pass_on) -> None:
    t = q(torch.randn(8, 8))
    with pytest.raises(RuntimeError, match="scale belongs to the whole"):
        pass_on(t[:4]).zero_()


def test_copy_between_different_directions_copies_the_bytes() -> None:
    for seed in range(20):
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))
        whole = q(x)
        for usage in ({"columnwise": False}, {"rowwise": False}):
            target = q(torch.zeros(5, 7))
            target.copy_(q.with_usage(**usage)(x))
            for mine, theirs in zip(target._inner(), whole._inner(), strict=True):
                assert_bitwise_equal(mine, theirs)
    t = q(torch.randn(4, 8))
    t.copy_(1.0)
    assert (t.dequantize() == 1).all()


def test_strides_of_tensor_and_bytes_agree() -> None:
    t = q.with_usage(columnwise=False)(torch.randn(4, 8)).t()
    for other in (t.detach(), nn.Parameter(t), pickle.loads(pickle.dumps(t))):
        assert other.stride() == other._data.stride() == (1, 8)
    assert nn.Parameter(t).flatten().shape == (32,)


def test_writes_are_seen_by_autograd() -> None:
    w, x = q(torch.randn(4, 8)), torch.randn(2, 8, requires_grad=True)
    y = nn.functional.linear(x, w.requires_grad_())
    with torch.no_grad():
        w.quantize_(torch.randn(4, 8))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match="target requires grad"):
        w.quantize_(torch.randn(4, 8))
    with pytest.raises(RuntimeError, match="input requires grad"):
        q.quantize(torch.randn(4, 8, requires_grad=True), out=q(torch.randn(4, 8)))
    a = torch.randn(4, 8, requires_grad=True)
    v = q(a)
    v.copy_(torch.ones(4, 8))
    v.sum().backward()
    assert (a.grad == 0).all()


def test_data_setter_refuses_another_dtype_or_device() -> None:
    p = nn.Parameter(q(torch.randn(4, 8)))
    for other in (q(torch.randn(4, 8)).half(), q(torch.randn(4, 8)).to("meta")):
        with pytest.raises(ValueError, match="cannot assign data of"):
            p.data = other


def test_fallbacks_of_views_say_that_they_are_copies() -> None:
    tejit.tensor.dispatch._announced.clear()
    with pytest.warns(UserWarning, match="a copy and no view"):
        q(torch.randn(4, 4)).diagonal()


def test_a_tensor_that_gave_its_buffers_away_says_so() -> None:
    t = q(torch.randn(4, 8))
    t.prepare_for_saving()
    for use in (lambda: t + 1, lambda: t.sum(), lambda: t.copy_(torch.ones(4, 8))):
        with pytest.raises(RuntimeError, match="given away"):
            use()


def test_shared_memory_and_dlpack() -> None:
    t = q(torch.randn(4, 8))
    module = nn.Module()
    module.weight = nn.Parameter(t)
    module.share_memory()
    assert module.weight.is_shared()
    assert type(module.weight) is tejit.Float8Tensor
    with pytest.raises(BufferError, match="dequantize"):
        torch.from_dlpack(t)


def test_collectives_refuse_quantized_tensors(tmp_path) -> None:
    code = """
import sys, torch, torch.distributed as dist, tejit
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
w = tejit.Float8CurrentScalingQuantizer()(torch.ones(4, 8))
m = torch.nn.Linear(8, 4, bias=False); m.weight = torch.nn.Parameter(w)
for call in (lambda: dist.broadcast(w, 0), lambda: dist.all_reduce(w)):
    try:
        call()
    except NotImplementedError as error:
        assert "not supported" in str(error)
        print("refused")
"""
    command = [sys.executable, "-c", code, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["refused"] * 2


class _Evil:
    def __init__(self, function, *arguments):
        self.reduction = function, arguments

    def __reduce__(self):
        return self.reduction


@pytest.mark.parametrize("function", [load_quantizer, rebuild_quantizer])
def test_a_file_cannot_run_code(function, tmp_path) -> None:
    flag = tmp_path / "flag"
    fields = (("args", "str", f"touch {flag}"), ("shell", "bool", "True"))
    file = io.BytesIO()
    torch.save(_Evil(function, ("subprocess", "Popen", fields)), file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=True)
    assert not flag.exists()


def test_a_file_cannot_hold_a_tensor_that_does_not_fit() -> None:
    rebuild, arguments = q(torch.randn(4, 8)).__reduce_ex__(4)
    cls, buffers, keywords, _, stride, *rest = arguments
    with pytest.raises(pickle.UnpicklingError, match=r"_data is torch\.uint8 of shape \(4, 8\)"):
        rebuild(cls, buffers, keywords, (99, 99), stride, *rest)
    with pytest.raises(pickle.UnpicklingError, match="_data"):
        rebuild(cls, buffers, keywords, (4, 8), stride, *rest[:-1], {"_data": None})
    with pytest.raises(pickle.UnpicklingError, match="no class of quantized tensors"):
        rebuild(dict, buffers, keywords, (4, 8), stride, *rest)

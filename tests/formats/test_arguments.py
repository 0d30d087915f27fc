"""Arguments that are no tensors, sparse ones, and scalars: refused by name, or right, in every format."""

import pytest
import torch

from tests.formats.registry import each_case

SHAPE = (64, 64)


@each_case()
@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "storage"])
def test_what_is_no_tensor_is_named(case, internal) -> None:
    q = case.quantizer(internal=internal)
    x = torch.randn(SHAPE)
    target = q(x)
    for call in (q.quantize, lambda value: q.update_quantized(value, target), target.quantize_):
        for value in ([1.0], None, 3.0):
            with pytest.raises(TypeError, match=r"cannot quantize a (list|NoneType|float)"):
                call(value)
        with pytest.raises(TypeError, match=r"torch\.sparse_coo"):
            call(x.to_sparse())
    for value in (5, "x", [x]):
        with pytest.raises(TypeError, match=f"{type(q).__name__} cannot write into a {type(value).__name__}"):
            q.quantize(x, out=value)
    with pytest.raises(TypeError, match="cannot write into a Tensor"):
        q.quantize(x, out=torch.zeros(SHAPE))
    for flag in (True, 1.0, "x"):
        with pytest.raises(TypeError, match="noop_flag is"):
            q.quantize(x, out=target, noop_flag=flag)


@each_case()
def test_a_size_is_no_bool(case) -> None:
    with pytest.raises(ValueError, match=r"dimension 0 of shape \(True, 64\)"):
        case.quantizer().make_empty((True, 64))


@each_case(usages=True, only=lambda case: case.fits((), (True, True)))
def test_views_of_a_scalar(case, usage) -> None:
    t = case.quantizer(usage)(torch.tensor(3.0))
    for view in (t.view(1), t.view(1, 1), t.unsqueeze(0), t.reshape(1), t.view(1, 1).view(())):
        assert view.dequantize().flatten().tolist() == pytest.approx([3.0], rel=0.1)


@each_case(only=lambda case: case.name != "identity" and not case.name.startswith("hybrid"))
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_factories_of_a_tensor_that_dropped_a_direction(case, direction) -> None:
    t = case.quantizer()(torch.randn(SHAPE))
    t.update_usage(rowwise_usage=direction == "rowwise", columnwise_usage=direction == "columnwise")
    for made in (torch.empty_like(t), t.new_empty((32, 32))):
        assert type(made) is type(t)
        assert made.get_usages()[direction]
        made.copy_(torch.ones(made.shape))
        assert made.dequantize().flatten()[:4].tolist() == pytest.approx([1.0] * 4, rel=0.1)
    assert torch.zeros_like(t).sum() == 0

"""NVFP4Tensor and its storage: what users do with them."""

import copy
import io
import pickle

import pytest
import torch

from tejit import Float8CurrentScalingQuantizer, NVFP4Quantizer, NVFP4Tensor, NVFP4TensorStorage, QuantizedTensor
from tejit.format_info import NVFP4_SIGN_MASK
from tejit.kernels import nvfp4
from tests.common import DEVICES, DTYPES, assert_bitwise_equal, provoking
from tests.tensor.nvfp4_modes import (
    MODES,
    SHAPE,
    assert_same_buffers,
    each_mode,
    each_usage,
    make,
    possible,
    quantizer,
)


@pytest.mark.parametrize("device", DEVICES)
@each_usage
@each_mode
def test_quantize_and_dequantize(mode, usage, device) -> None:
    """The buffers are the op's; the values are within half a step of the format (a step, where it is at random)."""
    possible(mode, usage)
    for shape in ((16, 16), (2, 24, 48), (2, 2, 4, 32), (16,), (0, 16), (16, 0)):
        if (usage[1] or mode == "16x16") and shape == (16,):
            continue
        for dtype in DTYPES:
            x = provoking("normal", shape, dtype).to(device)
            q = quantizer(mode, usage)
            torch.manual_seed(3)
            t = q(x)
            assert type(t) is NVFP4Tensor
            assert (t.shape, t.dtype, t.device.type) == (x.shape, dtype, device)
            torch.manual_seed(3)
            seed = nvfp4.new_seed(x.device) if q.stochastic_rounding else None
            six = nvfp4.quantize(
                x, *usage, q.with_rht, NVFP4_SIGN_MASK, q.with_2d_quantization, q.row_scaled_nvfp4,
                2 * q.nvfp4_use_4over6, q.nvfp4_e4m3_max, q.optimize_for_gemm, seed, None, None,
            )  # fmt: skip
            held = [tensor for tensor in t._inner() if tensor is not None]
            assert len(held) == 3 * sum(usage)
            wanted = [tensor for i, tensor in enumerate(six) if usage[(0, 0, 1, 1, 0, 1)[i]]]
            for mine, theirs in zip(held, wanted, strict=True):
                assert_bitwise_equal(mine, theirs)
            for out_dtype in (None, torch.float32):
                got = t.dequantize(out_dtype)
                assert got.shape == x.shape
                assert got.dtype == (out_dtype or dtype)
            if x.numel():
                # Between 4 and 6 lies a step of a third of the block's largest value; the scale itself is off by 1/16.
                step = x.double().abs().amax() / 3 * (17 / 16)
                error = (t.dequantize(torch.float32).double() - x.double()).abs()
                assert error.amax() <= step * (1 if q.stochastic_rounding else 0.5) * (4 if q.with_rht else 1)
                assert error.norm() < 0.25 * x.double().norm()


@pytest.mark.parametrize("device", DEVICES)
def test_rht_columnwise_data_dequantizes_to_the_tensor(device) -> None:
    """The inverse transform is applied, with and without signs; where it is not, the values are others."""
    for signs in (True, False):
        x, t = make(mode="rht", usage=(False, True), device=device, with_random_sign_mask=signs)
        error = (t.dequantize().float() - x.float()).norm() / x.float().norm()
        assert error < 0.12
        rotated = nvfp4.values(t._columnwise_data, t._columnwise_scale_inv, t._amax_columnwise, 448, False).t()
        assert (rotated - x.float()).norm() > x.float().norm()
        assert (rotated.norm() - x.float().norm()).abs() < 0.1 * x.float().norm()  # the transform is orthogonal


def test_rht_spreads_an_outlier() -> None:
    """One large value in a block makes its neighbours zero without the transform, and does not with it."""
    x = torch.full((16, 16), 0.1, dtype=torch.bfloat16)
    x[3] = 8
    plain, rotated = (quantizer(mode, (False, True))(x).dequantize() for mode in ("1x16", "rht"))
    assert (plain[0] == 0).all()
    assert (rotated[3] > 6).all()
    assert not torch.equal(plain, rotated)


@pytest.mark.parametrize("device", DEVICES)
@each_usage
@each_mode
def test_views_that_keep_blocks_whole_are_quantized_and_share_memory(mode, usage, device) -> None:
    possible(mode, usage)
    x, t = make((2, 72, 272), mode, usage, device=device)
    values = t.dequantize()
    turns = mode == "16x16" or (usage != (True, True) and mode not in ("rht", "row-scaled"))
    for view, kept in (
        (lambda a: a.view(144, 272), True),
        (lambda a: a.reshape(-1, 272), True),
        (lambda a: a.view(144, 272).view(4, 36, 272), True),
        (lambda a: a.flatten(0, 1), True),
        (lambda a: a.unsqueeze(0), True),
        (lambda a: a[None].squeeze(0), True),
        (lambda a: a.view(144, 272).t(), turns),
        (lambda a: a.view(144, 272).T.t(), turns),
        (lambda a: a.view(144, 272).transpose(1, 0), turns),
        (lambda a: a.view(144, 272).permute(1, 0), turns),
    ):
        got = view(t)
        assert got.shape == view(x).shape
        assert_bitwise_equal(got.contiguous() if not kept else got.dequantize().contiguous(), view(values).contiguous())
        assert type(got) is NVFP4Tensor if kept else not isinstance(got, QuantizedTensor)
        if not kept:
            continue
        assert got.stride() == view(x).stride()
        shared = {buffer.data_ptr() for buffer in t._inner() if buffer is not None}
        assert {buffer.data_ptr() for buffer in got._inner() if buffer is not None} == shared
        usages = got.get_usages()
        fitting = got._quantizer.replace(rowwise_usage=usages["rowwise"], columnwise_usage=usages["columnwise"])
        for name, (size, dtype) in fitting.inner_tensor_specs(tuple(got.shape)).items():
            assert (tuple(getattr(got, name).shape), getattr(got, name).dtype) == (size, dtype)


def test_other_views_dequantize() -> None:
    _, t = make()
    values = t.dequantize()
    for view in (
        lambda a: a[2:5],
        lambda a: a[:, 3:9],
        lambda a: a[1],
        lambda a: a.view(-1),
        lambda a: a.view(72, 544),
        lambda a: a.split(16)[1],
        lambda a: a[0:1].expand(5, 272),
        lambda a: a.unsqueeze(-1),
        lambda a: a.unsqueeze(0).permute(1, 0, 2),
    ):
        got = view(t)
        assert not isinstance(got, QuantizedTensor)
        assert_bitwise_equal(got.contiguous(), view(values).contiguous())
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        t.view(7, 11)


def test_writing_to_a_view_writes_to_the_tensor() -> None:
    y, u = make((2, 72, 272), seed=4)
    for mode in ("1x16", "16x16", "swizzled"):
        _, t = make((2, 72, 272), mode)
        want = quantizer(mode)(y)
        t.view(144, 272).copy_(y.view(144, 272))
        assert_same_buffers(t, want)
    _, t = make((144, 272), "16x16")
    t.t().copy_(u.dequantize().view(144, 272).t())
    assert_same_buffers(t, quantizer("16x16")(u.dequantize().view(144, 272)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "stochastic"])
def test_in_place_operations_and_copies_requantize(mode, device) -> None:
    x, t = make(mode=mode, device=device)
    want = quantizer(mode)(t.dequantize() * 3)
    t.mul_(3)
    assert_same_buffers(t, want)
    y, u = make(mode=mode, device=device, seed=2)
    t.copy_(y)
    assert_same_buffers(t, u)
    _, v = make(mode=mode, device=device, seed=3)
    v.copy_(u)  # buffers, not values requantized
    assert_same_buffers(v, u)
    for other_mode in ("16x16", "rht", "row-scaled", "4over6", "swizzled"):
        _, other = make(mode=other_mode, device=device, seed=5, usage=(True, False))
        v.copy_(other)  # another layout, or no columnwise buffers to copy: requantized
        assert_same_buffers(v, quantizer(mode)(other.dequantize(torch.float32)))
    assert_bitwise_equal(torch.empty_like(x).copy_(u), u.dequantize())
    v.copy_(torch.ones(272, device=device))  # broadcast
    assert torch.allclose(v.dequantize(), torch.ones((), dtype=v.dtype, device=device), rtol=0.01)


@pytest.mark.parametrize("device", DEVICES)
@each_usage
@each_mode
def test_quantize_into_given_tensors_and_storages(mode, usage, device) -> None:
    possible(mode, usage)
    x, t = make(mode=mode, usage=usage, device=device)
    q = quantizer(mode, usage)
    for target in (q.make_empty(x.shape, dtype=x.dtype, device=device), q.replace(internal=True).quantize(x * 0)):
        torch.manual_seed(5)
        assert q.quantize(x, out=target) is target
        assert_same_buffers(target, t)
        target.quantize_(x * 5, noop_flag=torch.ones(1, device=device))
        assert_same_buffers(target, t)
        torch.manual_seed(6)
        target.quantize_(x * 5, noop_flag=torch.zeros(1, device=device))
        torch.manual_seed(6)
        assert_same_buffers(target, q(x * 5))


def test_what_cannot_be_done_is_refused() -> None:
    x, t = make()
    for mode, words in (
        ("row-scaled", "row_scaled_nvfp4=False and the quantizer row_scaled_nvfp4=True"),
        ("4over6", "nvfp4_use_4over6=False and the quantizer nvfp4_use_4over6=True"),
        ("rht", "differ in with_rht"),
    ):
        with pytest.raises(TypeError, match=words):
            quantizer(mode).quantize(x, out=t)
    with pytest.raises(TypeError, match="nvfp4_e4m3_max=448 and the quantizer nvfp4_e4m3_max=256"):
        quantizer(nvfp4_e4m3_max=256).quantize(x, out=t)
    with pytest.raises(TypeError, match="cannot write into a Float8Tensor"):
        quantizer().quantize(x, out=Float8CurrentScalingQuantizer()(x))
    with pytest.raises(ValueError, match=r"\(144, 288\).*\(144, 272\)"):
        quantizer().quantize(torch.ones(144, 288), out=t)
    with pytest.raises(ValueError, match="noop_flag was given without out"):
        quantizer().quantize(x, noop_flag=torch.zeros(1))
    with pytest.raises(ValueError, match="row_scaled_nvfp4=True: each row has an amax of its own"):
        quantizer("row-scaled").quantize(x, amax_reduction_group=object())
    with pytest.raises(ValueError, match="fp4_dtype is 'e3m0'; it must be 'e2m1'"):
        NVFP4TensorStorage(fp4_dtype="e3m0")


@pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])
def test_update_usage_of_tiles(swizzled) -> None:
    _, t = make((2, 72, 272), mode="16x16", optimize_for_gemm=swizzled)
    _, both = make((2, 72, 272), mode="16x16", optimize_for_gemm=swizzled)
    t.update_usage(columnwise_usage=False)
    assert t._columnwise_data is t._columnwise_scale_inv is t._amax_columnwise is None
    t.update_usage(columnwise_usage=True)
    assert_same_buffers(t, both)
    t.update_usage(rowwise_usage=False)
    assert t.nbytes == sum(getattr(both, f"_{n}").nbytes for n in ("columnwise_data", "columnwise_scale_inv")) + 4
    assert_bitwise_equal(t.dequantize(), both.dequantize())
    for request in ({"rowwise_usage": True}, {"columnwise_usage": False}):
        with pytest.raises(RuntimeError):
            t.update_usage(**request)
    assert t.get_usages() == {"rowwise": False, "columnwise": True}


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "16x16"])
def test_update_usage_otherwise_only_drops(mode) -> None:
    _, t = make(mode=mode)
    before = t._columnwise_data.clone()
    t.update_usage(columnwise_usage=False)
    with pytest.raises(RuntimeError, match="1x16 and cannot be made from rowwise data"):
        t.update_usage(rowwise_usage=False, columnwise_usage=True)
    assert t.get_usages() == {"rowwise": True, "columnwise": False}
    _, t = make(mode=mode)
    t.update_usage(rowwise_usage=False)
    assert_bitwise_equal(t._columnwise_data, before)
    rotated_tiles = NVFP4Quantizer(with_rht=True, with_2d_quantization=True, columnwise=False)(torch.ones(16, 16))
    with pytest.raises(RuntimeError, match=r"of the transformed values \(RHT\)"):
        rotated_tiles.update_usage(columnwise_usage=True)


@each_usage
@each_mode
def test_clone_pickle_and_save(mode, usage) -> None:
    possible(mode, usage)
    _, t = make(mode=mode, usage=usage)
    storage = quantizer(mode, usage, internal=True)(provoking("normal", SHAPE, torch.bfloat16))
    for original in (t, storage):
        for twin in (
            original.clone(),
            copy.deepcopy(original),
            pickle.loads(pickle.dumps(original)),
            through_torch_save(original),
        ):
            assert type(twin) is type(original)
            assert twin._nontensor_kwargs() == original._nontensor_kwargs()
            assert_same_buffers(twin, original)
            assert_bitwise_equal(twin.dequantize(), original.dequantize())
            mine = {b.data_ptr() for b in original._inner() if b is not None}
            assert not mine & {b.data_ptr() for b in twin._inner() if b is not None}
    parameter = torch.nn.Parameter(t)
    parameter.main_grad = torch.ones(3)
    assert torch.equal(copy.deepcopy(parameter).main_grad, parameter.main_grad)


def through_torch_save(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_file_whose_buffers_do_not_fit_is_refused() -> None:
    _, t = make()
    t._rowwise_scale_inv = t._rowwise_scale_inv[:128]
    with pytest.raises(pickle.UnpicklingError, match="_rowwise_scale_inv"):
        pickle.loads(pickle.dumps(t))


@each_mode
def test_to_and_data_and_factories(mode) -> None:
    _, t = make(mode=mode)
    half = t.half()
    assert type(half) is NVFP4Tensor
    assert half.dequantize().dtype == torch.float16
    assert_same_buffers(half, t)
    moved = t.to("meta")
    assert all(buffer.device.type == "meta" for buffer in moved._inner())
    assert type(t.double()) is torch.Tensor
    y = provoking("normal", SHAPE, torch.bfloat16, 5)
    torch.manual_seed(8)
    t.data = y
    torch.manual_seed(8)
    assert_same_buffers(t, quantizer(mode)(y))
    assert type(torch.zeros_like(t)) is torch.Tensor
    made = t.new_empty(32, 48)
    assert (type(made), made._rowwise_scale_inv.shape) == (NVFP4Tensor, (128, 4))
    assert torch.empty_like(t)._rowwise_data.shape == t._rowwise_data.shape
    assert t.nbytes == sum(buffer.nbytes for buffer in t._inner())


def test_gradients_and_optimizer() -> None:
    x = provoking("normal", SHAPE, torch.float32).requires_grad_()
    assert quantizer()(x).view(-1, 272).requires_grad
    weights = torch.randn(SHAPE)
    (quantizer()(x).view(2, 72, 272).dequantize().view(SHAPE) * weights).sum().backward()
    assert torch.equal(x.grad, weights)
    _, t = make(dtype=torch.float32)
    plain, quantized = torch.nn.Parameter(t.dequantize()), torch.nn.Parameter(t)
    plain.grad = quantized.grad = torch.ones(SHAPE)
    torch.optim.SGD([plain], lr=0.1, foreach=False).step()
    torch.optim.SGD([quantized], lr=0.1, foreach=False).step()
    assert_bitwise_equal(quantized.dequantize(), quantizer()(plain.detach()).dequantize())


def test_inference_mode_and_linear() -> None:
    """pytorch/ao#3487 and #564."""
    x, t = make(mode="16x16", shape=(32, 48), dtype=torch.float32)
    with torch.inference_mode():
        made = quantizer("16x16")(x)
        assert_same_buffers(made, t)
        for tensor in (t, made):
            assert tensor.detach().t().to(torch.bfloat16).shape == (48, 32)
    assert_same_buffers(made, t)
    assert made.detach().t().to(torch.bfloat16).shape == (48, 32)
    y = torch.randn(5, 48)
    results = []
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            results.append(torch.nn.functional.linear(y, t))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert torch.allclose(results[0], torch.nn.functional.linear(y, t.dequantize()), rtol=1e-5, atol=1e-5)


def test_save_for_backward_protocol_and_repr() -> None:
    x, t = make(mode="4over6")
    assert "NVFP4 1x16 4over6, shape=(144, 272), dtype=torch.bfloat16, device=cpu, rowwise+columnwise" in repr(t)
    assert "NVFP4 1x16 RHT stochastic" in repr(quantizer("rht", stochastic_rounding=True)(x))
    assert "NVFP4 16x16," in repr(quantizer("16x16")(x))
    for holder in (t, quantizer("4over6", internal=True)(x)):
        values = holder.dequantize()
        buffers, empty = holder.prepare_for_saving()
        assert len(buffers) == 6
        assert (empty.nbytes, empty.shape, empty.device) == (0, x.shape, x.device)
        with pytest.raises(RuntimeError, match="given away"):
            empty.dequantize()
        assert empty.restore_from_saved([*buffers, None]) == [None]
        assert_bitwise_equal(empty.dequantize(), values)


@pytest.mark.parametrize("usage", [(True, True), (True, False)], ids=["both", "rowwise"])
def test_tiles_stay_tiles_whatever_is_written(usage) -> None:
    """Rows of 1x16 in a tensor that counts as tiles would be transposed as tiles, with other rows' scales."""
    usages = {"rowwise": usage[0], "columnwise": usage[1]}
    tiles = NVFP4Quantizer(with_2d_quantization=True, **usages)
    rows = NVFP4Quantizer(**usages)
    values = torch.randn(32, 32) * torch.logspace(-3, 3, 32)[None]
    t = tiles(torch.randn(32, 32))
    before = t.clone()
    with pytest.raises(TypeError, match=r"tiles of 16x16.*with_2d_quantization.*new tensor"):
        rows.update_quantized(values, t)
    assert torch.equal(t.dequantize(), before.dequantize())
    t.copy_(rows(values))
    want = tiles(rows(values).dequantize())
    for turned in (t.t(), want.t()):
        assert torch.equal(turned.dequantize(), want.dequantize().t())
    t.update_usage(rowwise_usage=False, columnwise_usage=True)
    assert torch.equal(t.dequantize(), want.dequantize())


def test_tiles_in_both_directions_are_not_rounded_at_random_one_by_one() -> None:
    t = NVFP4Quantizer(with_2d_quantization=True)(torch.randn(32, 32))
    random = NVFP4Quantizer(with_2d_quantization=True, stochastic_rounding=True)
    with pytest.raises(TypeError, match="stochastic_rounding"):
        random.update_quantized(torch.randn(32, 32), t)
    t.copy_(random(torch.randn(32, 32)))
    assert torch.equal(t.t().dequantize(), t.dequantize().t())

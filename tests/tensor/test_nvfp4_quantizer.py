"""NVFP4Quantizer: its value, its errors, what it allocates, its operands, its graphs."""

import copy
import pickle

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode

import tejit
from tejit import NVFP4Quantizer, NVFP4Tensor, NVFP4TensorStorage
from tejit.dynamo import TensorSpec, to_tensor_spec
from tejit.kernels import nvfp4
from tests.common import DEVICES, assert_bitwise_equal, provoking
from tests.tensor.nvfp4_modes import (
    MODES,
    assert_same_buffers,
    each_mode,
    each_usage,
    make,
    possible,
    quantizer,
)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"row_scaled_nvfp4": True, "rowwise": False}, ValueError, "needs rowwise usage"),
        ({"row_scaled_nvfp4": True, "with_rht": True}, ValueError, "row-scaled NVFP4 does not go with RHT"),
        ({"row_scaled_nvfp4": True, "with_2d_quantization": True}, ValueError, "row-scaled .* with 2D"),
        ({"row_scaled_nvfp4": True, "stochastic_rounding": True}, ValueError, "row-scaled .* stochastic"),
        ({"nvfp4_use_4over6": True, "with_rht": True}, ValueError, "4over6 does not go with RHT"),
        ({"nvfp4_use_4over6": True, "stochastic_rounding": True}, ValueError, "4over6 does not go with stochastic"),
        ({"nvfp4_e4m3_max": 0}, ValueError, "nvfp4_e4m3_max is 0; it must be 448 or 256"),
        ({"nvfp4_e4m3_max": 448.0}, TypeError, r"nvfp4_e4m3_max is 448\.0; it must be of type int"),
        ({"nvfp4_4over6_err_mode": "mean"}, ValueError, "nvfp4_4over6_err_mode is 'mean'; it must be 'MAE' or 'MSE'"),
        ({"with_post_rht_amax": True}, ValueError, "with_rht is False"),
        ({"with_rht": 1}, TypeError, "with_rht is 1; it must be True or False"),
    ],
    ids=str,
)
def test_arguments_that_exclude_each_other(arguments, error, words) -> None:
    with pytest.raises(error, match=words):
        NVFP4Quantizer(**arguments)


def test_quantizers_are_values() -> None:
    q = NVFP4Quantizer()
    defaults = (q.with_rht, q.with_2d_quantization, q.stochastic_rounding, q.row_scaled_nvfp4, q.nvfp4_use_4over6)
    assert not any(defaults)
    assert (q.nvfp4_e4m3_max, q.nvfp4_4over6_err_mode, q.with_random_sign_mask) == (448, "MAE", True)
    for mode, changes in MODES.items():
        one, other = quantizer(mode), NVFP4Quantizer().replace(**changes)
        assert one == other
        assert hash(one) == hash(other)
        assert pickle.loads(pickle.dumps(one)) == one
        assert copy.deepcopy(one) is one
    rht = quantizer("rht")
    assert rht.with_post_rht_amax
    assert rht == NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)
    assert rht.replace(with_rht=False) == q
    assert rht != NVFP4Quantizer(with_rht=True, with_random_sign_mask=False)


@each_mode
def test_a_shape_that_does_not_fit_is_the_same_error_everywhere(mode) -> None:
    """pytorch/ao#3233: K = 40. Only the directions asked for count, and tiles ask for both."""
    for shape, usage, name, size, good in (
        ((64, 40), (True, False), "K", 40, 48),
        ((3, 11, 32), (False, True), "M", 33, 48),
        ((), (True, False), "K", 1, 16),
    ):
        if mode == "row-scaled" and not usage[0]:
            continue
        q = quantizer(mode, usage)
        x = torch.ones(shape)
        assert not q.is_quantizable(x)
        words = rf"NVFP4 needs {name} .* multiple of 16, but {name} = {size} in .*; pad it to {good}"
        for call in (
            lambda q=q, x=x: q(x),
            lambda q=q, x=x: q.inner_tensor_specs(tuple(x.shape)),
            lambda q=q, x=x: q.make_empty(x.shape, device="cpu"),
            lambda q=q, x=x: q.alloc_tensors(tuple(x.shape), device="cpu"),
            lambda q=q, x=x: TensorSpec(tuple(x.shape), torch.float32, q, device="cpu").create_tensor(),
        ):
            with pytest.raises(ValueError, match=words):
                call()
        with pytest.raises(ValueError, match=words), tejit.backend("torch"):
            q(x)
    x = torch.ones(3, 32)
    assert quantizer(mode, (True, False)).is_quantizable(x) == (mode != "16x16")
    if mode == "16x16":
        with pytest.raises(ValueError, match="M = 3"):
            quantizer(mode, (True, False))(x)
    assert not quantizer(mode).is_quantizable(torch.ones(16, 16, dtype=torch.int32))


def test_stochastic_rounding_repeats_with_the_seed_and_differs_without() -> None:
    x = provoking("normal", (64, 64), torch.bfloat16)
    q = quantizer("stochastic")
    torch.manual_seed(1)
    first, second = q(x), q(x)
    torch.manual_seed(1)
    again = q(x)
    assert_same_buffers(first, again)
    assert not torch.equal(first._rowwise_data, second._rowwise_data)
    assert not torch.equal(first._columnwise_data, second._columnwise_data)


@each_mode
def test_operands_are_what_the_gemm_reads(mode) -> None:
    """The operands' values are the tensor's, rowwise `(M, K)` and columnwise `(K, M)` (with RHT of the transform)."""
    q = quantizer(mode)
    x = provoking("normal", (2, 24, 80), torch.float32)
    inner = q.quantize_inner(x)
    for operand, rows, columns in ((q.rowwise_operand(inner), 48, 80), (q.columnwise_operand(inner), 80, 48)):
        assert (operand.kind, operand.e4m3_max, operand.swizzled) == ("nvfp4", q.nvfp4_e4m3_max, q.optimize_for_gemm)
        assert operand.codes.shape == (rows, columns // 2)
        assert operand.amax.shape == (rows if q.row_scaled_nvfp4 else 1,)
        arguments = (operand.codes, operand.scale_inv)
        values = nvfp4.values(*arguments, operand.amax, operand.e4m3_max, operand.swizzled)
        assert values.shape == (rows, columns)
        want = x.reshape(48, 80) if rows == 48 else x.reshape(48, 80).t()
        if not (mode == "rht" and rows == 80):
            assert (values - want).norm() < 0.2 * want.norm()
        # Without the factor of the amax it is exact in bfloat16, and the factor gives the rest.
        half = nvfp4.values(*arguments, None, operand.e4m3_max, operand.swizzled, torch.bfloat16)
        assert torch.equal(half.float(), nvfp4.values(*arguments, None, operand.e4m3_max, operand.swizzled))
        whole = half.float() * nvfp4.global_factor(operand.amax, operand.e4m3_max)[:, None]
        assert torch.allclose(whole, values, rtol=1e-6)
    assert [buffer is None for buffer in q.columnwise_inner(inner)] == [True, True, False, False, True, False]


def test_wgrad_of_operands_rotated_alike_needs_no_inverse() -> None:
    """x.T @ g from columnwise operands: H is orthogonal, so both transforms cancel."""
    x, g = (provoking("normal", (64, 32), torch.float32, seed) for seed in (1, 2))
    q = quantizer("rht", (False, True))
    operands = [q.columnwise_operand(q.quantize_inner(a)) for a in (x, g)]
    values = [nvfp4.values(a.codes, a.scale_inv, a.amax, a.e4m3_max, a.swizzled) for a in operands]
    want = x.t() @ g
    assert (values[0] @ values[1].t() - want).norm() < 0.25 * want.norm()


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "internal"])
@each_usage
@each_mode
def test_make_empty_python_allocation_and_quantize_agree(mode, usage, internal, device) -> None:
    possible(mode, usage)
    q = quantizer(mode, usage, internal=internal)
    for shape in (
        (16,),
        (16, 16),
        (0, 16),
        (16, 0),
        (2, 0, 32),
        (2, 24, 48),
        (2, 2, 4, 80),
        (144, 2064),
        (3, 16),
        (16, 5),
    ):
        rows, columns = torch.Size(shape[:-1]).numel(), shape[-1]
        both = mode == "16x16"
        if (rows % 16 and (usage[1] or both)) or (columns % 16 and (usage[0] or both)):
            for create in (lambda s=shape: q.make_empty(s, device=device), lambda s=shape: q.alloc_tensors(s)):
                with pytest.raises(ValueError, match="NVFP4 needs"):
                    create()
            continue
        made = q.make_empty(shape, dtype=torch.float16, device=device)
        twin = TensorSpec(shape, torch.float16, q, device=torch.device(device)).create_tensor()
        filled = q(torch.ones(shape, dtype=torch.float16, device=device))
        specs = q.inner_tensor_specs(shape, device)
        for other in (made, twin, filled):
            assert type(other) is (NVFP4TensorStorage if internal else NVFP4Tensor)
            assert other.__tensor_flatten__() == made.__tensor_flatten__()
            assert other.__tensor_flatten__()[0] == list(specs)
            assert (other.shape, other.dtype) == (torch.Size(shape), torch.float16)
            for name, (size, dtype) in specs.items():
                buffer, first = getattr(other, name), getattr(made, name)
                assert (tuple(buffer.shape), buffer.dtype, buffer.device) == (size, dtype, first.device)
                assert buffer.stride() == first.stride()
        assert to_tensor_spec(made) == TensorSpec(shape, torch.float16, q, device=made.device)


@pytest.mark.parametrize("device", ["cpu", "cuda:0", "meta"])
def test_fake_tensors(device) -> None:
    spec = TensorSpec((144, 32), torch.bfloat16, quantizer("row-scaled"), device=device)
    with FakeTensorMode(allow_non_fake_inputs=False):
        made = spec.create_tensor()
        assert made.device == torch.device(device)
        assert made._columnwise_scale_inv.shape == (128, 12)
        assert made._amax_rowwise.shape == (144,)


@each_mode
@pytest.mark.parametrize("how", ["kernels", pytest.param("torch", marks=pytest.mark.full)])
def test_one_graph_for_every_size(how, mode, need_kernels) -> None:
    if how == "kernels":
        need_kernels("cpu")
    torch._dynamo.reset()
    q = quantizer(mode)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def roundtrip(x):
        t = q.quantize(x)
        return t, t.dequantize()

    with tejit.backend(how):
        # Of more than one tile of swizzled scales: torch itself specialises dimensions of size 1.
        for rows in (144, 208, 400) if mode == "swizzled" else (32, 48, 208):
            x = provoking("normal", (rows, 144), torch.bfloat16)
            torch._dynamo.mark_dynamic(x, 0)
            torch.manual_seed(rows)
            t, values = roundtrip(x)
            torch.manual_seed(rows)
            want = q(x)
            assert_same_buffers(t, want)
            assert_bitwise_equal(values, want.dequantize())
    assert counter.frame_count == 1


def test_amax_over_a_process_group(tmp_path) -> None:
    """One process: the reduction runs, and changes nothing; the larger amax of another process is the kernels' test."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        for mode in ("1x16", "rht", "16x16"):
            x, t = make(mode=mode)
            group = torch.distributed.group.WORLD
            assert_same_buffers(quantizer(mode).quantize(x, amax_reduction_group=group), t)
            u = quantizer(mode).make_empty(x.shape, dtype=x.dtype, device="cpu")
            assert_same_buffers(quantizer(mode).quantize(x, out=u, amax_reduction_group=group), t)
    finally:
        torch.distributed.destroy_process_group()

"""Faults that users of such software reported, for every format; each test names the report."""

import copy

import ml_dtypes
import numpy as np
import pytest
import torch

import tejit
from tejit.kernels.gemm import gemm
from tejit.kernels.swizzle import unswizzle
from tests.common import DEVICES, assert_bitwise_equal, poisoned_memory, provoking, short, two_gpus
from tests.formats.registry import CASES, buffers, each_case, quantized

without_rotation = lambda case: "rht" not in case.name  # noqa: E731 - a rotation spreads every element over its block


def assert_same(one, other) -> None:
    theirs = buffers(other)
    for name, buffer in buffers(one).items():
        assert_bitwise_equal(buffer, theirs[name], name)


@pytest.mark.parametrize("device", DEVICES)
@each_case(usages=True)
def test_zeros_stay_zero_and_all_is_finite(case, usage, device) -> None:
    """pytorch/ao#4713: one zeroed row, a zeroed column, a zeroed tensor."""
    q = case.quantizer(usage, device=device)
    for what in ("row", "column", "tensor"):
        x = provoking("normal", (64, 96), torch.bfloat16).to(device)
        zeroed = {"row": x[3:4], "column": x[:, 5:6], "tensor": x}[what]
        zeroed.zero_()
        got = quantized(q, x).dequantize(torch.float32)
        assert got.isfinite().all()
        rotated = "rht" in case.name and not usage[0]
        if not rotated or what != "row":  # rotated back, 16 rows come from one another
            assert (got[x == 0] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 5, 127, 129])
@each_case(only=lambda case: not case.square)
def test_padding_of_scales_is_zero_and_products_are_finite(case, rows, device) -> None:
    """vllm#37564: memory holds NaN before; every padding byte of every scale buffer is 0 afterwards."""
    q = case.quantizer((True, False), device=device)
    x = provoking("normal", (rows, 96), torch.bfloat16).to(device)
    w = provoking("normal", (32, 96), torch.bfloat16, 1).to(device)
    with poisoned_memory():
        t, fresh = quantized(q, x), q.make_empty((rows, 96), dtype=torch.bfloat16, device=device)
        quantized(q, x, out=fresh)
        for made in (t, fresh):
            for name, scales in buffers(made).items():
                if "scale_inv" in name and scales.dim() == 2 and scales.dtype == torch.uint8:
                    block = 32 if "mxfp8" in case.name.split("nvfp4")[0] else 16
                    lying = unswizzle(scales) if "swizzled" in case.name else scales
                    assert (lying[rows:] == 0).all(), name
                    assert (lying[:, 96 // block :] == 0).all(), name
                elif "scale_inv" in name and scales.dim() == 2:
                    assert (scales[:, rows:] == 0).all(), name
            out = gemm(q.rowwise_operand(made._inner()), q.rowwise_operand(quantized(q, w)._inner()), torch.float32)
            assert out.isfinite().all()


@pytest.mark.parametrize("value", ["inf", "nan"])
@each_case(usages=True, only=without_rotation)
def test_one_value_out_of_range_stays_alone(case, usage, value) -> None:
    """One inf or NaN: blocks keep every other block as it is, one scale for all keeps every other value finite."""
    x = provoking("normal", (256, 288), torch.bfloat16)
    clean = quantized(case.quantizer(usage), x).dequantize(torch.float32)
    broken = x.clone()
    broken[40, 50] = float(value)
    got = quantized(case.quantizer(usage), broken).dequantize(torch.float32)
    if "identity" in case.name:
        assert got.isfinite().sum() == got.numel() - 1 if usage[0] or case.name.startswith("identity") else True
        return
    block = torch.zeros(x.shape, dtype=torch.bool)
    size = case.kept or 16
    block[40 // size * size : 40 // size * size + size, 50 // size * size : 50 // size * size + size] = True
    assert got[~block].isfinite().all()
    if "mxfp8" not in case.name:  # whose scale of an infinite block is 2^127: the infinity stays one
        assert not got.isinf().any()
        assert got.isfinite().all() or value == "nan"
    if case.kept is not None:
        assert_bitwise_equal(got[~block], clean[~block])


def test_scales_are_divisions_not_reciprocals() -> None:
    """TE#2639. Oracle: numpy's float32 division."""
    for seed in range(200):
        x = provoking("normal", (1, 64), torch.float32, seed)
        amax = np.float32(x.abs().max().item())
        want = np.float32(1) / (np.float32(448) / amax)
        for case in CASES:
            if case.name in ("fp8", "hybrid fp8 blocks"):
                (name,) = [n for n in buffers(case.quantizer()(x)) if n.endswith("_scale_inv") and "column" not in n]
                assert buffers(case.quantizer()(x))[name].numpy()[0] == want
        blocks = tejit.Float8BlockQuantizer(block_scaling_dim=1, force_pow_2_scales=False)(x)
        assert blocks._rowwise_scale_inv[0, 0].item() == want


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exponent", [-126, -133, -149])
@each_case(usages=True)
def test_subnormal_values_count_as_themselves(case, usage, exponent, device) -> None:
    """ROCm/TE#737: finite, and the numerics in plain torch are the oracle's (held to published bytes elsewhere)."""
    x = torch.full((64, 96), 2.0**exponent, device=device)
    x[::2] *= -1
    t = quantized(case.quantizer(usage, device=device), x)
    assert t.dequantize().isfinite().all()
    with tejit.backend("torch"):
        plain = quantized(case.quantizer(usage, device=device), x)
    for mine, theirs in zip(t._inner(), plain._inner(), strict=True):
        assert mine is None or torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
def test_mxfp8_of_the_smallest_blocks(device) -> None:
    """pytorch/ao#4725: 32 values 2^-133 have scale byte 0 and data bytes 0x08."""
    x = torch.full((32, 32), 2.0**-133, device=device)
    for usage in ((True, False), (False, True)):
        t = tejit.MXFP8Quantizer(rowwise=usage[0], columnwise=usage[1])(x)
        data, scales = list(buffers(t).values())
        assert (data == 0x08).all()
        assert (scales == 0).all()
        assert_bitwise_equal(t.dequantize(), x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fp8_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=short)
def test_casts_saturate_everywhere_alike(fp8_dtype, device) -> None:
    """pytorch#178817. Oracle: ml_dtypes, clamped first."""
    largest = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}[fp8_dtype]
    numpy_dtype = {torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn, torch.float8_e5m2: ml_dtypes.float8_e5m2}[fp8_dtype]
    x = torch.tensor([largest, 449.0, 500.0, 1e6, float("inf"), -float("inf"), -500.0, 0.5] * 4, device=device)
    want = np.clip(x.cpu().numpy(), -largest, largest).astype(numpy_dtype).view(np.uint8)
    scale, amax = torch.ones(1, device=device), torch.zeros(1, device=device)
    q = tejit.Float8Quantizer(fp8_dtype, scale=scale, amax=amax, columnwise=False, internal=True)
    for how in ("auto", "torch"):
        with tejit.backend(how):
            assert (q.quantize(x)._data.cpu().numpy() == want).all(), how

            @torch.compile(fullgraph=True)
            def cast(x):
                return q.quantize(x)._data

            torch._dynamo.reset()
            assert (cast(x).cpu().numpy() == want).all(), f"inductor {how}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 127, 8352])
@each_case(only=lambda case: not case.square)
def test_odd_numbers_of_rows(case, rows, device) -> None:
    """pytorch#133334: the same rows alone and among others, where a row's scale is its own."""
    x = provoking("normal", (rows, 32), torch.bfloat16).to(device)
    t = quantized(case.quantizer((True, False), device=device), x)
    error = (t.dequantize().double() - x.double()).norm() / x.double().norm()
    assert error <= 1.6 * case.error


@pytest.mark.parametrize("device", DEVICES)
@each_case(usages=True)
def test_strides_do_not_matter(case, usage, device) -> None:
    """torch-spyre#4311: transposed, stepped, offset, expanded and channels-last inputs: the bytes of the copy."""
    base = provoking("normal", (96, 128), torch.bfloat16).to(device)
    images = provoking("normal", (2, 32, 4, 32), torch.bfloat16).to(device)
    for x in (
        base.t(),
        base[:, ::2],
        base[32:, 32:],
        base[:1].expand(64, 128),
        images.contiguous(memory_format=torch.channels_last),
    ):
        assert not x.is_contiguous()
        q = case.quantizer(usage, device=device)
        assert_same(quantized(q, x), quantized(q, x.contiguous()))


@each_case(usages=True)
def test_views_keep_requires_grad(case, usage) -> None:
    """Primus-Turbo#335."""
    x = provoking("normal", (64, 96), torch.float32).requires_grad_()
    view = quantized(case.quantizer(usage), x).view(-1, 32)
    assert view.requires_grad
    view.sum().backward()
    assert (x.grad == 1).all()


@each_case(usages=True)
def test_inference_mode(case, usage) -> None:
    """pytorch/ao#3487: made inside and used outside, and the reverse."""
    x = provoking("normal", (64, 96), torch.float32)
    q = case.quantizer(usage)
    with torch.inference_mode():
        inside = quantized(q, x)
    outside = quantized(q, x)
    values = outside.dequantize()

    def use(t):
        return [t.t().dequantize().t(), t.detach().dequantize(), t.to("cpu").dequantize(), (t * 1)]

    for got in use(inside):
        assert torch.equal(got.dequantize() if hasattr(got, "_quantizer") else got, values)
    with torch.inference_mode():
        for got in use(outside):
            assert torch.equal(got, values)


@each_case()
def test_linear_gives_the_same_in_every_mode(case) -> None:
    """pytorch/ao#564."""
    x = provoking("normal", (5, 96), torch.float32)
    w = quantized(case.quantizer(), provoking("normal", (64, 96), torch.float32, 1))
    want = torch.nn.functional.linear(x, w.dequantize())
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():  # the layout of the dequantized weight, and so the order of summation, may differ
            torch.testing.assert_close(torch.nn.functional.linear(x, w), want, rtol=1e-5, atol=1e-4)


@each_case(usages=True)
def test_deepcopy(case, usage) -> None:
    """optimum-quanto#358: equal bytes, own memory, attributes kept."""
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(quantized(case.quantizer(usage), provoking("normal", (64, 96), torch.float32)))
    module.weight.main_grad = torch.ones(2)
    twin = copy.deepcopy(module)
    assert type(twin.weight) is type(module.weight)
    assert isinstance(twin.weight, torch.nn.Parameter)
    assert_same(twin.weight, module.weight)
    theirs = {b.data_ptr() for b in buffers(module.weight).values()}
    assert not theirs & {b.data_ptr() for b in buffers(twin.weight).values()}
    assert torch.equal(twin.weight.main_grad, torch.ones(2))
    assert twin.weight.main_grad is not module.weight.main_grad


@each_case(usages=True, only=lambda case: case.name.startswith("fp8"))
def test_the_scale_of_a_tensor_has_one_element_in_one_dimension(case, usage) -> None:
    """vllm#30257."""
    for shape in ((), (1,), (3, 4), (2, 3, 4), (0, 4)):
        q = case.quantizer(usage)
        for t in (q(torch.ones(shape)), q.make_empty(shape, device="cpu")):
            assert t._scale_inv.shape == (1,)
            assert t._scale_inv.dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
@each_case(usages=True)
def test_nbytes_and_types_tell_the_truth(case, usage, device) -> None:
    """torchao and others: the type after view, slice and t; the bytes that are there."""
    t = quantized(case.quantizer(usage, device=device), provoking("normal", (64, 96), torch.float32).to(device))
    assert t.nbytes == sum(b.numel() * b.element_size() for b in buffers(t).values())
    values = t.dequantize()
    for view in (lambda a: a.view(2, 32, 96), lambda a: a[16:32], lambda a: a.t(), lambda a: a.view(-1)):
        got = view(t)
        assert type(got) is type(t) or not isinstance(got, tejit.QuantizedTensor)
        plain = got.dequantize() if type(got) is type(t) else got
        assert_bitwise_equal(plain.contiguous(), view(values).contiguous())
    assert "\n" not in repr(t)
    assert str(t.nbytes) in repr(t)


def test_hardware_without_the_instruction_is_named() -> None:
    """TE#2956: what is missing, and what happens instead."""
    for available in (
        tejit.is_fp8_available,
        tejit.is_fp8_block_scaling_available,
        tejit.is_mxfp8_available,
        tejit.is_nvfp4_available,
    ):
        answer, reason = available(return_reason=True, device="cpu")
        assert answer is False
        assert "cpu" in reason
        assert "dequantized and multiplied" in reason


@pytest.mark.gpu
def test_hardware_without_the_instruction_is_named_on_the_gpu() -> None:
    capability = torch.cuda.get_device_capability()
    for available, name in ((tejit.is_mxfp8_available, "MXFP8"), (tejit.is_nvfp4_available, "NVFP4")):
        answer, reason = available(return_reason=True, device="cuda")
        assert answer == (reason == "")
        if capability < (10, 0):
            assert f"{capability[0]}.{capability[1]}" in reason
            assert name in reason
            assert "dequantized and multiplied" in reason


@pytest.mark.gpu
@two_gpus
@each_case(usages=True, only=lambda case: not case.live)
def test_everything_moves_to_another_device(case, usage) -> None:
    """diffusers#10798."""
    t = quantized(case.quantizer(usage), provoking("normal", (64, 96), torch.float32).cuda(0))
    moved = t.to("cuda:1")
    assert moved.device == torch.device("cuda", 1)
    for buffer in buffers(moved).values():
        assert buffer.device == torch.device("cuda", 1)
    assert_bitwise_equal(moved.dequantize().cpu(), t.dequantize().cpu())
    again = quantized(case.quantizer(usage), t.dequantize().to("cuda:1"), out=moved)
    assert again.dequantize().device == torch.device("cuda", 1)


@pytest.mark.gpu
@two_gpus
@each_case(only=lambda case: not case.live)
def test_it_runs_on_the_tensor_s_own_device_and_stream(case) -> None:
    """QPyTorch#46: a tensor on cuda:1 while cuda:0 is current."""
    x = provoking("normal", (64, 96), torch.float32)
    want = quantized(case.quantizer(), x.cuda(0)).dequantize().cpu()
    with torch.cuda.device(0), torch.cuda.stream(torch.cuda.Stream(1)):
        got = quantized(case.quantizer(), x.to("cuda:1"))
        assert got.device == torch.device("cuda", 1)
        if not case.stochastic:
            assert_bitwise_equal(got.dequantize().cpu(), want)


@pytest.mark.gpu
@each_case()
def test_it_runs_on_a_side_stream(case) -> None:
    """The kernel is ordered with the stream it is called on: a long fill before it is seen."""
    x = provoking("normal", (1024, 1024), torch.float32).cuda()
    want = quantized(case.quantizer(device="cuda"), x).dequantize()
    late = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(x)
        got = quantized(case.quantizer(device="cuda"), late).dequantize()
    torch.cuda.current_stream().wait_stream(stream)
    if not case.stochastic:
        assert_bitwise_equal(got, want)

"""Modules quantize norms and activations in the kernel that computes them: when, and with which bytes."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch.utils._python_dispatch import TorchDispatchMode

import tejit
from tejit import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    LayerNormMLP,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from tejit.nn import fused, products
from tejit.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from tests.common import DEVICES, DTYPES, assert_bitwise_equal, short
from tests.nn.twins import randomised, results


class Recorded(TorchDispatchMode):
    """Which of tejit's ops run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tejit":
            self.ops.add(func._schema.name.removeprefix("tejit::"))
        return func(*args, **(kwargs or {}))


def delayed(device: str) -> Quantizer:
    return Float8Quantizer(scale=torch.full((1,), 0.5, device=device), amax=torch.zeros(1, device=device))


#: Makers of quantizers, and whether an op knows how to quantize with them what it computes.
QUANTIZERS = {
    "current": (lambda device: Float8CurrentScalingQuantizer(force_pow_2_scales=True), True),
    "e5m2 rowwise": (lambda device: Float8CurrentScalingQuantizer(torch.float8_e5m2, columnwise=False), True),
    "delayed": (delayed, True),
    "blocks": (lambda device: Float8BlockQuantizer(block_scaling_dim=1), True),
    "2D blocks": (lambda device: Float8BlockQuantizer(block_scaling_dim=2), False),
    "MXFP8": (lambda device: MXFP8Quantizer(optimize_for_gemm=True), True),
    "MXFP8 2D": (lambda device: MXFP8Quantizer(with_2d_quantization=True), False),
    "NVFP4": (lambda device: NVFP4Quantizer(), False),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_bytes_are_those_of_the_composition(name: str, dtype: torch.dtype, device: str) -> None:
    make, known = QUANTIZERS[name]
    for rows, columns in ((37, 64), (64, 96), (64, 72)):
        x = torch.randn(rows, 2 * columns, device=device, dtype=dtype)
        weight, bias = torch.randn(2, columns, device=device, dtype=dtype)
        for kind in fused.NORMS:
            given = (x[:, :columns], weight, bias, 1e-5, kind, True)
            mine, theirs = make(device), make(device)
            want = products.quantized(theirs, fused.norm(*given)[0], 32)
            with Recorded() as recorded:
                got, *statistics = fused.normed(*given, mine, 32)
            assert ("norm_quantize" in recorded.ops) == (known and columns % 32 == 0)
            _same(got, want, mine, theirs)
            for a, b in zip(statistics, fused.norm(*given)[1:], strict=True):
                assert (a is None and b is None) or torch.equal(a, b)
        for kind in fused.ACTIVATIONS:
            mine, theirs = make(device), make(device)
            x_of = x if kind in fused.GATED else x[:, :columns]
            want = products.quantized(theirs, fused.activate(x_of, kind), 32)
            with Recorded() as recorded:
                got = fused.activated(x_of, kind, mine, 32)
            dear = isinstance(mine, Float8CurrentScalingQuantizer) and fused.ACTIVATIONS[kind] not in ("relu", "srelu")
            assert ("activation_quantize" in recorded.ops) == (known and not dear and columns % 32 == 0)
            _same(got, want, mine, theirs)


def _same(got, want, mine, theirs) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_bitwise_equal(a, b)
    if isinstance(mine, Float8Quantizer):
        assert_bitwise_equal(mine.amax, theirs.amax)


@pytest.mark.parametrize("device", DEVICES)
def test_another_output_dtype_is_rounded_once(device: str) -> None:
    x = torch.randn(32, 64, device=device)
    weight = torch.ones(64, device=device)
    quantizer = Float8CurrentScalingQuantizer()
    got, _, _ = fused.normed(x, weight, None, 1e-5, "LayerNorm", False, quantizer, 16, torch.bfloat16)
    y, _, _ = fused.norm(x, weight, None, 1e-5, "LayerNorm", False)
    _same(got, quantizer.quantize_inner(y.to(torch.bfloat16)), None, None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "recipe",
    [
        Float8CurrentScaling(),
        pytest.param(Float8BlockScaling(), marks=pytest.mark.full),
        pytest.param(MXFP8BlockScaling(), marks=pytest.mark.full),
    ],
    ids=["current", "blocks", "MXFP8"],
)
def test_one_graph_for_every_batch(recipe, device: str) -> None:
    """Sizes that the kernels take, rows that they pad: one graph, eager's bits."""
    torch._dynamo.reset()
    module = randomised(LayerNormMLP(64, 128, activation="swiglu", dtype=torch.bfloat16, device=device))
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for rows in (32, 37, 96, 5):
        x = torch.randn(rows, 64, device=device, dtype=torch.bfloat16)
        with tejit.autocast(recipe=recipe):
            want, got = (results(run, module, x, x, dynamic=(0,)) for run in (module, compiled))
        for what, value in want.items():
            assert torch.equal(got[what], value), f"{rows} rows: {what}"
    assert counter.frame_count == 1

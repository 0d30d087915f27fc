"""One small odd shape for every kernel, to be run under compute-sanitizer:

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python -m pytest -m sanitize tests/formats/test_sanitize.py
"""

import pytest
import torch

from tejit.kernels.gemm import gemm
from tests.common import DTYPES, provoking, short
from tests.formats.registry import each_case, quantized

pytestmark = [pytest.mark.gpu, pytest.mark.sanitize]


def shape_for(case, usage) -> tuple[int, int]:
    """Odd multiples of what the case needs, and one row or column where it needs nothing."""
    rowwise, columnwise = (True, True) if case.square else (usage[0] or case.dependent, usage[1])
    return case.column * 3 if columnwise else 5, case.row * 5 if rowwise else 7


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@each_case(usages=True)
def test_quantize(case, usage, dtype) -> None:
    q = case.quantizer(usage, device="cuda")
    for shape in (shape_for(case, usage), (case.column, case.row)):
        x = provoking("wide", shape, dtype).cuda()
        t = quantized(q, x)
        quantized(q, x, out=t)
        quantized(q, x, out=t, noop_flag=torch.ones(1, device="cuda"))
        assert t.dequantize().isfinite().all()
    torch.cuda.synchronize()


@each_case(only=lambda case: not case.stochastic)
def test_offset_and_strided_input(case) -> None:
    rows, columns = shape_for(case, (True, True))
    whole = provoking("normal", (rows + 1, columns + 3), torch.bfloat16).cuda()
    x = whole[1:, 3:]
    q = case.quantizer(device="cuda")
    assert torch.equal(quantized(q, x).dequantize(), quantized(q, x.contiguous()).dequantize()) or case.live
    torch.cuda.synchronize()


@each_case()
def test_product(case) -> None:
    q = case.quantizer(internal=True, device="cuda")
    rows, columns = shape_for(case, (True, True))
    inner = quantized(q, provoking("normal", (rows, columns), torch.bfloat16).cuda())._inner()
    for operand in (q.rowwise_operand(inner), q.columnwise_operand(q.columnwise_inner(inner))):
        assert gemm(operand, operand, torch.bfloat16).isfinite().all()
    torch.cuda.synchronize()

"""Small odd shapes for every kernel of norms and activations, to be run under compute-sanitizer:

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python -m pytest -m sanitize tests/kernels/test_fused_sanitize.py
"""

from __future__ import annotations

import pytest
import torch

from tejit.kernels.activation import KINDS, activation, activation_quantize
from tejit.kernels.fused import FUSED_MXFP8
from tejit.kernels.norm import norm, norm_quantize
from tests.common import DTYPES, short
from tests.kernels.fused_casts import FORMATS, USAGES, cast_of

pytestmark = [pytest.mark.gpu, pytest.mark.sanitize]


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("usage", USAGES.values(), ids=USAGES)
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_quantize(format: int, usage: tuple[bool, bool], dtype: torch.dtype) -> None:
    for rows, columns in ((5, 96), (33, 64), (3, 8224), (7, 11)):
        if format == FUSED_MXFP8 and columns % 32:
            continue
        x = torch.randn(rows, 2 * columns, device="cuda", dtype=dtype)
        weight, bias = torch.randn(2, columns, device="cuda", dtype=dtype)
        for multiple in (32,) if format == FUSED_MXFP8 else (1, 16):
            for rms in (False, True):
                cast = cast_of(format, *usage, "cuda")
                _, _, rstd = norm_quantize(x[:, :columns], weight, bias, 1e-5, rms, True, multiple, cast)
                assert rstd.isfinite().all()
            for number, kind in enumerate(KINDS):
                activation_quantize(x, kind, True, multiple, cast_of(format, *usage, "cuda", number))
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_plain(dtype: torch.dtype) -> None:
    for rows, columns in ((5, 96), (3, 8224), (7, 11)):
        x = torch.randn(rows, 2 * columns, device="cuda", dtype=dtype)
        for value in (norm(x, None, None, 1e-5, False, False)[0], *(activation(x, kind, True) for kind in KINDS)):
            assert value.isfinite().all()
    torch.cuda.synchronize()

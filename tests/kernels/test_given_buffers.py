"""Buffers, seeds and amaxes that do not fit are refused by the kernels and by the torch backend alike, unwritten."""

import pytest
import torch

import tejit
from tejit.kernels import fp8, fp8_block, mxfp8, nvfp4

NVFP4_MODE = (False, 0, False, False, 0, 448, False)
#: How to make buffers, and how to quantize into them.
FORMATS = {
    "fp8": (
        lambda x: fp8.quantize_current(x, 0, True, True, False, 0.0),
        lambda x, b: fp8.quantize_current_out(x, 0, False, 0.0, None, None, *b),
    ),
    "delayed": (
        lambda x: fp8.quantize_delayed(x, 0, True, True, torch.ones(1), torch.zeros(1)),
        lambda x, b: fp8.quantize_delayed_out(x, 0, torch.ones(1), torch.zeros(1), None, *b),
    ),
    "blocks": (
        lambda x: fp8_block.quantize(x, 0, 1, True, True, True, 0.0),
        lambda x, b: fp8_block.quantize_out(x, 0, 1, True, 0.0, None, *b),
    ),
    "mxfp8": (
        lambda x: mxfp8.quantize(x, 0, True, True, False, False),
        lambda x, b: mxfp8.quantize_out(x, 0, False, False, None, *b),
    ),
    "nvfp4": (
        lambda x: nvfp4.quantize(x, True, True, *NVFP4_MODE, None, None, None),
        lambda x, b: nvfp4.quantize_out(x, *NVFP4_MODE, None, None, None, None, *b),
    ),
}
both_backends = pytest.mark.parametrize("backend", ["kernels", "torch"])


@both_backends
@pytest.mark.parametrize("format", FORMATS)
def test_a_buffer_of_another_dtype_or_shape(format, backend) -> None:
    make, write = FORMATS[format]
    x = torch.randn(64, 96)
    with tejit.backend(backend):
        right = make(x)
        for i in range(len(right)):
            for change in (
                lambda t: t.to(torch.int8),
                lambda t: t.to(torch.float16),
                lambda t: torch.cat([t, t]),
                lambda t: t[None].repeat(2, *[1] * t.dim()),
            ):
                given = [torch.zeros_like(t) for t in right]
                given[i] = torch.zeros_like(change(right[i]))
                with pytest.raises(RuntimeError, match=r"dtype.*shape"):
                    write(x, given)
                assert not any(buffer.any() for buffer in given)


@both_backends
@pytest.mark.parametrize("row_scaled", [False, True], ids=["tensor", "rows"])
def test_a_seed_or_amax_of_another_dtype_or_shape(row_scaled, backend) -> None:
    x = torch.randn(64, 96)
    mode = (False, 0, False, row_scaled, 0, 448, False)
    rows, columns = (64, 96) if row_scaled else (1, 1)
    good = [None, torch.ones(rows), torch.ones(columns)]
    with tejit.backend(backend):
        nvfp4.quantize(x, True, True, *mode, *good)
        for i, length in ((1, rows), (2, columns)):
            for bad in (torch.ones(length + 1), torch.ones(()), torch.ones(length, dtype=torch.float64)):
                with pytest.raises(RuntimeError, match=f"{('seed', 'row_amax', 'col_amax')[i]} has dtype"):
                    nvfp4.quantize(x, True, True, *mode, *[bad if i == j else given for j, given in enumerate(good)])
        if not row_scaled:
            for seed in (torch.zeros(3, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.zeros(2)):
                with pytest.raises(RuntimeError, match="seed has dtype"):
                    nvfp4.quantize(x, True, True, *mode, seed, None, None)


def test_scale_and_amax_are_two_tensors() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="scale and amax are one tensor"):
        tejit.Float8Quantizer(scale=one, amax=one)

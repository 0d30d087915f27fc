"""The block ops' own errors, raised in C++: they name the value, what was needed and what to do."""

import pytest
import torch

from tests.common import DEVICES

ops = torch.ops.tejit


def out(x: torch.Tensor, **changes: torch.Tensor | None) -> None:
    buffers = dict(
        zip(("row", "row_s", "col", "col_s"), ops.fp8_block_quantize(x, 0, 1, True, True, False, 0.0), strict=True)
    )
    buffers.update(changes)
    ops.fp8_block_quantize_out(x, 0, 1, False, 0.0, None, *buffers.values())


def no_bytes(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8, device=x.device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: ops.fp8_block_quantize(x.long(), 0, 1, True, True, False, 0.0), ["int64", "x.to("]),
        (lambda x: ops.fp8_block_quantize(x, 2, 1, True, True, False, 0.0), ["fp8 is 2", "0 (E4M3)"]),
        (lambda x: ops.fp8_block_quantize(x, 0, 3, True, True, False, 0.0), ["dim is 3", "1 (1x128) or 2"]),
        (lambda x: ops.fp8_block_quantize(x, 0, 1, True, True, False, -1.0), ["eps is -1", ">= 0"]),
        (lambda x: out(x, row=no_bytes(x, 4, 5)), ["row", "(4, 5)", "(4, 6)"]),
        (lambda x: out(x, col=no_bytes(x, 4, 6).t()), ["col", "not contiguous"]),
        (lambda x: out(x, row_s=torch.ones(1, 5, device=x.device)), ["row_scale_inv", "(1, 5)", "float32", "(1, 4)"]),
        (lambda x: out(x, col_s=torch.ones(1, 8, device=x.device).double()), ["col_scale_inv", "float64", "(1, 8)"]),
        (lambda x: out(x, row_s=None), ["row is given without its scale_inv", "both buffers"]),
        (lambda x: out(x, col=None), ["col_scale_inv is given alone", "both buffers"]),
        (lambda x: ops.fp8_block_make_empty([3, -1], 2, True, True, x.device, False), ["dimension 1", "negative"]),
        (lambda x: ops.fp8_block_make_empty([3, 1], 0, True, True, x.device, False), ["dim is 0"]),
    ],
    ids=["input", "element", "dim", "eps", "shape", "strides", "scales", "dtype", "no scales", "no data", "size", "d"],
)
def test_each_names_what_was_wrong(call, words, device, need_kernels) -> None:
    need_kernels(device)
    with pytest.raises(RuntimeError) as caught:
        call(torch.ones(4, 6, device=device))
    for word in words:
        assert word in str(caught.value)

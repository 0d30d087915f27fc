"""MXFP8's own errors, from Python and from C++: they name the value, what was needed and what to do."""

import pytest
import torch

from tejit import backend
from tejit.format_info import MXFP8, checked_alignment
from tejit.kernels import mxfp8
from tests.common import DEVICES

ops = torch.ops.tejit


def out(x: torch.Tensor, **changes: torch.Tensor | None) -> None:
    buffers = dict(
        zip(("row", "row_s", "col", "col_s"), ops.mxfp8_quantize(x, 0, True, True, False, False), strict=True)
    )
    buffers.update(changes)
    ops.mxfp8_quantize_out(x, 0, False, False, None, *buffers.values())


def no_bytes(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8, device=x.device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: ops.mxfp8_quantize(x.long(), 0, True, True, False, False), ["int64", "x.to("]),
        (lambda x: ops.mxfp8_quantize(x, 2, True, True, False, False), ["fp8 is 2", "0 (E4M3)"]),
        (lambda x: out(x, row=no_bytes(x, 64, 32)), ["row", "(64, 32)", "(32, 64)"]),
        (lambda x: out(x, col=no_bytes(x, 64, 32).t()), ["col", "not contiguous"]),
        (lambda x: out(x, row_s=no_bytes(x, 32, 4)), ["row_scale_inv", "(32, 4)", "uint8", "(128, 4)"]),
        (lambda x: out(x, col_s=no_bytes(x, 4, 128).int()), ["col_scale_inv", "(4, 128)", "uint8"]),
        (lambda x: out(x, row_s=None), ["row is given without its scale_inv", "both buffers"]),
        (lambda x: out(x, col=None), ["col_scale_inv is given alone", "both buffers"]),
        (lambda x: ops.mxfp8_make_empty([32, -1], True, True, x.device, False), ["dimension 1", "negative"]),
    ],
    ids=["input", "element", "shape", "strides", "scales", "dtype", "no scales", "no data", "size"],
)
def test_each_names_what_was_wrong(call, words, device, need_kernels) -> None:
    need_kernels(device)
    with pytest.raises(RuntimeError) as caught:
        call(torch.ones(32, 64, device=device))
    for word in words:
        assert word in str(caught.value)


#: Shape, (rowwise, columnwise, square), what the message names.
MISALIGNED = [
    ((64, 40), (True, False, False), ["K", "40", "32", "64"]),
    ((40, 64), (False, True, False), ["M", "40", "32", "64"]),
    ((3, 5, 64), (True, True, False), ["M", "15", "32"]),
    ((40, 64), (True, False, True), ["M", "40", "64"]),
    ((64, 767), (True, True, True), ["K", "767", "768"]),
    ((), (True, False, False), ["K", "= 1 ", "()"]),
    ((33,), (True, False, False), ["K", "33", "(33,)", "64"]),
    ((32,), (True, True, False), ["M", "= 1 ", "(32,)"]),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "usage", "words"), MISALIGNED, ids=lambda v: str(v) if isinstance(v, tuple) else "")
def test_misaligned_shapes_raise_one_error_everywhere(shape, usage, words, device, need_kernels) -> None:
    need_kernels(device)
    row, col, square = usage
    x = torch.ones(shape, device=device)
    with pytest.raises(ValueError) as caught:
        checked_alignment(MXFP8, shape, row or square, col or square)
    text = str(caught.value)
    for word in words:
        assert word in text
    empty = [torch.empty(0, dtype=torch.uint8, device=device) if wanted else None for wanted in (row, row, col, col)]
    for how in ("kernels", "torch"):
        with backend(how):
            for call in (
                lambda: mxfp8.quantize(x, 0, row, col, square, False),
                lambda: mxfp8.quantize_out(x, 0, square, False, None, *empty),
            ):
                with pytest.raises(ValueError) as caught:
                    call()
                assert str(caught.value) == text
    # The C++ side, for those who call the ops themselves.
    with pytest.raises(RuntimeError) as caught_here:
        ops.mxfp8_quantize.default(x, 0, row, col, square, False)
    assert text in str(caught_here.value)
    with pytest.raises(RuntimeError) as caught_here:
        ops.mxfp8_quantize_out.default(x, 0, square, False, None, *empty)
    assert text in str(caught_here.value)
    if not square:
        with pytest.raises(ValueError) as caught:
            mxfp8.make_empty(shape, row, col, torch.device(device), False)
        assert str(caught.value) == text
        with pytest.raises(RuntimeError) as caught_here:
            ops.mxfp8_make_empty.default(list(shape), row, col, torch.device(device), False)
        assert text in str(caught_here.value)


def test_only_what_is_asked_for_is_checked() -> None:
    x = torch.ones(5, 64)
    mxfp8.quantize(x, 0, True, False, False, False)
    mxfp8.quantize(x.t(), 0, False, True, False, False)
    mxfp8.quantize(torch.ones(5, 7), 0, False, False, True, False)
    mxfp8.quantize(torch.ones(0, 64), 0, True, True, True, False)

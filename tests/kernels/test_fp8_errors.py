"""The ops' own errors, raised in C++: they name the value, what was needed and what to do."""

import pytest
import torch

from tests.common import DEVICES

ops = torch.ops.tejit


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, one: ops.fp8_amax(x.long()), ["int64", "bfloat16", "x.to("]),
        (lambda x, one: ops.fp8_quantize_current(x, 2, True, True, False, 0.0, None), ["fp8 is 2", "0 (E4M3)"]),
        (lambda x, one: ops.fp8_quantize_current(x, 0, True, True, False, -1.0, None), ["eps is -1", ">= 0"]),
        (lambda x, one: ops.fp8_quantize_current(x, 0, True, True, False, float("nan"), None), ["eps is nan"]),
        (lambda x, one: ops.fp8_quantize_current(x, 0, True, True, False, 0.0, x), ["amax", "(4, 6)"]),
        (lambda x, one: ops.fp8_scale(one.double(), 0, False, 0.0), ["float64"]),
        (
            lambda x, one: ops.fp8_quantize_current_out(
                x, 0, False, 0.0, None, None, torch.zeros(4, 5, dtype=torch.uint8, device=x.device), None, one
            ),
            ["data", "(4, 5)", "(4, 6)"],
        ),
        (
            lambda x, one: ops.fp8_quantize_current_out(
                x, 0, False, 0.0, None, None, torch.zeros(6, 4, dtype=torch.uint8, device=x.device).t(), None, one
            ),
            ["data", "not contiguous"],
        ),
        (
            lambda x, one: ops.fp8_make_empty([3, -1], True, True, x.device, False),
            ["dimension 1", "negative"],
        ),
    ],
    ids=["input", "element", "eps", "nan eps", "amax", "scale", "out shape", "out strides", "shape"],
)
def test_each_names_what_was_wrong(call, words, device, need_kernels) -> None:
    need_kernels(device)
    with pytest.raises(RuntimeError) as caught:
        call(torch.ones(4, 6, device=device), torch.ones(1, device=device))
    for word in words:
        assert word in str(caught.value)

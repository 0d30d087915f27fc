"""Files come from anywhere: what `torch.load(weights_only=True)` gives back works, or is refused when it is loaded."""

import io
import pickle

import pytest
import torch

import tejit
from tests.formats.registry import CASES, buffers, each_case, quantized

SHAPE = (64, 64)


class _File:
    def __init__(self, function, arguments) -> None:
        self.reduction = function, arguments

    def __reduce__(self):
        return self.reduction


def load(function, arguments):
    file = io.BytesIO()
    torch.save(_File(function, tuple(arguments)), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def parts(case, internal=False):
    """``(rebuild, its arguments)`` of a tensor of ``case``; those of a storage with ``internal``."""
    function, arguments = quantized(case.quantizer(internal=internal), torch.randn(SHAPE)).__reduce_ex__(2)
    return function, list(arguments)


def refused(function, arguments, position, value) -> None:
    changed = [*arguments]
    changed[position] = value
    with pytest.raises(pickle.UnpicklingError):
        load(function, changed)


@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "storage"])
@each_case()
def test_what_was_written_is_loaded(case, internal) -> None:
    function, arguments = parts(case, internal)
    loaded = load(function, arguments)
    assert loaded.dequantize().shape == SHAPE
    assert "64" in repr(loaded)


@each_case()
def test_buffers_that_are_none(case) -> None:
    function, arguments = parts(case)
    held = arguments[1]
    for keyword, buffer in held.items():
        if buffer is None:
            continue
        wrong = [[1], "x", buffer.to("meta"), buffer.to_sparse(), buffer.to(torch.int8), buffer.reshape(-1)[:0]]
        if len([b for b in held.values() if b is not None]) == 1:
            del wrong[2]  # a tensor on meta
        for value in wrong:
            refused(function, arguments, 1, {**held, keyword: value})
    refused(function, arguments, 1, {**held, "unknown": torch.zeros(1)})
    refused(function, arguments, 1, [])


@each_case(only=lambda case: not case.name.startswith("identity"))
def test_half_a_direction(case) -> None:
    function, arguments = parts(case)
    held = arguments[1]
    for keyword in held:
        if held[keyword] is None:
            continue
        changed = [*arguments]
        changed[1] = {**held, keyword: None}
        try:
            loaded = load(function, changed)
        except pickle.UnpicklingError:
            continue
        assert keyword.endswith(("data", "data_transpose"))  # per-tensor FP8: the other bytes have the scale too
        assert loaded.dequantize().shape == SHAPE
        assert len(buffers(loaded)) == len([b for b in held.values() if b is not None]) - 1


@each_case()
def test_keywords_of_another_type_or_value(case) -> None:
    function, arguments = parts(case)
    keywords = arguments[2]
    for keyword in keywords:
        for value in ("x", -1, 2**70, torch.zeros(1), torch.float64, [1], float("nan")):
            refused(function, arguments, 2, {**keywords, keyword: value})
        if keyword != "quantizer":
            refused(function, arguments, 2, {**keywords, keyword: None})
    refused(function, arguments, 2, {**keywords, "unknown": 1})
    refused(function, arguments, 2, None)


@each_case(only=lambda case: not case.name.startswith("hybrid"))
def test_a_quantizer_of_another_format(case) -> None:
    function, arguments = parts(case)
    other = tejit.IdentityQuantizer() if "identity" not in case.name else tejit.MXFP8Quantizer()
    refused(function, arguments, 2, {**arguments[2], "quantizer": other})


@each_case()
def test_shapes_strides_and_flags(case) -> None:
    function, arguments = parts(case)
    for shape in ((-64, -64), "ab", (64.0, 64), (True, 4096), (64, 128), (4096,), None):
        refused(function, arguments, 3, shape)
    for stride in ((1, 2, 3), (-1, 1), (1.0, 1), "ab"):
        refused(function, arguments, 4, stride)
    for flag in ("yes", 1, None):
        refused(function, arguments, 5, flag)
        refused(function, arguments, 6, flag)


@each_case()
def test_attributes_that_would_hide_the_class(case) -> None:
    function, arguments = parts(case)
    for name in ("dequantize", "_view", "_inner", "data", "grad", "requires_grad", "__class__", "_quantizer", 1):
        refused(function, arguments, 7, {name: torch.zeros(SHAPE)})
    refused(function, arguments, 7, [1])
    assert load(function, [*arguments[:7], {"main_grad": torch.ones(2)}]).main_grad.tolist() == [1, 1]


@pytest.mark.parametrize("cls", ["x", 1, None])
def test_no_class_at_all(cls) -> None:
    function, arguments = parts(CASES[0])
    refused(function, arguments, 0, cls)

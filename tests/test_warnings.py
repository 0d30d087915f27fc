"""Warnings point to the line of the user's that they speak of, however far below it they arise."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from torch import nn

import tejit
from tejit import recipe as recipes
from tejit.nn import init
from tejit.recipe.recipes import _warn_of_no_name
from tejit.tensor import dispatch


def quantized() -> tejit.MXFP8Tensor:
    return tejit.MXFP8Quantizer()(torch.ones(32, 32))


def an_operation() -> None:
    quantized() + 1  # here


def a_method() -> None:
    quantized().cos()  # here


def a_view() -> None:
    quantized().as_strided((2,), (1,))  # here


def a_function_of_torchs() -> None:
    nn.functional.softplus(quantized())  # here


def an_optimizer() -> None:
    parameter = nn.Parameter(quantized())
    parameter.grad = torch.ones(32, 32)
    torch.optim.SGD([parameter], 0.1).step()  # here


def a_backward() -> None:
    parameter = nn.Parameter(quantized())
    y = (parameter * torch.ones(32, 32)).sum()
    dispatch._announced.clear()
    parameter.grad = quantized()
    y.backward()  # here


def a_recipe() -> None:
    recipes.MXFP8BlockScaling(fp8_format=recipes.Format.HYBRID)  # here


def a_conversion() -> None:
    tejit.convert(nn.Sequential(nn.Linear(16, 16)))  # here


def modules_that_do_not_fit() -> None:
    with tejit.quantized_model_init(recipe=recipes.MXFP8BlockScaling()):
        tejit.LayerNormMLP(33, 35)  # here


def a_layer_in_a_container_without_a_name() -> None:
    model = nn.Sequential(nn.Sequential(tejit.Linear(16, 16)))
    with tejit.autocast(recipe=recipes.Float8CurrentScaling(overrides=(("x", None),))):
        model(torch.ones(2, 16))  # here


CASES = [
    an_operation,
    a_method,
    a_view,
    a_function_of_torchs,
    an_optimizer,
    a_backward,
    a_recipe,
    a_conversion,
    modules_that_do_not_fit,
    a_layer_in_a_container_without_a_name,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_warning_points_to_the_line_of_the_user(case) -> None:
    dispatch._announced.clear()
    init._say_it_stays.cache_clear()
    _warn_of_no_name.cache_clear()
    lines, first = inspect.getsourcelines(case)
    here = first + next(number for number, line in enumerate(lines) if line.endswith("# here\n"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        case()
    assert said
    assert {one.category for one in said} == {UserWarning}
    found = [(one.filename, one.lineno) for one in said]
    assert (__file__, here) in found
    assert {filename for filename, _ in found} == {__file__}


def test_filters_by_module_hold() -> None:
    dispatch._announced.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.filterwarnings("error")
        warnings.filterwarnings("ignore", module="tests.test_warnings")
        an_operation()
    assert not said
    dispatch._announced.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="tests.test_warnings")
        with pytest.raises(UserWarning, match="has no form"):
            an_operation()

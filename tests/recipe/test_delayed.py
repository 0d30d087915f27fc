"""The recipe of delayed scaling: a value, with errors for what it cannot be; and autocast's arguments for it."""

import dataclasses
import pickle

import pytest
import torch

import tejit
from tejit.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling, Format


def test_it_is_a_value() -> None:
    assert DelayedScaling() == DelayedScaling(0, Format.HYBRID, 1024, "max", True)
    assert hash(DelayedScaling(margin=1)) == hash(DelayedScaling(margin=1))
    for field, value in (
        ("margin", 1),
        ("fp8_format", Format.E4M3),
        ("amax_history_len", 16),
        ("amax_compute_algo", "most_recent"),
        ("reduce_amax", False),
        ("overrides", (("head", None),)),
    ):
        other = DelayedScaling(**{field: value})
        assert other != DelayedScaling()
        assert pickle.loads(pickle.dumps(other)) == other
    with pytest.raises(dataclasses.FrozenInstanceError):
        DelayedScaling().margin = 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"margin": 0.5}, TypeError, "margin is 0.5; it must be an int"),
        ({"margin": True}, TypeError, "margin is True"),
        ({"margin": 200}, ValueError, "margin is 200: 448"),
        ({"margin": -(10**6)}, ValueError, "leaves the range of float32"),
        ({"margin": 10**6}, ValueError, "leaves the range of float32"),
        ({"amax_history_len": 0}, ValueError, "amax_history_len is 0; it must be at least 1"),
        ({"amax_history_len": "16"}, TypeError, "amax_history_len is '16'"),
        ({"amax_compute_algo": "mean"}, ValueError, "amax_compute_algo is 'mean'; it must be one of max, most_recent"),
        ({"amax_compute_algo": max}, ValueError, "amax_compute_algo is <built-in function max>"),
        ({"reduce_amax": 1}, TypeError, "reduce_amax is 1; it must be True or False"),
        ({"fp8_format": "HYBRID"}, TypeError, "fp8_format is 'HYBRID'"),
        ({"fp8_format": Format.E5M2}, ValueError, "E5M2 by E5M2"),
        ({"amax_history_length": 2}, TypeError, "amax_history_length"),
    ],
)
def test_nonsense_is_an_error(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        DelayedScaling(**arguments)


def test_arguments_of_autocast() -> None:
    with pytest.raises(TypeError, match="calibrating is 1; it must be True or False"):
        tejit.autocast(calibrating=1)
    with tejit.autocast(enabled=False, recipe=DelayedScaling(), calibrating=True):
        assert tejit.recipe.current_recipe() is None
        assert tejit.recipe.observed_recipe() == DelayedScaling()
        with tejit.autocast(recipe=Float8CurrentScaling(), calibrating=True):
            assert tejit.recipe.observed_recipe() is None
        with tejit.autocast(enabled=False):
            assert tejit.recipe.observed_recipe() is None
    assert tejit.recipe.observed_recipe() is None
    group = object()
    with tejit.autocast(amax_reduction_group=group):
        assert tejit.recipe.current_group() is group
        with tejit.autocast():
            assert tejit.recipe.current_group() is None
    assert tejit.recipe.current_group() is None


def test_its_quantizers_need_a_module() -> None:
    quantizer = DelayedScaling().linear.input.both
    with pytest.raises(TypeError, match=r"use tejit\.Float8Quantizer\(scale=..., amax=...\)"):
        quantizer.quantize(torch.zeros(2, 2))


def test_a_custom_recipe_cannot_have_them() -> None:
    """Their state follows one rule, which a function of roles does not give."""
    recipe = CustomRecipe(lambda role: DelayedScaling().linear.input.both)
    with pytest.raises(TypeError, match="have no scale of their own"), tejit.autocast(recipe=recipe):
        tejit.Linear(16, 16)(torch.zeros(2, 16))

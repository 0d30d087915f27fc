"""Rows 88 and 89: recipes as plain data, in JSON, YAML and files of ``torch.save``; the oracle is the recipe itself."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
import yaml

import tejit
from tejit.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from tejit.recipe import plain as plain_form

RECIPES = [
    DelayedScaling(),
    DelayedScaling(1, Format.E4M3, 16, "most_recent", reduce_amax=False, backward_override="high_precision"),
    Float8BlockScaling(),
    Float8BlockScaling(Format.HYBRID, 1, 1, 1, False, 1e-05),
    Float8CurrentScaling(),
    Float8CurrentScaling(Format.E4M3, True, 1e-05, False, True, True, backward_override="dequantized"),
    MXFP8BlockScaling(enable_2d_quantization=True),
    NVFP4BlockScaling(),
    NVFP4BlockScaling(True, True, True, True, "weights"),
    NVFP4BlockScaling(overrides=(("lm_head", None), ("*.fc1", DelayedScaling(margin=2)), ("x", MXFP8BlockScaling()))),
]
WAYS = {
    "dict": lambda plain: plain,
    "json": lambda plain: json.loads(json.dumps(plain)),
    "yaml": lambda plain: yaml.safe_load(yaml.safe_dump(plain)),
}


def of_custom(**arguments) -> CustomRecipe:
    return CustomRecipe(the_factory, **arguments)


def the_factory(role):
    return tejit.MXFP8Quantizer()


def saved(value, **options):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_88_a_recipe_survives_as_plain_data(recipe, way) -> None:
    plain = WAYS[way](recipe.to_dict())
    for made in (Recipe.from_dict(plain), type(recipe).from_dict(plain)):
        assert type(made) is type(recipe)
        assert made == recipe
        assert hash(made) == hash(recipe)
        assert made.linear == recipe.linear
        assert made.to_dict() == recipe.to_dict()


def test_88_the_form_is_the_documented_one() -> None:
    recipe = MXFP8BlockScaling(overrides=(("lm_head", None), ("head.*", Float8CurrentScaling(amax_epsilon=0.5))))
    assert recipe.to_dict() == {
        "recipe": "MXFP8BlockScaling",
        "version": 1,
        "overrides": [
            ["lm_head", None],
            [
                "head.*",
                {
                    "recipe": "Float8CurrentScaling",
                    "version": 1,
                    "overrides": [],
                    "backward_override": None,
                    "fp8_format": "HYBRID",
                    "force_pow_2_scales": False,
                    "amax_epsilon": 0.5,
                    "fast_accum_fprop": True,
                    "fast_accum_dgrad": False,
                    "fast_accum_wgrad": False,
                },
            ],
        ],
        "backward_override": None,
        "fp8_format": "E4M3",
        "enable_2d_quantization": False,
    }
    assert Recipe.from_dict({"recipe": "MXFP8BlockScaling"}) == MXFP8BlockScaling()


def test_88_every_built_in_recipe_has_a_plain_form() -> None:
    shown = {name for name in tejit.recipe.__all__ if name.endswith("Scaling")}
    assert set(plain_form._BUILT_IN) == shown == {type(recipe).__name__ for recipe in RECIPES}


WRONG = {
    "no dict": (["recipe"], TypeError, "must be a dict"),
    "no recipe": ({}, ValueError, "recipe is None; it must be one of DelayedScaling"),
    "unknown recipe": ({"recipe": "os.system"}, ValueError, r"recipe is 'os\.system'"),
    "custom": ({"recipe": "CustomRecipe"}, ValueError, "recipe is 'CustomRecipe'"),
    "version": ({"recipe": "DelayedScaling", "version": 2}, ValueError, "version .* is 2; this tejit reads 1"),
    "unknown key": ({"recipe": "DelayedScaling", "marginn": 1}, ValueError, "no 'marginn'.*margin"),
    "private key": ({"recipe": "DelayedScaling", "_linear": 1}, ValueError, "no '_linear'"),
    "no string": ({"recipe": "DelayedScaling", 3: 1}, ValueError, "no 3"),
    "format": ({"recipe": "DelayedScaling", "fp8_format": "E6M1"}, ValueError, "fp8_format is 'E6M1'.*'HYBRID'"),
    "E5M2": ({"recipe": "DelayedScaling", "fp8_format": "E5M2"}, ValueError, "E5M2 for both"),
    "type": ({"recipe": "MXFP8BlockScaling", "enable_2d_quantization": 1}, TypeError, "enable_2d_quantization is 1"),
    "value": ({"recipe": "DelayedScaling", "amax_history_len": 0}, ValueError, "amax_history_len is 0"),
    "override": ({"recipe": "DelayedScaling", "overrides": [["a", {"recipe": "b"}]]}, ValueError, "recipe is 'b'"),
    "pair": ({"recipe": "DelayedScaling", "overrides": [["a"]]}, TypeError, "overrides has"),
    "overrides": ({"recipe": "DelayedScaling", "overrides": {"a": None}}, TypeError, "overrides is"),
    "nested": (
        {
            "recipe": "DelayedScaling",
            "overrides": [["a", {"recipe": "DelayedScaling", "overrides": [["b", None]]}]],
        },
        ValueError,
        "overrides itself",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_88_what_is_no_recipe_is_refused_by_name(kind) -> None:
    plain, error, text = WRONG[kind]
    with pytest.raises(error, match=text):
        Recipe.from_dict(plain)
    with pytest.raises(pickle.UnpicklingError, match=text):
        plain_form.load_recipe(plain)


def test_88_a_class_makes_its_own_recipes_only() -> None:
    with pytest.raises(ValueError, match=r"'DelayedScaling', and MXFP8BlockScaling was asked"):
        MXFP8BlockScaling.from_dict(DelayedScaling().to_dict())


def test_88_code_has_no_plain_form() -> None:
    for recipe in (of_custom(), MXFP8BlockScaling(overrides=(("a", of_custom()),))):
        with pytest.raises(TypeError, match="has no plain form: what it does is code"):
            recipe.to_dict()
        assert type(pickle.loads(pickle.dumps(recipe))) is type(recipe)


@pytest.mark.parametrize("recipe", [*RECIPES, of_custom()], ids=lambda recipe: type(recipe).__name__)
def test_88_asdict_shows_the_arguments_alone(recipe) -> None:
    shown = dataclasses.asdict(recipe)
    assert list(shown) == [field.name for field in dataclasses.fields(recipe)]
    assert not any(name.startswith("_") for name in shown)
    assert dataclasses.replace(recipe, backward_override="dequantized").backward_override == "dequantized"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_89_a_recipe_in_a_checkpoint_is_read_by_default(recipe) -> None:
    found = saved({"recipe": recipe, "format": Format.HYBRID, "again": recipe})
    assert found == {"recipe": recipe, "format": Format.HYBRID, "again": recipe}
    for twin in (found["recipe"], copy.copy(recipe), copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))):
        assert type(twin) is type(recipe)
        assert twin == recipe
        assert hash(twin) == hash(recipe)
        assert twin.linear == recipe.linear


@pytest.mark.parametrize(
    "quantizer",
    [tejit.Float8CurrentScalingQuantizer(), tejit.MXFP8Quantizer(), tejit.NVFP4Quantizer(), tejit.IdentityQuantizer()],
    ids=lambda quantizer: type(quantizer).__name__,
)
def test_89_a_quantizer_in_a_checkpoint_is_read_by_default(quantizer) -> None:
    assert saved({"quantizer": quantizer})["quantizer"] == quantizer


def test_89_a_fresh_process_reads_recipes_whose_modules_are_not_loaded(tmp_path) -> None:
    torch.save({"recipes": RECIPES}, tmp_path / "file.pt")
    program = f"""
        import sys, torch, tejit
        assert "tejit.recipe.blocks" not in sys.modules and "tejit.recipe.delayed" not in sys.modules
        found = torch.load({str(tmp_path / "file.pt")!r})["recipes"]
        from tejit.recipe import Recipe
        print([recipe.to_dict() for recipe in found])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([recipe.to_dict() for recipe in RECIPES])


class Hostile:
    def __init__(self, plain) -> None:
        self.plain = plain

    def __reduce__(self):
        return plain_form.load_recipe, (self.plain,)


@pytest.mark.parametrize("kind", WRONG)
def test_89_a_file_makes_no_recipe_that_its_class_refuses(kind) -> None:
    with pytest.raises(pickle.UnpicklingError, match="holds no recipe"):
        saved(Hostile(WRONG[kind][0]))
    deep: list = []
    for _ in range(50):
        deep = [["a", {"recipe": "DelayedScaling", "overrides": deep}]]
    with pytest.raises(pickle.UnpicklingError, match="holds no recipe"):
        saved(Hostile({"recipe": "DelayedScaling", "overrides": deep}))

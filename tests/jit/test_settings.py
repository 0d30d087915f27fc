"""TEJIT_* variables and the recognition of `python -m tejit`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tejit.jit import messages, settings
from tejit.jit.settings import parse_archs, read_settings

pytestmark = pytest.mark.jit


@pytest.mark.parametrize("text", ["90a", "9.0a", "sm_90a", "90", "SM_90A", "9.0", " 90 "])
def test_every_way_to_write_an_architecture(text: str) -> None:
    assert parse_archs(text) == ("90a",)


@pytest.mark.parametrize("text", ["80;90a;10.0", "8.0, sm_90,100a", "80 90a 100", "80;;90 ,10.0a,80"])
def test_lists_of_architectures(text: str) -> None:
    assert parse_archs(text) == ("80", "90a", "100a")


@pytest.mark.parametrize("text", ["hopper", "90b", "9.0+PTX", "900a1", ";", "90a;x"])
def test_an_unreadable_architecture_names_itself_and_shows_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"TEJIT_ARCH.*90a, 9\.0a, sm_90a or 90"):
        read_settings({"TEJIT_ARCH": text})


@pytest.mark.parametrize("text", ["75", "7.5", "80a", "sm_99"])
def test_an_architecture_without_kernels_lists_the_supported(text: str) -> None:
    with pytest.raises(ValueError, match=r"no kernels .*80, 86, 89, 90a, 100a, 103a, 120a, 121a"):
        read_settings({"TEJIT_ARCH": text})


@pytest.mark.parametrize(
    ("name", "value", "choices"),
    [
        ("TEJIT_COMPILE", "sometimes", "import, lazy, never"),
        ("TEJIT_BACKEND", "cuda", "auto, kernels, torch"),
    ],
)
def test_unknown_choices_are_refused(name: str, value: str, choices: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='{value}'.*{choices}"):
        read_settings({name: value})


def test_every_variable_is_in_the_documentation() -> None:
    root = Path(__file__).parents[2]
    told = set(re.findall(r"TEJIT_[A-Z_]+", (root / "docs" / "cache.md").read_text()))
    read = set(re.findall(r'"(TEJIT_[A-Z_]+)"', Path(settings.__file__).read_text()))
    assert told == read


def test_defaults() -> None:
    read = read_settings({"TEJIT_COMPILE": "", "TEJIT_ARCH": ""})
    assert (read.compile, read.backend, read.archs, read.cache_dir) == ("import", "auto", None, None)
    assert (read.lock_timeout, read.cache_max_bytes, read.quiet, read.max_jobs) == (
        300.0,
        256 << 20,
        False,
        None,
    )


def test_a_limit_that_is_no_number_is_said_and_replaced() -> None:
    messages.forget()
    with pytest.warns(RuntimeWarning, match="TEJIT_LOCK_TIMEOUT='soon'"):
        assert read_settings({"TEJIT_LOCK_TIMEOUT": "soon"}).lock_timeout == 300.0


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (["-m", "tejit", "warm"], True),
        (["-X", "dev", "-W", "error", "-m", "tejit"], True),
        (["-Im", "tejit", "info"], True),
        (["-mtejit"], True),
        (["-c", "import tejit", "-m", "tejit"], False),
        (["script.py", "-m", "tejit"], False),
        (["-m", "pytest", "-m", "tejit"], False),
        ([], False),
    ],
)
def test_the_command_line_is_recognised(words: list[str], seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", *words])
    assert settings.is_command_line() is seen

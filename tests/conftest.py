"""What the tiers mean: `gpu` needs a CUDA device; `pytest` leaves out what is marked `full`, `pytest -m full`
runs everything."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest


@pytest.fixture
def need_kernels() -> Callable[[str], None]:
    """`need_kernels(device)` skips the test where that device's compiled kernels cannot be had.

    Under TEJIT_COMPILE=never it fails instead: who forbids the compiler has warmed the cache before.
    """
    import torch

    from tejit import TejitError
    from tejit.kernels.backend import backend, use_ops

    def need(device: str) -> None:
        try:
            with backend("kernels"):
                use_ops(torch.device(device))
        except TejitError as error:
            if os.environ.get("TEJIT_COMPILE") == "never":
                pytest.fail(str(error))
            pytest.skip(str(error).splitlines()[0])

    return need


_everything = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    # To pytest itself `-m full` would mean the slow tests alone.
    config.stash[_everything] = config.option.markexpr.strip() == "full"
    if config.stash[_everything]:
        config.option.markexpr = ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _skip_gpu_tests_without_gpu(items)
    if not config.stash[_everything] and not re.search(r"\bfull\b", config.option.markexpr):
        _deselect_full(config, items)


def _deselect_full(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the slow tests out, and let pytest count them as deselected, so that nobody believes they ran."""
    slow = [item for item in items if item.get_closest_marker("full")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


def _skip_gpu_tests_without_gpu(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # only here: a run without gpu tests does not pay for it

    if not torch.cuda.is_available():
        reason = f"needs a CUDA device, torch {torch.__version__} sees none"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))

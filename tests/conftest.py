"""What the tiers mean: `gpu` needs a CUDA device, `full` runs only where the -m expression speaks of it."""

from __future__ import annotations

import re

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _skip_gpu_tests_without_gpu(items)
    if not re.search(r"\bfull\b", config.option.markexpr):
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

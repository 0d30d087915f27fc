"""`pip install ".[nvcc]"` brings the nvcc that belongs to the torch that is there, and leaves torch alone.

Resolver runs: nothing is installed.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib starts with Python 3.11"),
    pytest.mark.skipif(sys.platform != "linux", reason="the extra is empty here"),
    # Asked by its metadata: a look for the module makes setuptools' import hook leave distutils to the standard
    # library, and no test of this process could import setuptools any more.
    pytest.mark.skipif(
        not any(importlib.metadata.distributions(name="pip")), reason="there is no pip in this environment"
    ),
]
#: What pip says where it may not take, or is not offered, the one release that is asked for.
UNAVAILABLE = re.compile(r"No matching distribution found for torch===\S*|The user requested \(constraint\) \S*")


def requirements() -> list[str]:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["nvcc"]]


def resolve(folder: Path, *words: str) -> dict[str, dict[str, Any]]:
    """The metadata of what pip would install, by name. Wheels are not downloaded, their metadata is."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--report", report, *words, *requirements()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    said = done.stdout + done.stderr
    unavailable = UNAVAILABLE.search(said)
    if done.returncode and unavailable:
        pytest.skip(f"pip is not offered this release, or is held to another: {unavailable[0]}")
    assert done.returncode == 0, said
    installed = json.loads(report.read_text())["install"]
    return {each["metadata"]["name"]: each["metadata"] for each in installed}


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def pinned(metadata: dict[str, Any]) -> str | None:
    """The toolkit that a torch pins."""
    for line in metadata.get("requires_dist", []):
        match = re.match(r"cuda-toolkit(?:\[[^]]*\])?\s*\(?==([\d.]+)", line)
        if match:
            return match[1]
    return None


@pytest.mark.parametrize("release", ["2.11.0", "2.13.0", "2.14.1", "2.15.0"])
def test_the_extra_follows_every_torch(release: str, tmp_path: Path) -> None:
    # `===` takes no build with a local version, such as 2.13.0+cpu, which pins no toolkit.
    found = resolve(tmp_path, "--ignore-installed", f"torch==={release}")
    assert found["torch"]["version"] == release
    toolkit = pinned(found["torch"])
    assert toolkit is not None, "this torch pins no toolkit: the extra has nothing to follow"
    assert re.sub(r"(\.0)+$", "", found["cuda-toolkit"]["version"]) == re.sub(r"(\.0)+$", "", toolkit)
    for name in ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-cccl"):
        assert minor(found[name]["version"]) == minor(toolkit), name


def test_the_extra_changes_nothing_of_the_torch_that_is_installed(tmp_path: Path) -> None:
    import importlib.metadata

    try:
        toolkit = importlib.metadata.version("cuda-toolkit")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"torch {torch.__version__} here came without the CUDA toolkit's package")
    found = resolve(tmp_path)
    assert "torch" not in found
    assert "cuda-toolkit" not in found or minor(found["cuda-toolkit"]["version"]) == minor(toolkit)
    assert [name for name in found if name.startswith(("nvidia-cudnn", "nvidia-nccl", "nvidia-cublas"))] == []

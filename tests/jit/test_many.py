"""Sixty-four processes on an empty cache, with a real compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tejit.jit.parts import host_part

from .conftest import REPOSITORY, Fork, entries, load_here

pytestmark = [pytest.mark.jit, pytest.mark.full]
REAL = REPOSITORY / "cuda_src"


def load_and_compute(sources: str) -> Any:
    value = load_here_without_answer(sources)
    x = torch.linspace(-3, 3, 512 * 256).reshape(512, 256)
    parts = torch.ops.tejit.fp8_quantize_current(x, 0, True, True, False, 0.0, None)
    return value, [part.numpy().tobytes() for part in parts]


def load_here_without_answer(sources: str) -> Any:
    from tejit import jit
    from tejit.jit import loader

    jit.load(sources)
    return jit.is_loaded(), loader.loaded_path()


def test_sixty_four_processes_compile_once(sources: Path, cache_dir: Path, tmp: Path) -> None:
    running = [Fork(load_here, str(sources)) for _ in range(64)]
    done = [one.join() for one in running]
    assert all(one.value is not None and one.value["answer"] == 42 for one in done), [one.err for one in done]
    (folder,) = entries(cache_dir)
    assert {one.value["path"] for one in done} == {f"{folder}/tejit.so"}
    assert sum(one.err.count("building kernels") for one in done) == 1
    assert folder.name == host_part(str(sources)).key
    assert [path.name for path in tmp.iterdir() if path.name.startswith("tejit-build")] == []


@pytest.mark.skipif(not (REAL / "host.cpp").exists(), reason="the kernels' own sources are not here")
def test_sixty_four_processes_compute_the_same_bytes(cache_dir: Path, tmp: Path) -> None:
    # This process may have loaded the kernels with `import tejit`: a key of its own makes the forks build.
    import shutil

    copy = tmp / "sources"
    shutil.copytree(REAL, copy)
    (copy / "host.cpp").write_text((copy / "host.cpp").read_text() + "\n// another key\n")
    running = [Fork(load_and_compute, str(copy)) for _ in range(64)]
    done = [one.join() for one in running]
    assert all(one.error is None for one in done), [one.err for one in done]
    ((state, _),) = {(one.value[0], b"".join(one.value[1])) for one in done}
    assert state == (True, f"{entries(cache_dir)[0]}/tejit.so")
    assert sum(one.err.count("building kernels") for one in done) == 1

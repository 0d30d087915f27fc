"""pip's CUDA toolkit, `pip install "tejit[nvcc]"`: it has `libcudart.so.13` only, and torch links with `-lcudart`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tejit.jit import build, toolchain
from tejit.jit.parts import device_part
from tejit.jit.settings import Settings

pytestmark = [pytest.mark.jit, pytest.mark.full]


def test_pips_toolkit_builds_an_architecture_part(
    sources: Path, cache_dir: Path, tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = toolchain._packaged_nvcc()
    if torch.version.cuda is None or packaged is None or "site-packages" not in packaged:
        pytest.skip('needs a CUDA build of torch and pip install "cuda-toolkit[nvcc,cccl]"')
    nvcc = toolchain.find_nvcc(Settings(nvcc=packaged))
    assert nvcc is not None
    assert Path(nvcc.root) == Path(packaged).parents[1]
    assert not list(Path(nvcc.root).rglob("libcudart.so"))
    (sources / "common" / "twice.cuh").write_text(
        "#include <cuda_bf16.h>\n#include <cuda_fp8.h>\n" + (sources / "common" / "twice.cuh").read_text()
    )
    part = device_part(str(sources), "90a", torch.version.cuda.split(".")[0])
    settings = Settings(cache_dir=str(cache_dir), nvcc=packaged)
    built = build.build([(part, build.Found())], settings)[part.name]
    assert isinstance(built, build.Entry), built
    assert built.manifest["builder"] == "nvcc"
    assert b"tejit_part_kernel" in Path(built.file).read_bytes()

"""Which files a part reaches, and what its key depends on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tejit.jit.parts import device_part, host_part
from tejit.jit.sources import collect, default_root

pytestmark = pytest.mark.jit


def test_a_unit_reaches_what_it_includes_and_nothing_else(sources: Path) -> None:
    (sources / "common" / "stray.h").write_text("// nobody includes this")
    assert [name for name, _ in collect(str(sources), "host.cpp").files] == ["common/seam.h", "host.cpp"]
    assert [name for name, _ in collect(str(sources), "device.cu").files] == ["common/twice.cuh", "device.cu"]


def test_includes_are_found_beside_the_file_from_the_root_and_in_every_branch(sources: Path) -> None:
    (sources / "fp8").mkdir()
    (sources / "host.cpp").write_text('#include "fp8/a.h"\n# include <common/b.h>\n#if 0\n#include "c.h"\n#endif\n')
    (sources / "fp8" / "a.h").write_text('#include "near.h"\n#include "../common/seam.h"\n#include <vector>\n')
    for name in ("fp8/near.h", "common/b.h", "c.h"):
        (sources / name).write_text("")
    reached = [name for name, _ in collect(str(sources), "host.cpp").files]
    assert reached == ["c.h", "common/b.h", "common/seam.h", "fp8/a.h", "fp8/near.h", "host.cpp"]


def test_what_is_named_like_a_header_and_is_no_file_is_not_ours(sources: Path) -> None:
    (sources / "array").mkdir()
    (sources / "common" / "a.h").mkdir()
    (sources / "a.h").write_text("")
    (sources / "gone.h").symlink_to("nowhere")
    (sources / "loop").symlink_to("loop")
    (sources / "moved").symlink_to("common")
    (sources / "common" / "seam.h").write_text('#include "a.h"\n#include ".."\n#include "../common"\n')
    (sources / "host.cpp").write_text(
        '#include <array>\n#include "gone.h"\n#include "loop/a.h"\n#include "moved/seam.h"\n'
    )
    found = collect(str(sources), "host.cpp")
    assert [name for name, _ in found.files] == ["a.h", "host.cpp", "moved/seam.h"]
    assert found.foreign == ("..", "../common", "array", "gone.h", "loop/a.h")


def test_a_part_knows_what_it_includes_from_elsewhere(sources: Path) -> None:
    (sources / "device.cu").write_text('#include <cuda_fp8.h>\n#include "common/twice.cuh"\n')
    (sources / "common" / "twice.cuh").write_text('#include "cuda_bf16.h"\n')
    assert collect(str(sources), "device.cu").foreign == ("cuda_bf16.h", "cuda_fp8.h")


def test_the_kernels_include_nothing_from_elsewhere() -> None:
    # A build with NVRTC would have to find it first.
    assert collect(default_root(), "device.cu").foreign == ()


def test_the_key_follows_contents_and_not_places_or_times(sources: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere with ümlaut"
    shutil.copytree(sources, moved)
    (moved / "host.cpp").touch()
    assert host_part(str(sources)).key == host_part(str(moved)).key
    (moved / "common" / "twice.cuh").write_text("// other")
    assert host_part(str(sources)).key == host_part(str(moved)).key
    assert device_part(str(sources), "90a", "13").key != device_part(str(moved), "90a", "13").key
    (moved / "common" / "seam.h").write_text("// other")
    assert host_part(str(sources)).key != host_part(str(moved)).key


def test_every_part_has_a_key_of_its_own(sources: Path) -> None:
    root = str(sources)
    parts = [host_part(root), *(device_part(root, arch, "13") for arch in ("80", "90a", "100a"))]
    parts.append(device_part(root, "90a", "12"))
    assert len({part.key for part in parts}) == len(parts)
    assert all("cuda_major" not in part.identity for part in parts if part.is_host)
    assert all("level" not in part.identity for part in parts if not part.is_host)


def test_the_host_key_holds_the_instruction_level(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    keys = set()
    for level in ("AVX512", "AVX2", "DEFAULT", "NO AVX"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda level=level: level)
        keys.add(host_part(str(sources)).key)
    assert len(keys) == 3


def test_a_checkout_uses_its_own_sources() -> None:
    assert Path(default_root()) == Path(__file__).resolve().parents[2] / "cuda_src"

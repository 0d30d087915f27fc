"""A part in several units: which files each has, that all are compiled, and that the machine code is the same."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tejit.jit import build, toolchain, workspace
from tejit.jit.parts import device_part, host_part
from tejit.jit.settings import Settings
from tejit.jit.sources import collect

from .conftest import REPOSITORY, fork, load_here, python

pytestmark = pytest.mark.jit
SOURCES = REPOSITORY / "cuda_src"

HOST = """
#include "one/host.cpp"
#include "two/host.cpp"
#include "three/host.cpp"
#include "four/host.cpp"
"""


def in_four(sources: Path) -> Path:
    """The small set of sources, its host part in four files: what one has to know of another is declared."""
    (sources / "host.cpp").write_text(HOST)
    for name in ("one", "two", "three", "four"):
        (sources / name).mkdir()
    (sources / "one" / "host.cpp").write_text('#include "common/seam.h"\n')
    (sources / "two" / "host.cpp").write_text('int answer();\nextern "C" int test_answer(void) { return answer(); }\n')
    (sources / "three" / "host.cpp").write_text("int answer();\nint other();\nint answer() { return other(); }\n")
    (sources / "four" / "host.cpp").write_text("int other();\nint other() { return 42; }\n")
    return sources


def test_files_are_dealt_to_units_forth_and_back(sources: Path) -> None:
    found = collect(str(in_four(sources)), "host.cpp")
    one, two, three, four = (f'#include "{name}/host.cpp"\n' for name in ("one", "two", "three", "four"))
    assert found.split(1) == ['#include "host.cpp"\n']
    assert found.split(2) == [one + four, two + three]
    assert found.split(3) == [one, two, three + four]
    assert found.split(4) == found.split(64) == [one, two, three, four]


def test_a_unit_with_text_of_its_own_is_one(sources: Path) -> None:
    assert collect(str(sources), "host.cpp").split(8) == ['#include "host.cpp"\n']


@pytest.mark.parametrize("unit", ["host.cpp", "device.cu"])
def test_the_parts_units_are_nothing_but_files(unit: str) -> None:
    """Otherwise what they say beside would be lost where there are several."""
    lines = (SOURCES / unit).read_text().splitlines()
    code = [line for line in lines if line and not line.startswith("//")]
    assert all(line.startswith('#include "') and line.endswith(('.cpp"', '.cu"')) for line in code), code
    assert len(collect(str(SOURCES), unit).split(64)) == len(code) > 4


def cores(count: int) -> Any:
    def before() -> None:
        os.sched_getaffinity = lambda _: set(range(count))  # type: ignore[assignment]
        workspace.free_memory = lambda: 1 << 40

    return before


@pytest.mark.parametrize(("count", "units"), [(1, 1), (2, 2), (3, 3), (16, 4)])
def test_a_part_in_several_units_is_built_side_by_side(
    count: int, units: int, sources: Path, cache_dir: Path, tmp: Path
) -> None:
    done = fork(load_here, str(in_four(sources)), env={"CUDA_VISIBLE_DEVICES": ""}, before=cores(count))
    assert done.value["answer"] == 42, done.err
    log = (Path(done.value["path"]).parent / "build.log").read_text()
    assert len([line for line in log.splitlines() if " -c " in line]) == units, log
    again = fork(load_here, str(sources))
    assert again.value == done.value, "the number of units is not in the key"
    assert again.err == ""


def test_two_parts_share_the_processors(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "free_memory", lambda: 1 << 40)
    for cpus, parts, each in ((16, 2, 8), (16, 4, 4), (2, 2, 1), (4, 2, 2), (1, 2, 1), (16, 1, 16)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cpus=cpus: set(range(cpus)))
        run = build.Build(Settings(), None, ())
        run.parts_at_once = build.job_limit(Settings(), parts)
        assert run.units_at_once() == each, (cpus, parts)
        limited = build.Build(Settings(max_jobs=4), None, ())
        limited.parts_at_once = build.job_limit(Settings(max_jobs=4), parts)
        assert limited.units_at_once() * limited.parts_at_once <= 4


def test_what_is_undefined_is_an_error_of_the_build(sources: Path, cache_dir: Path, tmp: Path) -> None:
    (in_four(sources) / "four" / "host.cpp").write_text("")
    done = fork(load_here, str(sources), before=cores(2))
    assert not done.value["loaded"]
    assert "undefined reference to `other()'" in str(done.value["error"])
    assert not list(cache_dir.glob("v1/*/tejit.so"))


LIGHT = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("child", {child!r})
child = importlib.util.module_from_spec(spec)
spec.loader.exec_module(child)
extension = child._cpp_extension()
print(hasattr(sys.modules["torch"], "_C"), extension.TORCH_LIB_PATH)
"""


def test_a_compiling_process_does_without_torchs_libraries() -> None:
    done = python("-I", "-c", LIGHT.format(child=workspace.CHILD), env={"TORCH_NO_COMPILER_WRAPPER": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"False {Path(torch.__file__).parent / 'lib'}\n"


def test_a_torch_that_wants_more_of_itself_is_imported_whole() -> None:
    code = LIGHT.replace("extension = ", "child._module = None\nextension = ")
    done = python("-I", "-c", code.format(child=workspace.CHILD), env={"TORCH_NO_COMPILER_WRAPPER": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"True {Path(torch.__file__).parent / 'lib'}\n"


def kernels(cubin: Path) -> dict[str, Any]:
    """Machine code, shared memory and constants of every kernel in a cubin, and its number of registers."""
    data = cubin.read_bytes()
    (table,) = struct.unpack_from("<Q", data, 0x28)
    count, names = struct.unpack_from("<HH", data, 0x3C)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + 64 * place) for place in range(count)]
    found: dict[str, Any] = {}
    for header in headers:
        at = headers[names][4] + header[0]
        name = data[at : data.index(b"\0", at)].decode()
        if name.startswith((".text.", ".nv.shared.", ".nv.constant")):
            content = header[5] if header[1] == 8 else data[header[4] : header[4] + header[5]]
            found[name] = content, header[7] >> 24 if name.startswith(".text.") else 0
    return found


@pytest.mark.full
@pytest.mark.parametrize("arch", ["90a"])
def test_every_number_of_units_gives_the_same_machine_code(arch: str, tmp_path: Path) -> None:
    nvcc = toolchain.find_nvcc(Settings())
    if nvcc is None or torch.version.cuda is None:
        pytest.skip("needs nvcc and a CUDA build of torch")
    part = device_part(str(SOURCES), arch, "13")
    made: dict[str, dict[str, Any]] = {}

    def compiled(text: str) -> dict[str, Any]:
        if text not in made:
            source, cubin = tmp_path / "unit.cu", tmp_path / "unit.cubin"
            source.write_text(text)
            flags = [*part.flags, "--expt-relaxed-constexpr", "-Xcompiler=-fPIC", f"-I{SOURCES}"]
            subprocess.run([nvcc.path, *flags, "-cubin", str(source), "-o", str(cubin)], check=True)
            made[text] = kernels(cubin)
        return made[text]

    (whole,) = map(compiled, part.sources.split(1))
    assert len([name for name in whole if name.startswith(".text.tejit_")]) > 40
    for most in range(2, 9):
        units: dict[str, Any] = {}
        for text in part.sources.split(most):
            units |= compiled(text)
        assert set(units) == set(whole), most
        assert [name for name in whole if units[name] != whole[name]] == [], most


@pytest.mark.full
def test_the_real_parts_in_many_units_load_and_have_every_kernel(cache_dir: Path, tmp: Path) -> None:
    parts = [host_part(str(SOURCES))]
    if torch.version.cuda is not None and toolchain.find_nvcc(Settings()) is not None:
        parts.append(device_part(str(SOURCES), "90a", torch.version.cuda.split(".")[0]))

    def built() -> Any:
        settings = Settings(cache_dir=str(cache_dir), quiet=True)
        return build.build([(part, build.Found()) for part in parts], settings)

    done = fork(built, before=cores(16))
    assert all(isinstance(entry, build.Entry) for entry in done.value.values()), done
    code = "import tejit, torch; q = tejit.MXFP8Quantizer(); print(tejit.jit.is_loaded(), q(torch.ones(32, 32)).sum())"
    env = {"TEJIT_CACHE_DIR": str(cache_dir), "TEJIT_COMPILE": "never", "CUDA_VISIBLE_DEVICES": ""}
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert loaded.stdout == "True tensor(1024.)\n", loaded.stderr


def test_every_file_of_kernels_is_asked_for_a_kernel() -> None:
    """`common/part.cu` names what each file defines, so that no kernel is there and cannot be had."""
    listed = re.search(r"#define TEJIT_FILES\(X\)((?:[^\n]*\\\n)*[^\n]*)", (SOURCES / "common" / "part.cu").read_text())
    assert listed is not None
    texts = [path.read_text() for path in SOURCES.rglob("*.cu")]
    defined = [name for text in texts for name in re.findall(r"^TEJIT_FIND\((\w+),", text, re.MULTILINE)]
    assert sorted(re.findall(r"X\((\w+)\)", listed[1])) == sorted(defined)
    with_kernels = [text for text in texts if "__global__" in text or "TEJIT_FUSED_KERNEL)" in text]
    assert len(with_kernels) == len(defined)

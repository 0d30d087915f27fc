"""Compilers that are missing, wrapped, too old, too new or of the wrong kind; stand-ins are shell scripts."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tejit.jit import KernelNotCached, ToolchainError, build, loader, nvrtc, toolchain, workspace
from tejit.jit.cli import main
from tejit.jit.settings import Settings
from tejit.jit.toolchain import Nvcc, check_nvcc, find_host_compiler, find_ninja, find_nvcc

from .conftest import Quick, entries, fork, load_here, script

pytestmark = pytest.mark.jit
CUDA = torch.version.cuda
GXX_TOOLS = {tool: shutil.which(tool) for tool in ("g++", "as", "ld", "sh")}
needs_cuda_build = pytest.mark.skipif(CUDA is None, reason="needs a CUDA build of torch")


def toolkit(folder: Path, version: str = "13.0.88", archs: str = "sm_80 sm_90", newest_gxx: int | None = 15) -> Path:
    """A toolkit whose nvcc answers questions; its path."""
    release = ".".join(version.split(".")[:2])
    nvcc = script(
        folder / "bin" / "nvcc",
        f"""case "$*" in
*--version*) echo "Cuda compilation tools, release {release}, V{version}";;
*--list-gpu-code*) for arch in {archs}; do echo $arch; done;;
*--dryrun*) echo '#$ TOP={folder}';;
esac""",
    )
    header = folder / "include" / "crt" / "host_config.h"
    header.parent.mkdir(parents=True)
    (folder / "lib64").mkdir()
    (folder / "lib64" / "libcudart_static.a").write_bytes(b"!<arch>\n")
    if newest_gxx is not None:
        header.write_text(f"#error -- unsupported GNU version! gcc versions later than {newest_gxx} are not supported!")
    return nvcc


def gxx(path: Path, version: str, banner: str = "g++ (GCC)") -> Path:
    return script(path, f'case "$1" in --version) echo "{banner} {version}";; -dumpfullversion) echo {version};; esac')


@pytest.fixture
def nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No compiler anywhere; an empty folder that is the PATH."""
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(toolchain, "SYSTEM_CUDA", "/nonexistent")
    monkeypatch.setattr(toolchain, "_packaged_nvcc", lambda: None)
    return folder


def test_nvcc_is_looked_for_in_this_order(nothing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_nvcc(Settings()) is None
    names = ("own", "home", "path variable", "package", "on path", "system")
    nvccs = {name: toolkit(tmp_path / name, f"13.0.{number}") for number, name in enumerate(names)}
    (nothing / "nvcc").symlink_to(nvccs["on path"])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "path variable"))
    monkeypatch.setattr(toolchain, "_packaged_nvcc", lambda: str(nvccs["package"]))
    monkeypatch.setattr(toolchain, "SYSTEM_CUDA", str(tmp_path / "system"))
    settings = Settings(nvcc=str(nvccs["own"]))
    remove = [
        lambda: monkeypatch.delenv("CUDA_HOME"),
        lambda: (tmp_path / "path variable" / "bin" / "nvcc").unlink(),
        lambda: monkeypatch.setattr(toolchain, "_packaged_nvcc", lambda: None),
        lambda: (nothing / "nvcc").unlink(),
    ]
    seen = [find_nvcc(settings), find_nvcc(Settings())]
    for take_away in remove:
        take_away()
        seen.append(find_nvcc(Settings()))
    assert [found.version for found in seen if found] == [f"13.0.{number}" for number in range(6)]
    assert seen[1] is not None
    assert seen[1].root == str(tmp_path / "home")


def test_a_named_nvcc_that_is_none(nothing: Path, tmp_path: Path) -> None:
    fake = script(tmp_path / "nvcc", "echo it is broken >&2; exit 3")
    with pytest.raises(ToolchainError, match=rf"TEJIT_NVCC={fake} is no working nvcc: it is broken"):
        find_nvcc(Settings(nvcc=str(fake)))


def test_a_script_in_place_of_nvcc_leads_to_the_real_toolkit(nothing: Path, tmp_path: Path) -> None:
    real = toolkit(tmp_path / "toolkit")
    wrapper = script(nothing / "nvcc", f'exec {real} "$@"')
    found = find_nvcc(Settings())
    assert found == Nvcc(str(wrapper), str(tmp_path / "toolkit"), "13.0.88")


def test_a_toolkit_of_another_cuda_major(nothing: Path, tmp_path: Path) -> None:
    nvcc = find_nvcc(Settings(nvcc=str(toolkit(tmp_path / "old", "12.4.131"))))
    assert nvcc is not None
    with pytest.raises(ToolchainError) as caught:
        check_nvcc(nvcc, "13.0", "90a")
    for text in ("12.4.131", nvcc.path, "CUDA 13.0", "the major versions differ"):
        assert text in caught.value.what
    for text in ('pip install "cuda-toolkit[nvcc,cccl]==13.0.*"', "TEJIT_NVCC", "a torch built for CUDA 12"):
        assert text in caught.value.todo


def test_a_gpu_that_is_newer_than_nvcc(nothing: Path, tmp_path: Path) -> None:
    nvcc = find_nvcc(Settings(nvcc=str(toolkit(tmp_path / "old", "12.6.20"))))
    assert nvcc is not None
    check_nvcc(nvcc, "12.8", "90a")
    with pytest.raises(ToolchainError, match=rf"nvcc 12\.6\.20 \({nvcc.path}\).*sm_100a, which needs CUDA 12\.8"):
        check_nvcc(nvcc, "12.8", "100a")


@pytest.mark.parametrize(
    ("version", "newest", "refusal"),
    [
        ("8.5.0", 15, "g++ 8.5 is too old"),
        ("16.1.0", 15, "g++ 16.1 is too new"),
        ("14.2.0", 13, "g++ 14.2 is too new"),
    ],
)
def test_a_host_compiler_out_of_range(version: str, newest: int, refusal: str, nothing: Path, tmp_path: Path) -> None:
    nvcc = find_nvcc(Settings(nvcc=str(toolkit(tmp_path / "toolkit", newest_gxx=newest))))
    compiler = gxx(nothing / "g++", version)
    with pytest.raises(ToolchainError) as caught:
        find_host_compiler(Settings(), nvcc)
    assert caught.value.what.endswith(f"{compiler}: {refusal}; accepted: g++ 9 to {newest}")
    assert "apt-get install g++" in caught.value.todo
    with pytest.raises(ToolchainError) as caught:
        find_host_compiler(Settings(cxx=str(compiler)), nvcc)
    for text in (f"TEJIT_CXX={compiler} cannot be used for nvcc 13.0.88", refusal, f"accepted: g++ 9 to {newest}"):
        assert text in caught.value.what


def test_the_newest_host_compiler_within_the_bound_is_taken(
    nothing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = find_nvcc(Settings(nvcc=str(toolkit(tmp_path / "toolkit", newest_gxx=13))))
    gxx(nothing / "c++", "15.1.0")
    for major in (14, 13, 12):
        gxx(nothing / f"g++-{major}", f"{major}.2.0")
    assert str(find_host_compiler(Settings(), nvcc)) == "g++ 13.2"
    assert str(find_host_compiler(Settings())) == "g++ 15.1"
    monkeypatch.setenv("CXX", str(nothing / "g++-12"))
    assert str(find_host_compiler(Settings())) == "g++ 12.2"
    assert str(find_host_compiler(Settings(cxx=str(nothing / "g++-14")))) == "g++ 14.2"


def test_clang_is_recognised(nothing: Path) -> None:
    gxx(nothing / "c++", "17.0.6", "Debian clang version")
    assert str(find_host_compiler(Settings())) == "clang++ 17.0"


def test_ninja_need_not_be_on_the_path(nothing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.access(os.path.join(find_ninja(), "ninja"), os.X_OK)
    monkeypatch.setattr(sys, "executable", str(nothing / "python"))
    monkeypatch.setitem(sys.modules, "ninja", None)
    with pytest.raises(ToolchainError, match="ninja is missing") as caught:
        find_ninja()
    assert caught.value.todo == "pip install ninja"
    script(nothing / "ninja", "")
    assert find_ninja() == str(nothing)


def test_without_ninja_the_import_goes_on(sources: Path, cache_dir: Path, nothing: Path) -> None:
    def hide() -> None:
        sys.modules["ninja"] = None  # type: ignore[assignment]
        sys.executable = str(nothing / "python")

    gxx(nothing / "g++", "12.2.0")
    done = fork(load_here, str(sources), before=hide)
    assert isinstance(done.value["error"], ToolchainError)
    assert done.err.count("pip install ninja") == 1


def with_gpus(*ccs: int) -> None:
    from tejit.jit import gpus

    gpus.identity = lambda: "test:gpus"
    gpus.query = lambda: ccs
    loader.cuda_major = lambda: "13"
    torch.version.cuda = "13.0"


def states(sources: str) -> Any:
    value = load_here(sources)
    return value["answer"], dict(loader._state.parts), dict(loader._state.paths)


def test_two_kinds_of_gpu_use_two_entries(
    quick: Quick, cache_dir: Path, tmp: Path, nothing: Path, tmp_path: Path
) -> None:
    nvcc = toolkit(tmp_path / "toolkit")
    gxx(nothing / "g++", "12.2.0")
    done = fork(states, quick.sources, env={"TEJIT_NVCC": str(nvcc)}, before=lambda: with_gpus(80, 90))
    answer, parts, paths = done.value
    assert answer == 42
    assert parts == {80: None, 90: None}, done.err
    assert len({paths[80], paths[90]}) == 2
    assert len(entries(cache_dir)) == 3
    for label in ("sm_80", "sm_90a"):
        assert f"building kernels for {label} with nvcc 13.0.88 + g++ 12.2 (first use here, usually 3-15 s)" in done.err


def test_never_keeps_the_error_for_the_first_op_on_such_a_gpu(warm: tuple[str, Path]) -> None:
    def first_op(sources: str) -> Any:
        from tejit import jit

        before = states(sources)
        try:
            jit.warm(sources=sources)
        except jit.KernelNotCached as error:
            return before, jit.ensure_arch(90), jit.ensure_arch(90), error
        return None

    done = fork(first_op, warm[0], env={"TEJIT_COMPILE": "never"}, before=lambda: with_gpus(90))
    (answer, parts, _), first, second, from_warm = done.value
    assert (answer, parts) == (42, {}), "a machine is not asked for its GPUs"
    assert isinstance(first, KernelNotCached)
    assert str(first) == str(second) == str(from_warm)
    assert "`python -m tejit warm --arch 90a`" in first.todo
    assert done.err == ""


def test_an_architecture_that_cannot_be_built_leaves_the_host_part(
    quick: Quick, cache_dir: Path, tmp: Path, nothing: Path, tmp_path: Path
) -> None:
    nvcc = toolkit(tmp_path / "old", "12.4.131")
    gxx(nothing / "g++", "12.2.0")
    done = fork(states, quick.sources, env={"TEJIT_NVCC": str(nvcc)}, before=lambda: with_gpus(90))
    answer, parts, _ = done.value
    assert answer == 42
    assert isinstance(parts[90], ToolchainError)
    assert done.err.count("the major versions differ") == 1
    assert "the slower reference computes on sm_90a" in done.err


def test_without_nvcc_and_nvrtc_one_warning_holds_the_pip_line(
    quick: Quick, cache_dir: Path, tmp: Path, nothing: Path
) -> None:
    def hide() -> None:
        with_gpus(90)
        sys.modules["cuda.bindings"] = None  # type: ignore[assignment]

    gxx(nothing / "g++", "12.2.0")
    done = fork(states, quick.sources, before=hide)
    answer, parts, _ = done.value
    assert answer == 42
    assert isinstance(parts[90], ToolchainError)
    assert done.err.count('pip install "cuda-toolkit[nvcc,cccl]==13.0.*"') == 1
    assert done.err.count("no nvcc, the kernels for sm_90a cannot be compiled; NVRTC cannot be used") == 1


def test_an_nvrtc_of_another_cuda_major_or_too_old() -> None:
    with pytest.raises(ToolchainError, match=r"NVRTC 12\.4 cannot compile for sm_120a, which needs CUDA 12\.8"):
        nvrtc.check_nvrtc(nvrtc.Nvrtc("12.4", (80, 90)), "12.4", "120a")
    with pytest.raises(
        ToolchainError, match=r"NVRTC (\d+\.\d+ does not fit a torch built with CUDA 99|cannot be used)"
    ):
        nvrtc.find_nvrtc("99.0")


def test_a_gpu_without_kernels_is_said_once_with_the_list(quick: Quick, cache_dir: Path, tmp: Path) -> None:
    def ask_twice(sources: str) -> Any:
        value = states(sources)
        return value, loader._state.library.test_ask(75), loader._state.library.test_ask(75)

    done = fork(ask_twice, quick.sources, before=lambda: with_gpus(75))
    (answer, _, _), first, second = done.value
    assert (answer, first, second) == (42, 1, 1)
    assert done.err.count("no kernels for GPUs of compute capability 7.5") == 1
    assert "supported are 80, 86, 89, 90a, 100a, 103a, 120a, 121a" in done.err


def test_the_gpus_are_asked_once_and_remembered(quick: Quick, cache_dir: Path, tmp: Path) -> None:
    env: dict[str, str | None] = {"TEJIT_COMPILE": "lazy"}

    def unasked() -> None:
        with_gpus()
        from tejit.jit import gpus

        gpus.query = lambda: pytest.fail("asked again")

    def present(_: str) -> Any:
        from tejit.jit import gpus, roots
        from tejit.jit.settings import read_settings

        return gpus.present(roots.roots(read_settings()))

    assert fork(present, "", env=env, before=lambda: with_gpus(89, 90)).value == (89, 90)
    assert fork(present, "", env=env, before=unasked).value == (89, 90)
    (cache_dir / "v1" / "gpus.json").write_text('{"test:gpus": "damaged"')
    assert fork(present, "", env=env, before=lambda: with_gpus(90)).value == (90,)


@needs_cuda_build
def test_without_nvcc_nvrtc_builds_the_architecture_part(
    sources: Path, cache_dir: Path, tmp: Path, nothing: Path
) -> None:
    for tool, path in GXX_TOOLS.items():
        assert path is not None, f"no {tool} on PATH"
        (nothing / tool).symlink_to(path)
    done = fork(states, str(sources), env={"TEJIT_ARCH": "90a"})
    answer, parts, paths = done.value
    assert answer == 42, done.err
    assert parts == {90: None}, done.err
    assert paths[90].endswith("/tejit.cubin")
    assert "tejit: building kernels for sm_90a with NVRTC " in done.err
    assert Path(paths[90]).read_bytes()[:4] == b"\x7fELF"
    assert b"twice" in Path(paths[90]).read_bytes()
    log = (Path(paths[90]).parent / "build.log").read_text()
    assert "--gpu-architecture=sm_90a" in log
    assert "-D__CUDA_NO_HALF_OPERATORS__" in log
    assert len(entries(cache_dir)) == 2
    again = fork(states, str(sources), env={"TEJIT_ARCH": "90a"})
    assert again.value == done.value
    assert again.err == ""


@needs_cuda_build
def test_cuda_headers_are_found_for_nvrtc(sources: Path, cache_dir: Path, tmp: Path, nothing: Path) -> None:
    from tejit.jit.parts import device_part

    if not nvrtc._header_folders():
        pytest.skip("there are no CUDA headers here")
    (sources / "device.cu").write_text(
        "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n#include <cuda_fp8.h>\n"
        'extern "C" __global__ void k(__nv_fp8_e4m3* y, __nv_bfloat16* x) { y[0] = __nv_fp8_e4m3(x[0]); }\n'
    )
    part = device_part(str(sources), "90a", "13")
    settings = Settings(cache_dir=str(cache_dir))
    built = build.build([(part, build.Found())], settings)[part.name]
    assert isinstance(built, build.Entry), built
    assert built.is_cubin
    assert built.manifest["builder"] == "nvrtc"


@needs_cuda_build
def test_an_error_of_nvrtc_is_a_compile_error(sources: Path, cache_dir: Path, tmp: Path, nothing: Path) -> None:
    from tejit.jit import CompileError
    from tejit.jit.parts import device_part

    (sources / "common" / "twice.cuh").write_text('extern "C" __global__ void twice() { undeclared = 1; }\n')
    part = device_part(str(sources), "90a", "13")
    error = build.build([(part, build.Found())], Settings(cache_dir=str(cache_dir)))[part.name]
    assert isinstance(error, CompileError)
    assert 'twice.cuh(1): error: identifier "undeclared" is undefined' in "\n".join(error.details)


def test_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(workspace, "free_memory", lambda: 100 << 30)
    assert build.job_limit(Settings(), 5) == 5
    assert build.job_limit(Settings(), 9) == 8
    assert build.job_limit(Settings(max_jobs=2), 9) == 2
    monkeypatch.setattr(workspace, "free_memory", lambda: 6 << 30)
    assert build.job_limit(Settings(), 9) == 3
    monkeypatch.setattr(workspace, "free_memory", lambda: 1 << 30)
    assert build.job_limit(Settings(), 9) == 1


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_compute_with_the_reference(platform: str, sources: Path, capsys: Any, monkeypatch: Any) -> None:
    def elsewhere() -> None:
        sys.platform = platform
        for name in ("getuid", "uname", "sched_getaffinity", "confstr", "statvfs"):
            delattr(os, name)

    def use(root: str) -> Any:
        from tejit import jit

        value = load_here(root)
        try:
            jit.warm()
        except ToolchainError as error:
            return value["loaded"], value["error"], str(error), main(["info"], root), main(["cache", "path"], root)
        return None

    done = fork(use, str(sources), before=elsewhere)
    assert done.error is None, done.err
    loaded, kept, raised, info_status, cache_status = done.value
    assert not loaded
    assert platform in str(kept)
    assert platform in raised
    assert (info_status, cache_status) == (0, 1)
    assert "Warning" not in done.err

"""Building, loading and the ways in which a first import can go."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tejit.jit import CacheError, CompileError, KernelNotCached, ToolchainError
from tejit.jit.cli import main
from tejit.jit.settings import Settings
from tejit.jit.toolchain import find_nvcc

from .conftest import Quick, entries, fork, load_here, python

pytestmark = pytest.mark.jit

HAS_NVCC = shutil.which("nvcc") is not None and torch.version.cuda is not None


def test_the_first_load_builds_and_the_second_finds(sources: Path, cache_dir: Path) -> None:
    first = fork(load_here, str(sources))
    assert first.error is None
    assert first.value["answer"] == 42
    said = first.err.splitlines()
    assert len(said) == 2
    assert said[0].startswith("tejit: building kernels for cpu-")
    assert said[0].endswith(" (first use here, usually 3-15 s) ...")
    assert said[1].startswith("tejit: built in ")
    assert said[1].endswith(f" s -> {first.value['path']}")
    second = fork(load_here, str(sources))
    assert second.value == first.value
    assert second.err == ""
    assert len(entries(cache_dir)) == 1
    assert "-ffp-contract=off" in (entries(cache_dir)[0] / "build.log").read_text()


def test_quiet(quick: Quick, cache_dir: Path) -> None:
    done = fork(load_here, quick.sources, env={"TEJIT_QUIET": "1"})
    assert done.value["loaded"]
    assert done.err == ""


def test_sixteen_threads_load_once(quick: Quick, cache_dir: Path) -> None:
    def many(root: str) -> Any:
        from tejit import jit

        threads = [threading.Thread(target=jit.load, args=(root,)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return jit.is_loaded()

    done = fork(many, quick.sources)
    assert done.value is True, done.err
    assert done.err.count("building kernels") == 1


def test_a_compile_error_is_told_once_and_not_tried_again(sources: Path, cache_dir: Path) -> None:
    (sources / "common" / "seam.h").write_text('#error "the seam is open"\n')

    def twice(root: str) -> Any:
        from tejit import jit

        value = load_here(root)
        try:
            jit.warm(sources=root)
        except CompileError as error:
            return value["error"], error
        return None

    done = fork(twice, str(sources))
    first, second = done.value
    assert isinstance(first, CompileError)
    assert str(first) == str(second)
    assert any("the seam is open" in line for line in first.details)
    assert len(first.details) <= 10
    assert "the seam is open" in Path(first.log).read_text()
    assert done.err.count("building kernels") == 1
    assert "the slower reference computes" in done.err
    assert entries(cache_dir) == []


def test_never_does_not_start_a_compiler(sources: Path, cache_dir: Path) -> None:
    done = fork(load_here, str(sources), env={"TEJIT_COMPILE": "never", "TEJIT_CXX": "/bin/false"})
    assert isinstance(done.error, KernelNotCached)
    assert "python -m tejit warm" in str(done.error)
    assert not cache_dir.exists()


def test_never_is_content_with_a_filled_cache(warm: tuple[str, Path]) -> None:
    assert fork(load_here, warm[0], env={"TEJIT_COMPILE": "never"}).value["loaded"]


def test_lazy_builds_at_first_use(quick: Quick, cache_dir: Path) -> None:
    def lazy(root: str) -> Any:
        from tejit import jit

        before = load_here(root), jit.host_pending(), cache_dir.exists()
        return before, jit.ensure_host(), jit.is_loaded()

    (before, pending, written), error, loaded = fork(lazy, quick.sources, env={"TEJIT_COMPILE": "lazy"}).value
    assert (before["loaded"], before["error"], pending, written) == (False, None, True, False)
    assert error is None
    assert loaded


def test_backend_torch_builds_nothing(sources: Path, cache_dir: Path) -> None:
    done = fork(load_here, str(sources), env={"TEJIT_BACKEND": "torch"})
    assert done.error is None
    assert not done.value["loaded"]
    assert done.err == ""
    assert not cache_dir.exists()


def test_without_a_compiler_the_import_goes_on(sources: Path, cache_dir: Path, tmp_path: Path) -> None:
    done = fork(load_here, str(sources), env={"PATH": str(tmp_path)})
    assert done.error is None
    assert isinstance(done.value["error"], ToolchainError)
    assert "no C++ compiler" in done.err
    assert "apt-get install g++" in done.err


def test_warnings_that_are_errors_do_not_fail_the_import(sources: Path, cache_dir: Path, tmp_path: Path) -> None:
    done = fork(load_here, str(sources), env={"PATH": str(tmp_path)}, before=lambda: warnings.simplefilter("error"))
    assert done.error is None
    assert "tejit: no C++ compiler" in done.err


def test_a_named_compiler_that_does_not_run(sources: Path, cache_dir: Path) -> None:
    done = fork(load_here, str(sources), env={"TEJIT_CXX": "/bin/false"})
    assert isinstance(done.value["error"], ToolchainError)
    assert "TEJIT_CXX=/bin/false" in str(done.value["error"])


def test_a_library_that_does_not_load_is_built_once_more(warm: tuple[str, Path], quick: Quick) -> None:
    import hashlib
    import json

    (folder,) = entries(warm[1])
    data = bytearray((folder / "tejit.so").read_bytes())
    data[18] = 0xB7  # the ELF header's machine: another architecture
    (folder / "tejit.so").write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"] = hashlib.sha256(data).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    done = fork(load_here, warm[0])
    assert done.value["answer"] == 42, done.err
    assert done.err.count("cannot be loaded") == 1
    assert done.err.count("building kernels") == 1
    assert fork(load_here, warm[0]).err == ""


def test_a_damaged_entry_is_said_and_built_once(warm: tuple[str, Path], quick: Quick) -> None:
    (folder,) = entries(warm[1])
    (folder / "tejit.so").write_bytes(b"\x7fELF")
    done = fork(load_here, warm[0])
    assert done.value["answer"] == 42
    assert done.err.count(f"{folder} cannot be used") == 1
    assert fork(load_here, warm[0]).err == ""


def test_paths_with_every_kind_of_character(tmp_path: Path) -> None:
    odd = tmp_path / "a b'c\"d $HOME ü:é"
    (odd / "tmp").mkdir(parents=True)
    from .conftest import write_sources

    made = write_sources(odd / "sources")
    env: dict[str, str | None] = {"TEJIT_CACHE_DIR": str(odd / "cache"), "TMPDIR": str(odd / "tmp")}
    done = fork(load_here, str(made), env=env)
    assert done.value["answer"] == 42, done.err
    assert done.value["path"].startswith(str(odd / "cache"))


@pytest.mark.full
@pytest.mark.parametrize("what", ["TMPDIR", "torch", "toolkit"])
def test_a_space_in_a_path(what: str, sources: Path, checkout: Path, cache_dir: Path, tmp_path: Path) -> None:
    spaced = tmp_path / "a b"
    spaced.mkdir()
    (checkout / "cuda_src").unlink()
    (checkout / "cuda_src").symlink_to(sources)
    env = {"TEJIT_ARCH": "90a"}
    if what == "TMPDIR":
        env["TMPDIR"] = str(spaced)
    elif what == "torch":
        (spaced / "torch").symlink_to(Path(torch.__file__).parent)
        env["PYTHONPATH"] = f"{spaced}{os.pathsep}{checkout}"
    elif not HAS_NVCC:
        pytest.skip("needs nvcc and a CUDA build of torch")
    else:
        nvcc = find_nvcc(Settings())
        assert nvcc is not None
        shutil.copytree(nvcc.root, spaced / "cuda", symlinks=True, ignore=shutil.ignore_patterns("*.so*", "nsight*"))
        env["TEJIT_NVCC"] = str(spaced / "cuda" / "bin" / "nvcc")
    code = "import tejit, torch; print(torch.__file__); print(tejit.jit.host_error(), tejit.jit.loader._state.parts)"
    done = python("-c", code, env=env, path=checkout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == ("None {90: None}" if HAS_NVCC else "None {}"), done.stderr
    assert what != "torch" or str(spaced) in done.stdout


def test_a_compiler_with_words_and_spaces_in_its_path(sources: Path, cache_dir: Path, tmp_path: Path) -> None:
    tool = tmp_path / "my tools" / "c++ wrapper"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\nexec c++ "$@"\n')
    tool.chmod(0o700)
    done = fork(load_here, str(sources), env={"TEJIT_CXX": str(tool)})
    assert done.value["answer"] == 42, done.err
    env: dict[str, str | None] = {
        "TEJIT_CXX": f"env X=1 '{tool}'",
        "TEJIT_CACHE_DIR": str(tmp_path / "second"),
    }
    done = fork(load_here, str(sources), env=env)
    assert done.value["answer"] == 42, done.err


def test_a_cache_dir_that_is_not_trusted_is_an_error_at_import(warm: tuple[str, Path]) -> None:
    warm[1].chmod(0o777)
    done = fork(load_here, warm[0])
    assert isinstance(done.error, CacheError)
    assert all(text in str(done.error) for text in (str(warm[1]), "0777", f"own uid {os.getuid()}"))


@pytest.mark.skipif(not HAS_NVCC, reason="needs nvcc and a CUDA build of torch")
def test_architecture_parts_are_built_beside_the_host_part_and_registered(sources: Path, cache_dir: Path) -> None:
    def both(root: str) -> Any:
        from tejit import jit
        from tejit.jit import loader

        value = load_here(root)
        ask = loader._state.library.test_part
        import ctypes

        ask.restype = ctypes.c_char_p
        at_import = ask(90), ask(80)
        asked = loader._state.library.test_ask(80), loader._state.library.test_ask(75)
        return value["loaded"], at_import, asked, ask(80), jit.ensure_arch(75), jit.ensure_arch(90)

    done = fork(both, str(sources), env={"TEJIT_ARCH": "9.0"})
    assert done.error is None, done.err
    loaded, (hopper, ampere), asked, later, unsupported, known = done.value
    assert loaded
    assert hopper.startswith(os.fsencode(cache_dir))
    assert hopper.endswith(b"/tejit.so so")
    assert ampere is None
    assert asked == (0, 1)
    assert later.startswith(os.fsencode(cache_dir))
    assert "7.5" in str(unsupported)
    assert "80, 86, 89, 90a" in str(unsupported)
    assert known is None
    assert "tejit: building kernels for sm_90a with nvcc " in done.err
    assert len(entries(cache_dir)) == 3


def test_the_command_line(filled: tuple[Path, Path], capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, cache = str(filled[0]), filled[1]
    monkeypatch.setenv("TEJIT_CACHE_DIR", str(cache))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["warm"], made) == 0
    assert capsys.readouterr().out.startswith(f"host: {cache}")
    assert main(["cache", "path"], made) == 0
    assert capsys.readouterr().out == f"{cache}\n"
    assert main(["cache", "key"], made) == 0
    key = capsys.readouterr().out
    assert len(key) == 65
    assert main(["cache", "list"], made) == 0
    assert capsys.readouterr().out.startswith("host ")
    assert main(["cache", "key", "--arch", "x"], made) == 2
    assert "90a, 9.0a, sm_90a or 90" in capsys.readouterr().err
    for arguments in (["info"], ["doctor", "--json"]):
        assert main(arguments, made) == 0
        assert str(cache) in capsys.readouterr().out
    monkeypatch.setenv("TEJIT_COMPILE", "sometimes")
    assert main(["info"], made) == 0
    assert "sometimes" in capsys.readouterr().out


def test_warm_of_the_command_line_fails_with_the_error(sources: Path, cache_dir: Path, capsys: Any) -> None:
    os.environ["TEJIT_CXX"] = "/bin/false"
    assert main(["warm"], str(sources)) == 1
    assert "TEJIT_CXX=/bin/false" in capsys.readouterr().err


def test_what_is_private_belongs_to_the_user_alone(warm: tuple[str, Path]) -> None:
    for path in [warm[1] / "v1", *entries(warm[1])]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert sys.platform.startswith("linux")

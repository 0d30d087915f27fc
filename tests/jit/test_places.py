"""Directories that are read-only, full, foreign, noexec or missing: what is used instead, and what is said."""

from __future__ import annotations

import codecs
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tejit.jit import CacheError, KernelNotCached, roots
from tejit.jit.errors import CacheDirError
from tejit.jit.settings import read_settings

from .conftest import (
    MS_NOEXEC,
    MS_RDONLY,
    MS_REMOUNT,
    Fork,
    Quick,
    entries,
    fork,
    load_here,
    mount_tmpfs,
    needs_root,
    own_mounts,
    python,
)

pytestmark = pytest.mark.jit
STRANGER = 12345


@pytest.fixture
def home(tmp_path: Path, tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A HOME of the test's own; the cache is in it where nothing stands against that."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


def in_tmp(tmp: Path) -> str:
    return str(tmp / f"tejit-{os.getuid()}")


def the_warning(err: str) -> str:
    lines = [line for line in err.splitlines() if line.startswith("tejit:1: RuntimeWarning")]
    assert len(lines) == 1, err
    return lines[0]


def test_the_home_directory_is_the_usual_place(quick: Quick, home: Path, tmp: Path) -> None:
    done = fork(load_here, quick.sources)
    assert done.value["path"].startswith(str(home / ".cache" / "tejit" / "v1"))
    assert "Warning" not in done.err
    assert (home / ".cache" / "tejit").stat().st_mode & 0o777 == 0o700


def test_a_read_only_home(quick: Quick, home: Path, tmp: Path, mounts: None) -> None:
    def read_only() -> None:
        own_mounts()
        mount_tmpfs(home)
        mount_tmpfs(home, flags=MS_REMOUNT | MS_RDONLY)

    done = fork(load_here, quick.sources, before=read_only)
    assert done.value["path"].startswith(in_tmp(tmp))
    warning = the_warning(done.err)
    for text in (str(home / ".cache"), "Read-only file system", in_tmp(tmp), "TEJIT_CACHE_DIR"):
        assert text in warning
    second = fork(load_here, quick.sources, before=read_only)
    assert second.value == done.value
    assert second.err == ""


def test_no_home_at_all(checkout: Path, quick: Quick, tmp: Path) -> None:
    code = "import tejit; from tejit.jit import loader; print(loader.loaded_path())"
    for _ in range(2):
        done = python("-c", code, env={"HOME": "/nonexistent"}, path=checkout)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(in_tmp(tmp))
        assert "Warning" not in done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("options", ["size=4k,mode=0700", "size=16m,nr_inodes=2,mode=0700"])
def test_a_full_home(options: str, quick: Quick, home: Path, tmp: Path, mounts: None) -> None:
    def full() -> None:
        own_mounts()
        mount_tmpfs(home, options)

    done = fork(load_here, quick.sources, before=full)
    assert done.value["path"].startswith(in_tmp(tmp))
    warning = the_warning(done.err)
    for text in (str(home), "No space left on device", in_tmp(tmp), "TEJIT_CACHE_DIR"):
        assert text in warning


def test_a_disk_that_is_full_when_the_entry_comes(quick: Quick, home: Path, tmp: Path, mounts: None) -> None:
    def nearly_full() -> None:
        own_mounts()
        mount_tmpfs(home, "size=12k,mode=0700")  # the trial write fits, the library does not

    done = fork(load_here, quick.sources, before=nearly_full)
    assert done.value["answer"] == 42, done.err
    assert done.value["path"].startswith(in_tmp(tmp))
    warning = the_warning(done.err)
    for text in (str(home), "No space left on device", in_tmp(tmp), "TEJIT_CACHE_DIR"):
        assert text in warning
    assert quick.count() == 1, "what is compiled is not compiled again"


def test_a_full_cache_dir_leads_to_a_private_build(quick: Quick, cache_dir: Path, tmp: Path, mounts: None) -> None:
    cache_dir.mkdir()

    def full() -> None:
        own_mounts()
        mount_tmpfs(cache_dir, "size=4k,mode=0700")

    def load(sources: str) -> Any:
        value = load_here(sources)
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        return value, Path(value["path"]).exists()

    done = fork(load, quick.sources, before=full)
    value, there = done.value
    assert value["answer"] == 42
    assert Path(value["path"]).parent.name.startswith("tejit-private-")
    assert there, "a child's end does not remove it"
    assert not Path(value["path"]).exists(), "it goes with its process"
    assert "serves this process only" in done.err
    assert str(cache_dir) in done.err


@pytest.mark.parametrize(
    ("room", "what"),
    [
        (0, "no temporary directory to compile in"),
        (28 << 10, "no space left while compiling there"),
        (40 << 10, "is compiled but there is no place for it"),
    ],
)
def test_every_disk_full(room: int, what: str, quick: Quick, cache_dir: Path, tmp: Path, mounts: None) -> None:
    cache_dir.mkdir()

    def full() -> None:
        from tejit.jit import workspace

        own_mounts()
        mount_tmpfs(cache_dir, "size=4k,mode=0700")
        mount_tmpfs("/dev/shm", "size=4k,mode=0700")
        mount_tmpfs(tmp, "size=1m,mode=0700")
        workspace.temporary_dirs = roots.temporary_dirs = lambda: [str(tmp)]
        Path(tmp, "ballast").write_bytes(bytes((1 << 20) - room))

    error = fork(load_here, quick.sources, before=full).value["error"]
    assert isinstance(error, CacheError)
    assert what in error.what
    assert all(text in str(error) for text in (str(tmp), "/dev/shm", "TEJIT_CACHE_DIR"))


def test_a_disk_that_fills_while_compiling(sources: Path, cache_dir: Path, tmp: Path, mounts: None) -> None:
    def small() -> None:
        own_mounts()
        mount_tmpfs(tmp, "size=256k,mode=0700")

    done = fork(load_here, str(sources), before=small)
    assert done.value["answer"] == 42, done.err
    assert done.value["path"].startswith(str(cache_dir))
    assert done.err.count("building kernels") == 1


def test_a_noexec_cache_dir_is_an_error_that_names_the_mount(
    quick: Quick, cache_dir: Path, tmp: Path, mounts: None
) -> None:
    cache_dir.mkdir()

    def noexec() -> None:
        own_mounts()
        mount_tmpfs(cache_dir, flags=MS_NOEXEC)

    error = fork(load_here, quick.sources, before=noexec).error
    assert isinstance(error, CacheDirError)
    assert f"the mount {cache_dir} is noexec" in error.what
    assert f"TEJIT_CACHE_DIR={cache_dir}" in error.what
    assert "TEJIT_CACHE_DIR" in error.todo


def test_a_noexec_home_and_tmpdir_are_passed_over(quick: Quick, home: Path, tmp: Path, mounts: None) -> None:
    def noexec() -> None:
        own_mounts()
        mount_tmpfs(home, flags=MS_NOEXEC)
        mount_tmpfs(tmp, flags=MS_NOEXEC)
        roots.temporary_dirs = lambda: [str(tmp), str(second)]
        from tejit.jit import workspace

        workspace.temporary_dirs = roots.temporary_dirs

    second = tmp.parent / "second"
    second.mkdir()
    (home / ".cache").mkdir()
    done = fork(load_here, quick.sources, before=noexec)
    assert done.value["path"].startswith(str(second)), done.err
    assert f"the mount {home} is noexec" in done.err
    assert f"the mount {tmp} is noexec" in done.err
    assert str(second) in quick.lines()[0]


def test_an_unwritable_cache_dir_serves_hits_and_refuses_builds(
    warm: tuple[str, Path], sources: Path, tmp: Path, mounts: None
) -> None:
    made, cache = warm

    def read_only() -> None:
        own_mounts()
        copy = cache.parent / "copy"
        shutil.copytree(cache, copy)
        mount_tmpfs(cache)
        shutil.copytree(copy, cache, dirs_exist_ok=True)
        cache.chmod(0o700)
        mount_tmpfs(cache, flags=MS_REMOUNT | MS_RDONLY)

    hit = fork(load_here, made, before=read_only)
    assert hit.value["answer"] == 42
    assert hit.err == ""
    shutil.rmtree(cache.parent / "copy")
    (sources / "host.cpp").write_text((sources / "host.cpp").read_text() + "// other\n")
    miss = fork(load_here, str(sources), before=read_only)
    assert isinstance(miss.error, CacheDirError)
    assert str(miss.error).startswith(f"TEJIT_CACHE_DIR={cache} cannot be used: Read-only file system (owner uid")
    assert f"own uid {os.getuid()}" in str(miss.error)


@needs_root
def test_a_foreign_cache_is_passed_over_and_said(quick: Quick, home: Path, tmp: Path) -> None:
    theirs = home / ".cache" / "tejit"
    theirs.mkdir(parents=True)
    os.chown(theirs, STRANGER, STRANGER)
    done = fork(load_here, quick.sources)
    assert done.value["path"].startswith(in_tmp(tmp))
    warning = the_warning(done.err)
    assert str(theirs) in warning
    assert f"owned by uid {STRANGER}, this process runs as uid 0" in warning
    again = fork(load_here, quick.sources)
    assert again.value == done.value
    assert f"the cache directory {theirs} is skipped" in the_warning(again.err)
    error = fork(load_here, quick.sources, env={"TEJIT_CACHE_DIR": str(theirs)}).error
    assert isinstance(error, CacheDirError)
    assert f"(owner uid {STRANGER}, own uid 0)" in error.what


@needs_root
def test_a_foreign_entry_is_not_loaded(warm: tuple[str, Path], quick: Quick, tmp: Path) -> None:
    (folder,) = entries(warm[1])
    os.chown(folder / "tejit.so", STRANGER, STRANGER)
    done = fork(load_here, warm[0])
    assert done.value["answer"] == 42
    assert f"owned by uid {STRANGER}" in done.err
    assert done.err.count("cannot be used") == 1
    assert quick.count() == 1
    assert fork(load_here, warm[0]).err == ""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can look into."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@needs_root
def test_another_user(warm: tuple[str, Path], open_folder: Path) -> None:
    """Root's caches, prebuilt or not, as a user sees them who is not root."""
    made, root_cache = warm
    sources, prebuilt, shared_tmp = (open_folder / name for name in ("sources", "prebuilt", "tmp"))
    shutil.copytree(made, sources)
    shutil.copytree(root_cache, prebuilt)
    for folder, names, files in os.walk(open_folder):
        for name in [*names, *files]:
            os.chmod(os.path.join(folder, name), 0o755)
    shared_tmp.mkdir()
    shared_tmp.chmod(0o1777)
    squatted = shared_tmp / f"tejit-{STRANGER}"
    squatted.mkdir(mode=0o700)  # root's, in the user's place
    env: dict[str, str | None] = {
        "TEJIT_CACHE_DIR": None,
        "TEJIT_COMPILE": "never",
        "TEJIT_PREBUILT": str(prebuilt),
        "HOME": "/root",
        "TMPDIR": str(shared_tmp),
    }

    def import_all() -> None:
        # The user need not be allowed to read this Python's own files.
        codecs.lookup("ascii")
        import tejit.jit.build  # noqa: F401

    def look(root: str) -> Any:
        value = load_here(root)
        chosen, notes = roots.choose(read_settings())
        return value["path"], chosen.path if chosen else None, notes

    def as_stranger(**changes: str | None) -> Any:
        return fork(look, str(sources), env={**env, **changes}, uid=STRANGER, before=import_all)

    first = as_stranger()
    assert first.error is None, first.err
    path, chosen, notes = first.value
    assert path.startswith(str(prebuilt))
    assert chosen == f"/tmp/tejit-{STRANGER}"
    os.rmdir(f"{chosen}/v1")
    os.rmdir(chosen)
    assert any(f"{squatted} cannot hold" in note and "owned by uid 0, this process" in note for note in notes)
    error = as_stranger(TEJIT_CACHE_DIR=str(prebuilt), TEJIT_PREBUILT=None).error
    assert isinstance(error, CacheDirError)
    assert f"(owner uid 0, own uid {STRANGER})" in error.what
    prebuilt.chmod(0o775)
    refused = as_stranger()
    assert isinstance(refused.error, KernelNotCached)
    assert f"the cache directory {prebuilt} is skipped: others can write to it (mode 0775" in refused.err
    os.chown(prebuilt, STRANGER + 1, 0)
    prebuilt.chmod(0o755)
    refused = as_stranger()
    assert isinstance(refused.error, KernelNotCached)
    assert f"owned by uid {STRANGER + 1}" in refused.err


def test_a_damaged_prebuilt_entry_is_replaced_in_the_users_own_cache(
    warm: tuple[str, Path], quick: Quick, tmp: Path, home: Path
) -> None:
    made, prebuilt = warm
    (folder,) = entries(prebuilt)
    (folder / "tejit.so").write_bytes(b"\x7fELF")
    env = {"TEJIT_CACHE_DIR": None, "TEJIT_PREBUILT": str(prebuilt)}
    done = fork(load_here, made, env=env)
    assert done.value["path"].startswith(str(home))
    assert f"{folder} cannot be used (tejit.so has 4 bytes" in done.err
    assert (folder / "tejit.so").read_bytes() == b"\x7fELF", "a prebuilt cache is never written"
    assert fork(load_here, made, env=env).err == ""
    assert quick.count() == 1


def test_never_names_key_places_and_command(sources: Path, home: Path, tmp: Path) -> None:
    from tejit.jit.parts import host_part

    error = fork(load_here, str(sources), env={"TEJIT_COMPILE": "never"}).error
    assert isinstance(error, KernelNotCached)
    for text in (host_part(str(sources)).key[:16], str(home / ".cache" / "tejit"), in_tmp(tmp)):
        assert text in error.what
    assert "`python -m tejit warm`" in error.todo
    assert list(home.iterdir()) == []
    assert list(tmp.iterdir()) == []


def test_no_temporary_directory_at_all(quick: Quick, cache_dir: Path) -> None:
    def none() -> None:
        from tejit.jit import workspace

        roots.temporary_dirs = workspace.temporary_dirs = lambda: []
        tempfile._candidate_tempdir_list = lambda: []

    running = Fork(load_here, quick.sources, before=none)
    assert running.join().value["answer"] == 42

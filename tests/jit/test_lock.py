"""Processes that want the same part at once: one builds, the others wait, and nothing depends on it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tejit.jit import CompileError, build, lock

from .conftest import Fork, Quick, entries, fork, load_here

pytestmark = pytest.mark.jit


def impatient() -> None:
    build.WAIT_BEFORE_SAYING = 0.0


def test_who_waits_says_for_whom_and_takes_what_the_other_built(quick: Quick, cache_dir: Path, tmp: Path) -> None:
    gate = quick.close_gate()
    first = Fork(load_here, quick.sources, env=gate)
    quick.wait_for(1)
    second = Fork(load_here, quick.sources, before=impatient)
    second.wait_until_said("\n")
    quick.open_gate()
    one, two = first.join(), second.join()
    assert one.value["answer"] == two.value["answer"] == 42
    assert one.value["path"] == two.value["path"]
    (line,) = two.err.splitlines()
    assert line.startswith(f"tejit: waiting for pid {first.pid} (building cpu-")
    assert line.endswith(" s) ...")
    assert quick.count() == 1
    (left,) = (tmp / f"tejit-{os.getuid()}" / "locks").iterdir()
    assert left.name.endswith(f"-{entries(cache_dir)[0].name}.lock"), "the lock's file stays, and nothing else"


def test_nothing_is_said_of_a_short_wait(quick: Quick, cache_dir: Path, tmp: Path) -> None:
    assert build.WAIT_BEFORE_SAYING == 2.0
    gate = quick.close_gate()
    first = Fork(load_here, quick.sources, env=gate)
    quick.wait_for(1)
    second = Fork(load_here, quick.sources)
    quick.open_gate()
    assert first.join().value["loaded"]
    done = second.join()
    assert done.value["loaded"]
    assert done.err == ""


def test_after_the_time_limit_it_is_built_here_as_well(quick: Quick, cache_dir: Path, tmp: Path) -> None:
    gate = quick.close_gate()
    first = Fork(load_here, quick.sources, env=gate)
    quick.wait_for(1)
    second = fork(load_here, quick.sources, env={"TEJIT_LOCK_TIMEOUT": "0"})
    assert second.value["answer"] == 42
    assert f"pid {first.pid} (building cpu-" in second.err
    assert "for over 0 s (TEJIT_LOCK_TIMEOUT)" in second.err
    quick.open_gate()
    one = first.join()
    assert one.value == second.value, "the first one's copy came second, so it uses the second one's"
    assert quick.count() == 2
    assert len(entries(cache_dir)) == 1


def block_lock_directory(tmp: Path) -> None:
    own = tmp / f"tejit-{os.getuid()}"
    own.mkdir(mode=0o700)
    (own / "locks").write_text("not a directory")


def test_without_a_lock_directory_the_cache_root_is_locked(quick: Quick, cache_dir: Path, tmp: Path) -> None:
    block_lock_directory(tmp)
    gate = quick.close_gate()
    first = Fork(load_here, quick.sources, env=gate)
    quick.wait_for(1)
    others = [Fork(load_here, quick.sources, before=impatient) for _ in range(3)]
    for other in others:
        other.wait_until_said(f"waiting for pid {first.pid} ")
    quick.open_gate()
    done = [first.join(), *(other.join() for other in others)]
    assert all(one.value["answer"] == 42 for one in done)
    assert quick.count() == 1
    assert [path.name for path in (cache_dir / "v1" / ".locks").iterdir()] == [f"{entries(cache_dir)[0].name}.lock"]


class NoLocks:
    """What a file system without locks does to `filelock`: it creates the file, then the lock fails."""

    def __init__(self, path: str) -> None:
        self.path = path

    def acquire(self, timeout: float) -> None:
        Path(self.path).touch()
        raise OSError(37, "No locks available")


def test_where_nothing_can_be_locked_all_build_and_one_entry_remains(
    quick: Quick, cache_dir: Path, tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_file_lock", NoLocks)
    gate = quick.close_gate()
    running = [Fork(load_here, quick.sources, env=gate) for _ in range(4)]
    quick.wait_for(4)
    quick.open_gate()
    done = [one.join() for one in running]
    assert all(one.value["answer"] == 42 for one in done), [one.err for one in done]
    assert len({one.value["path"] for one in done}) == 1
    assert len(entries(cache_dir)) == 1
    assert not [path for path in (cache_dir / "v1").iterdir() if path.name.startswith(".staging")]


def test_who_waits_takes_over_the_compile_error(quick: Quick, cache_dir: Path, tmp: Path) -> None:
    gate = quick.close_gate()
    failing: dict[str, str | None] = {**gate, "QUICK_FAIL": "host.cpp:1:1: error: the seam is open"}
    first = Fork(load_here, quick.sources, env=failing)
    quick.wait_for(1)
    others = [Fork(load_here, quick.sources, env=failing, before=impatient) for _ in range(3)]
    for other in others:
        other.wait_until_said("waiting for pid")
    quick.open_gate()
    done = [first.join(), *(other.join() for other in others)]
    assert quick.count() == 1
    assert all(isinstance(one.value["error"], CompileError) for one in done)
    assert len({str(one.value["error"]) for one in done}) == 1
    assert "the seam is open" in str(done[3].value["error"])
    assert fork(load_here, quick.sources).value["answer"] == 42, "a process that comes later tries itself"


def test_another_compiler_is_not_judged_by_the_first_ones_error(quick: Quick, cache_dir: Path, tmp: Path) -> None:
    gate = quick.close_gate()
    first = Fork(load_here, quick.sources, env={**gate, "QUICK_FAIL": "error: no"})
    quick.wait_for(1)
    other = Fork(load_here, quick.sources, env={"TEJIT_CXX": "g++"}, before=impatient)
    other.wait_until_said("waiting for pid")
    quick.open_gate()
    assert isinstance(first.join().value["error"], CompileError)
    assert other.join().value["answer"] == 42


def test_a_failure_of_the_lock_file_itself_is_no_failure(quick: Quick, cache_dir: Path, tmp: Path) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    def break_it() -> None:
        lock._file_lock = full

    assert fork(load_here, quick.sources, before=break_it).value["answer"] == 42


def test_sixteen_processes_build_once(quick: Quick, cache_dir: Path, tmp: Path) -> None:
    gate = quick.close_gate()
    running = [Fork(load_here, quick.sources, env=gate) for _ in range(16)]
    quick.wait_for(1)
    quick.open_gate()
    done = [one.join() for one in running]
    assert {one.value["answer"] for one in done} == {42}
    assert len({one.value["path"] for one in done}) == 1
    assert quick.count() == 1
    assert sum("building kernels" in one.err for one in done) == 1

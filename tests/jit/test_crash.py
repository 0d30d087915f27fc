"""Builders that are killed or interrupted: nothing of them runs on, blocks, or stays."""

from __future__ import annotations

import os
import random
import select
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tejit.jit import CompileError, cache, process

from .conftest import Fork, Quick, entries, fork, load_here, script

pytestmark = pytest.mark.jit


def wait_until_gone(pid: int) -> None:
    """Return when a process, which need not be a child of this one, has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    ended = poll.poll(30_000)
    os.close(descriptor)
    assert ended, f"process {pid} still runs"


def builds_in(tmp: Path) -> list[str]:
    return [path.name for path in tmp.iterdir() if path.name.startswith(("tejit-build-", "tejit-private-"))]


def staging_in(cache_dir: Path) -> list[str]:
    store = cache_dir / "v1"
    names = [path.name for path in store.iterdir()] if store.is_dir() else []
    return [name for name in names if name.startswith(".") and name != ".locks"]


@pytest.mark.parametrize("whole_group", [False, True])
def test_a_killed_builder_leaves_no_process_and_no_directory(
    whole_group: bool, quick: Quick, cache_dir: Path, tmp: Path
) -> None:
    builder = Fork(load_here, quick.sources, env=quick.close_gate())
    quick.wait_for(1)
    child = int(quick.lines()[0].split()[0])
    (os.killpg if whole_group else os.kill)(builder.pid, signal.SIGKILL)
    assert builder.join().status == -signal.SIGKILL
    wait_until_gone(child)
    assert builds_in(tmp) == []
    begin = time.monotonic()
    done = fork(load_here, quick.sources)
    assert done.value["answer"] == 42
    assert "waiting" not in done.err
    assert time.monotonic() - begin < 10, "without a wait"
    assert staging_in(cache_dir) == []


def test_builder_and_compiler_killed_together_are_swept_by_the_next_build(
    quick: Quick, cache_dir: Path, tmp: Path
) -> None:
    builder = Fork(load_here, quick.sources, env=quick.close_gate())
    quick.wait_for(1)
    child = int(quick.lines()[0].split()[0])
    os.kill(child, signal.SIGSTOP)  # so that it cannot clean up
    os.kill(builder.pid, signal.SIGKILL)
    builder.join()
    os.kill(child, signal.SIGKILL)
    wait_until_gone(child)
    assert len(builds_in(tmp)) == 1
    assert fork(load_here, quick.sources).value["answer"] == 42
    assert builds_in(tmp) == []


@pytest.mark.parametrize("moment", ["copying", "before the rename", "after the rename"])
def test_killed_while_publishing(moment: str, quick: Quick, cache_dir: Path, tmp: Path) -> None:
    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def half(source: str, target: str) -> None:
        Path(target).write_bytes(Path(source).read_bytes()[:100])
        die()

    def prepare() -> None:
        if moment == "copying":
            cache.copy = half
        elif moment == "before the rename":
            cache._sync_folder = die
        else:
            cache.open_entry = die

    # The first look-up of all meets no folder, so `open_entry` may run once before it is replaced.
    original = cache.find

    def find_then_prepare(*arguments: Any, **options: Any) -> Any:
        found = original(*arguments, **options)
        prepare()
        cache.find = original if moment != "after the rename" else lambda *_, **__: cache.Found()
        return found

    def patch() -> None:
        cache.find = find_then_prepare

    assert fork(load_here, quick.sources, before=patch).status == -signal.SIGKILL
    done = fork(load_here, quick.sources)
    assert done.value["answer"] == 42
    assert "cannot be used" not in done.err
    assert quick.count() == (1 if moment == "after the rename" else 2)
    assert len(entries(cache_dir)) == 1
    assert staging_in(cache_dir) == []


def interrupted(sources: str) -> Any:
    try:
        return load_here(sources)
    except KeyboardInterrupt:
        return "interrupted"


def test_ctrl_c_ends_the_build_and_goes_on(quick: Quick, cache_dir: Path, tmp: Path) -> None:
    builder = Fork(interrupted, quick.sources, env=quick.close_gate())
    quick.wait_for(1)
    child = int(quick.lines()[0].split()[0])
    os.kill(builder.pid, signal.SIGINT)
    assert builder.join().value == "interrupted"
    assert not Path(f"/proc/{child}").exists()
    assert process.session_members(child) == []
    assert builds_in(tmp) == []
    assert staging_in(cache_dir) == []
    assert entries(cache_dir) == []
    done = fork(load_here, quick.sources)
    assert done.value["answer"] == 42
    assert "waiting" not in done.err


def test_ctrl_c_reaches_the_compilers_that_ninja_started(
    sources: Path, cache_dir: Path, tmp: Path, tmp_path: Path
) -> None:
    said, hold = tmp_path / "compiler", tmp_path / "hold"
    os.mkfifo(said)
    os.mkfifo(hold)
    compiler = script(
        tmp_path / "bin" / "c++", f'case "$*" in *" -c "*) echo $$ > {said}; read x < {hold};; esac; exec g++ "$@"'
    )
    builder = Fork(interrupted, str(sources), env={"TEJIT_CXX": str(compiler)})
    pid = int(said.read_text())
    os.kill(builder.pid, signal.SIGINT)
    assert builder.join().value == "interrupted"
    wait_until_gone(pid)
    assert builds_in(tmp) == []


def test_an_interrupt_inside_an_op_goes_on_when_the_op_is_back(quick: Quick, cache_dir: Path, tmp: Path) -> None:
    def op_meets_a_gpu(sources: str) -> Any:
        from tejit.jit import loader

        load_here(sources)

        def interrupt(*_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

        loader._obtain = interrupt
        loader.cuda_major = lambda: "13"
        try:
            status = loader._state.library.test_ask(90)
            threading.Event().wait(10)
        except KeyboardInterrupt:
            return status
        return None

    assert fork(op_meets_a_gpu, quick.sources).value == 1


def test_a_compiler_that_is_killed_says_what_to_do(sources: Path, cache_dir: Path, tmp: Path, tmp_path: Path) -> None:
    compiler = script(tmp_path / "bin" / "c++", 'case "$*" in *" -c "*) kill -9 $$;; esac; exec g++ "$@"')
    done = fork(load_here, str(sources), env={"TEJIT_CXX": str(compiler)})
    error = done.value["error"]
    assert isinstance(error, CompileError)
    assert "was killed by signal 9" in error.what
    assert "GB of memory are free now" in error.what
    assert "MAX_JOBS=1" in error.todo
    assert Path(str(error.log)).is_file()
    assert "MAX_JOBS=1" in done.err


def test_a_compiler_that_vanishes_is_named(sources: Path, cache_dir: Path, tmp: Path, tmp_path: Path) -> None:
    compiler = script(tmp_path / "bin" / "c++", 'case "$*" in *" -c "*) exec /gone/cc1plus;; esac; exec g++ "$@"')
    error = fork(load_here, str(sources), env={"TEJIT_CXX": str(compiler)}).value["error"]
    assert isinstance(error, CompileError)
    assert any("/gone/cc1plus" in line and "not found" in line for line in error.details)
    assert not any("Traceback" in line or "Error building extension" in line for line in error.details)


def test_a_build_process_that_is_killed_says_the_same(quick: Quick, cache_dir: Path, tmp: Path) -> None:
    error = fork(load_here, quick.sources, env={"QUICK_FAIL": "kill"}).value["error"]
    assert isinstance(error, CompileError)
    assert "was killed by signal 9" in error.what


@pytest.mark.full
def test_kill_at_twenty_random_moments(sources: Path, cache_dir: Path, tmp: Path) -> None:
    moments = random.Random(20261129)
    begin = time.monotonic()
    assert fork(load_here, str(sources), env={"TEJIT_CACHE_DIR": str(tmp / "timed")}).value["loaded"]
    whole = time.monotonic() - begin
    for number in range(20):
        builder = Fork(load_here, str(sources))
        # The moment is the thing tested: there is no event to wait for.
        time.sleep(moments.uniform(0.0, whole))
        (os.killpg if number % 2 else os.kill)(builder.pid, signal.SIGKILL)
        builder.join()
        begin = time.monotonic()
        done = fork(load_here, str(sources))
        assert done.value["answer"] == 42, done.err
        assert "waiting" not in done.err
        assert time.monotonic() - begin < 5 * whole + 5
        assert staging_in(cache_dir) == []
        for folder in entries(cache_dir):
            cache.leftovers.remove(str(folder))
    assert fork(load_here, str(sources)).value["answer"] == 42
    # A killed builder's child needs a moment to notice, so its directory may be there still; no later build's is.
    deadline = time.monotonic() + 30
    while builds_in(tmp) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert builds_in(tmp) == []
    assert staging_in(cache_dir) == []

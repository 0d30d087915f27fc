"""82: what the builder says never fails an import, whatever stands in the place of stderr."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tejit.jit import messages

from .conftest import Quick, _show, fork, load_here, python

pytestmark = pytest.mark.jit


class WriteOnly:
    """As some notebooks and GUIs have it: no flush, no isatty, no fileno."""

    def __init__(self) -> None:
        self.said = ""

    def write(self, text: str) -> None:
        self.said += text


class Raising:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def write(self, text: str) -> None:
        raise self.error

    def flush(self) -> None:
        raise self.error


class FlushRaises(WriteOnly):
    def flush(self) -> None:
        raise BrokenPipeError


class Nothing:
    """Not even `write`."""


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


STREAMS: dict[str, Any] = {
    "none": lambda: None,
    "write only": WriteOnly,
    "closed": closed,
    "broken pipe": lambda: Raising(BrokenPipeError()),
    "closed file": lambda: Raising(ValueError("I/O operation on closed file")),
    "recursion": lambda: Raising(RecursionError()),
    "anything": lambda: Raising(RuntimeError("main thread is not in main loop")),
    "flush raises": FlushRaises,
    "no write": Nothing,
    "ascii": lambda: io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict"),
    "bytes": io.BytesIO,
}


@pytest.mark.parametrize("action", ["default", "error", "always"])
@pytest.mark.parametrize("name", list(STREAMS))
def test_82_nothing_that_is_said_raises(name: str, action: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", STREAMS[name]())
    monkeypatch.setattr(messages, "_said", set())
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        warnings.showwarning = _show  # pytest would keep them
        messages.say("baut für sm_90a → /tmp/ü")
        messages.warn_once("die Kerne fehlen → Referenz")


def test_82_a_stream_without_flush_gets_every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = WriteOnly()
    monkeypatch.setattr(sys, "stderr", stream)
    messages.say("one")
    messages.say("two")
    assert stream.said == "tejit: one\ntejit: two\n"


def test_82_what_a_stream_cannot_encode_is_written_in_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    messages.say("built -> /home/jürgen")
    assert raw.getvalue() == b"tejit: built -> /home/j\\xfcrgen\n"


def test_82_no_stderr_at_all_and_a_hook_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **more: Any) -> None:
        raise LookupError("this program's own showwarning")

    monkeypatch.setattr(messages, "_said", set())
    stream = WriteOnly()
    monkeypatch.setattr(sys, "stderr", stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", fails)
        messages.warn_once("the hook raises")
    assert stream.said == "tejit: the hook raises\n"
    monkeypatch.delattr(sys, "stderr")
    messages.say("nobody hears it")


def test_82_an_interrupt_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        messages.say("Ctrl-C while this is written")


@pytest.mark.parametrize("name", ["none", "write only", "closed", "broken pipe", "ascii", "no write"])
def test_82_a_cold_import_survives_its_stderr(name: str, quick: Quick, cache_dir: Path) -> None:
    def other() -> None:
        sys.stderr = STREAMS[name]()

    done = fork(load_here, quick.sources, before=other)
    assert done.error is None
    assert done.value["answer"] == 42


@pytest.mark.parametrize("name", ["none", "write only", "closed", "broken pipe", "ascii", "no write"])
@pytest.mark.parametrize("action", ["default", "error"])
def test_82_an_import_without_a_compiler_survives_its_stderr(
    name: str, action: Any, sources: Path, cache_dir: Path, tmp_path: Path
) -> None:
    def other() -> None:
        sys.stderr = STREAMS[name]()
        warnings.simplefilter(action)

    done = fork(load_here, str(sources), env={"PATH": str(tmp_path)}, before=other)
    assert done.error is None
    assert not done.value["loaded"]


@pytest.mark.parametrize("words", ["2>&-", "2>/dev/full", "1>&- 2>&-", "<&- >&- 2>&-"])
def test_82_an_interpreter_whose_streams_are_closed_or_full(words: str, checkout: Path, tmp_path: Path) -> None:
    """As daemons and pythonw start it."""
    mark = tmp_path / "mark"
    code = f"import tejit; open({str(mark)!r}, 'w').write(str(tejit.jit.is_loaded()))"
    env = {"TEJIT_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(checkout)}
    command = f'exec "{sys.executable}" -W error::RuntimeWarning -c "{code}" {words}'
    done = subprocess.run(["sh", "-c", command], env={**os.environ, **env}, cwd=checkout, timeout=120, check=False)
    assert mark.read_text() == "True"
    assert done.returncode in (0, 120)  # 120: the interpreter itself could not flush its streams


def test_82_the_command_line_without_streams(checkout: Path, tmp_path: Path) -> None:
    code = """
import sys
sys.orig_argv = ["python", "-m", "tejit", "warm"]
sys.stderr = None
import tejit
from tejit.jit.cli import main
print(main(["warm"]))
"""
    done = python("-c", code, env={"TEJIT_CACHE_DIR": "/dev/null"}, path=checkout)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"

"""The build's child processes: started in a session of their own, ended with everything they started."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from . import interpreter


def start(command: list[str], folder: str, log: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a child that leads a new session, with its output in `log`.

    Neither it nor what it starts builds anything of its own (`interpreter.MARKER`). Its standard input is a pipe
    that nobody writes to: it ends with this process, and the child sees that.
    """
    with open(log, "ab") as out:
        return subprocess.Popen(
            command,
            cwd=folder,
            env={**env, interpreter.MARKER: str(os.getpid())},
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end_session(child: subprocess.Popen[bytes]) -> None:
    """End a child and all processes of its session, and wait until they are gone."""
    # ninja gives every compiler a process group of its own, so one killpg would miss the compilers.
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        members = session_members(child.pid)
        if not members and child.poll() is not None:
            break
        for pid in members:
            _kill(pid)
        if child.poll() is None:
            _kill(child.pid)
            try:
                child.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                pass
    if child.stdin is not None:
        child.stdin.close()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def session_members(session: int) -> list[int]:
    """The living processes of a session, without this one."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The command, in parentheses, may hold anything: what follows the last one is plain.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if len(fields) > 3 and int(fields[3]) == session and fields[0] not in (b"Z", b"X"):
            found.append(int(name))
    return found

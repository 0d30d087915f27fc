"""81: programs whose `sys.executable` is no Python interpreter import tejit, end, and are started once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tejit.jit import ToolchainError, interpreter

from .conftest import entries, python, script

pytestmark = pytest.mark.jit

#: What a frozen program does, whatever its arguments are. FROZEN: how it differs from an interpreter.
PROGRAM = """
import os, sys
with open(os.environ["STARTS"], "a") as file:
    file.write(f"{os.getpid()} {sys.argv}\\n")
assert len(open(os.environ["STARTS"]).readlines()) < 4, "it starts itself again and again"
exec(os.environ["FROZEN"])
import torch, tejit
from tejit.jit import loader
exec(os.environ.get("THEN", ""))
print(tejit.jit.is_loaded(), loader._state.parts, tejit.jit.host_error())
x = torch.linspace(-3, 3, 64 * 64).reshape(64, 64)
print(tejit.MXFP8Quantizer()(x).dequantize().shape)
"""


class Program:
    """An executable that runs PROGRAM, and what its runs come to."""

    def __init__(self, folder: Path, checkout: Path, exe: Path | None = None) -> None:
        folder.mkdir()
        self.path, self.starts, self.cache = folder / "program", folder / "starts", folder / "cache"
        code = folder / "program.py"
        code.write_text(PROGRAM)
        script(self.path, f'exec "{exe or sys.executable}" "{code}" "$@"')
        self.checkout = checkout

    def run(self, frozen: str, **env: str) -> subprocess.CompletedProcess[str]:
        self.starts.write_text("")
        return subprocess.run(
            [self.path],
            cwd=self.checkout,
            env={
                **os.environ,
                "PYTHONPATH": str(self.checkout),
                "TEJIT_CACHE_DIR": str(self.cache),
                "STARTS": str(self.starts),
                "FROZEN": frozen.replace("PATH", repr(str(self.path))),
                "CUDA_VISIBLE_DEVICES": "",
                **env,
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def count(self) -> int:
        return len(self.starts.read_text().splitlines())


@pytest.fixture
def program(tmp_path: Path, checkout: Path) -> Program:
    return Program(tmp_path / "frozen", checkout)


FROZEN = "sys.executable = sys._base_executable = PATH; sys.frozen = True; sys._MEIPASS = '/nonexistent'"


@pytest.mark.parametrize(("how", "mode"), [(FROZEN, "import"), (FROZEN, "lazy"), ("sys.frozen = True", "import")])
def test_81_a_frozen_program_ends_with_one_process(how: str, mode: str, program: Program) -> None:
    arch = {"TEJIT_ARCH": "90a"} if torch.version.cuda else {}
    done = program.run(how, TEJIT_COMPILE=mode, **arch)
    assert done.returncode == 0, done.stderr
    assert program.count() == 1
    assert "False {}" in done.stdout
    assert "torch.Size([64, 64])" in done.stdout
    assert done.stderr.count("this is a frozen program") == 1, done.stderr
    assert "TEJIT_PREBUILT" in done.stderr
    assert entries(program.cache) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("frozen", True), ("frozen", "console_exe"), ("frozen", 1), ("_MEIPASS", "/tmp/_MEI1"), ("oxidized", True)],
)
def test_81_every_freezer_is_known(name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, name, value, raising=False)
    with pytest.raises(ToolchainError, match=rf"frozen program \(sys\.{name} is set\)"):
        interpreter.find()


def test_81_nuitka_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__compiled__", object(), raising=False)
    with pytest.raises(ToolchainError, match="compiled by Nuitka"):
        interpreter.find()


NO_CHILD = """
import torch  # starts programs of its own
torch.version.cuda = torch.version.cuda or "13.0"
def hook(name, arguments):
    if name in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "os.system"):
        raise AssertionError(f"{name} {arguments}")
sys.addaudithook(hook)
sys.executable = PATH; sys.frozen = True
"""


def test_81_a_frozen_program_starts_nothing_at_all(program: Program) -> None:
    # The hook would fail a compiler's start, NVRTC's search for libraries and everything else.
    ask = "tejit.jit.ensure_arch(90); loader._state.host_error or 1/0"
    done = program.run(NO_CHILD, TEJIT_ARCH="90a", THEN=ask)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("this is a frozen program") == 1, done.stderr


def test_81_warm_of_a_frozen_program_raises(program: Program) -> None:
    then = """
try:
    tejit.warm()
except tejit.ToolchainError as error:
    print("raised:", error)
sys.argv = ["tejit", "warm"]
from tejit.jit.cli import main
print("status", main(["warm"]))
"""
    done = program.run(FROZEN, THEN=then)
    assert done.returncode == 0, done.stderr
    assert "raised: this is a frozen program (sys.frozen is set)" in done.stdout
    assert "status 1" in done.stdout
    assert program.count() == 1


def test_81_a_frozen_program_loads_what_was_filled_before(program: Program, warm: tuple[str, Path]) -> None:
    shutil.copytree(warm[1], program.cache)
    program.cache.chmod(0o700)
    # The small sources of these tests have no kernels: nothing may be computed with them.
    done = program.run(FROZEN, TEJIT_COMPILE="never", THEN="print(tejit.jit.is_loaded()); sys.exit()")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"
    assert done.stderr == ""


def test_81_never_stays_an_error_of_the_import(program: Program) -> None:
    done = program.run(FROZEN, TEJIT_COMPILE="never")
    assert done.returncode == 1
    assert "KernelNotCached" in done.stderr
    assert program.count() == 1


@pytest.mark.parametrize("named", ["PATH", "''", "None"])
def test_81_a_program_that_is_not_known_as_frozen_is_not_started_again(named: str, program: Program) -> None:
    """The interpreter that runs it is started in its place."""
    then = "print(tejit.jit.is_loaded(), sys.executable); sys.exit()"
    done = program.run(f"sys.executable = sys._base_executable = {named}", THEN=then)
    assert done.returncode == 0, done.stderr
    assert program.count() == 1
    assert done.stdout.startswith("True "), done.stderr
    assert len(entries(program.cache)) == 1


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch")
def test_81_nvrtc_starts_no_program_again(program: Program, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("g++", "as", "ld", "sh"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    hide = "; from tejit.jit import toolchain; toolchain.SYSTEM_CUDA = '/nonexistent'; toolchain._packaged_nvcc = list"
    then = "print(list(tejit.warm(['90a']))); print(loader._state.paths[90]); sys.exit()"
    # `import tejit` comes with the lines that hide nvcc, so the build is the one of `warm`.
    done = program.run(f"sys.executable = PATH{hide}", THEN=then, PATH=str(tools), TEJIT_COMPILE="lazy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert program.count() == 1, program.starts.read_text()
    assert done.stdout.endswith("tejit.cubin\n"), done.stdout


def test_81_cuda_pathfinder_starts_an_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/usr/bin/uwsgi")
    with interpreter.for_libraries():
        assert os.path.samefile(sys.executable, "/proc/self/exe")
    assert sys.executable == "/usr/bin/uwsgi"
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(ToolchainError, match="frozen program"), interpreter.for_libraries():
        pytest.fail("libraries may be looked for")


EMBEDDING = r"""
#include <Python.h>
int main(int argc, char** argv) {
  PyConfig config;
  PyConfig_InitPythonConfig(&config);
  PyConfig_SetBytesString(&config, &config.program_name, argv[0]);
  PyConfig_SetBytesString(&config, &config.executable, argv[0]);
  PyConfig_SetBytesString(&config, &config.home, HOME);
  config.parse_argv = 0;
  PyConfig_SetBytesArgv(&config, argc, argv);
  PyConfig_SetBytesString(&config, &config.run_filename, CODE);
  Py_InitializeFromConfig(&config);
  return Py_RunMain();
}
"""


@pytest.mark.full
@pytest.mark.parametrize("name", ["server", "python3"])
def test_81_a_program_that_embeds_python_ends(name: str, program: Program, tmp_path: Path) -> None:
    """Compiled, with libpython, as uwsgi is. Under an interpreter's name a build starts it once, and then fails."""
    import sysconfig

    library = sysconfig.get_config_var("LDLIBRARY")
    folder, include = sysconfig.get_config_var("LIBDIR"), sysconfig.get_path("include")
    if not (Path(folder) / library).exists() or not (Path(include) / "Python.h").exists():
        pytest.skip(f"this Python has no {folder}/{library}, or no headers")
    source, code = tmp_path / "embedding.c", program.path.parent / "program.py"
    source.write_text(EMBEDDING.replace("HOME", f'"{sys.base_prefix}"').replace("CODE", f'"{code}"'))
    built = tmp_path / "bin" / name
    built.parent.mkdir()
    link = [str(Path(folder) / library), f"-Wl,-rpath,{folder}", "-lm", "-ldl", "-lpthread", "-lutil"]
    subprocess.run(["gcc", str(source), f"-I{include}", "-o", str(built), "-rdynamic", *link], check=True)
    program.path = built
    site = [path for path in sys.path if path.endswith("site-packages")]
    done = program.run(f"sys.path += {site}", THEN="print(tejit.jit.is_loaded(), sys.executable); sys.exit()")
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(built) in done.stdout
    if name == "server":
        assert program.count() == 1
        assert "True" in done.stdout
    else:
        assert program.count() == 2
        assert "False" in done.stdout
        assert "is no Python interpreter" in done.stderr


def test_81_what_a_build_starts_neither_builds_nor_goes_on(checkout: Path, tmp_path: Path) -> None:
    env = {interpreter.MARKER: "4711", "TEJIT_CACHE_DIR": str(tmp_path / "cache")}
    done = python("-c", "import tejit", env=env, path=checkout)
    assert done.returncode == 1
    assert "process 4711 started this one to compile kernels" in done.stderr
    assert not (tmp_path / "cache").exists()
    warmed = python("-m", "tejit", "warm", env=env, path=checkout)
    assert warmed.returncode == 1
    assert "process 4711 started this one" in warmed.stderr


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("python", True),
        ("python3", True),
        ("python3.12", True),
        ("python3.13t", True),
        ("pypy3", True),
        ("python.exe", True),
        (".python3.12-wrapped", True),
        ("platform-python3.6", True),
        ("python3-dbg", True),
        ("uwsgi", False),
        ("blender", False),
        ("python-app", False),
        ("pythonista", False),
        ("my-python", False),
    ],
)
def test_81_an_interpreter_is_known_by_its_name(name: str, is_one: bool, tmp_path: Path) -> None:
    assert interpreter._is_interpreter(str(script(tmp_path / name, ""))) is is_one
    assert not interpreter._is_interpreter(str(tmp_path / "gone" / name))


def test_81_a_virtual_environment_keeps_its_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert interpreter.find() == sys.executable
    link = tmp_path / "program"
    link.symlink_to(os.path.realpath("/proc/self/exe"))
    monkeypatch.setattr(sys, "executable", str(link))
    assert interpreter.find() == str(link), "the running interpreter by another name"
    monkeypatch.setattr(sys, "executable", "/usr/bin/uwsgi")
    assert interpreter.find().startswith(os.path.join(sys.prefix, "bin", "python"))
    monkeypatch.setattr(interpreter, "_running", lambda: "/usr/bin/uwsgi")
    monkeypatch.setattr(sys, "executable", "/usr/bin/uwsgi")
    monkeypatch.setattr(sys, "_base_executable", "/usr/bin/uwsgi")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(ToolchainError, match="'/usr/bin/uwsgi', the running program is /usr/bin/uwsgi"):
        interpreter.find()
    beside = script(tmp_path / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}", "")
    assert interpreter.find() == str(beside)

"""Finding nvcc, its toolkit and a host compiler; what cannot work is refused before anything is compiled."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from . import interpreter
from .errors import ToolchainError
from .settings import Settings

SYSTEM_CUDA = "/usr/local/cuda"
OLDEST_GXX = 9  # the first with all of C++17
NEWEST_GXX_NAMED = 15
OLDEST_GXX_NAMED = 11
# The first toolkit that knows an architecture.
TOOLKIT_FOR = {
    "80": "11.0",
    "86": "11.1",
    "89": "11.8",
    "90a": "12.0",
    "100a": "12.8",
    "103a": "12.9",
    "120a": "12.8",
    "121a": "12.9",
}
# Read by nvcc or by torch's builder: with them the same key would name different binaries.
FOREIGN_VARIABLES = (
    "CC",
    "CXX",
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "NVCC_CCBIN",
    "PYTORCH_NVCC",
    "TORCH_CUDA_ARCH_LIST",
    "TORCH_EXTENSION_SKIP_NVCC_GEN_DEPENDENCIES",
    "CUDA_INC_PATH",
    "CUDNN_HOME",
    "CUDNN_PATH",
)


@dataclass(frozen=True)
class Compiler:
    """A host compiler that runs."""

    command: tuple[str, ...]
    family: str  # "g++" or "clang++"
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.family} {'.'.join(map(str, self.version[:2]))}"


@dataclass(frozen=True)
class Nvcc:
    """An nvcc that runs, and the toolkit that it belongs to."""

    path: str
    root: str
    version: str  # "13.0.88"

    def __str__(self) -> str:
        return f"nvcc {self.version}"

    @property
    def major(self) -> str:
        return self.version.split(".")[0]


def clean_environment() -> dict[str, str]:
    """The user's environment without what would change a binary unseen, and with English messages."""
    env = {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}
    env["LC_ALL"] = "C.UTF-8"
    return env


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Exit status and output of a short command; status -1 with the reason where it could not run."""
    try:
        done = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
            check=False,
            env=clean_environment(),
        )
    except OSError as error:
        return -1, error.strerror or str(error)
    except subprocess.TimeoutExpired:
        return -1, "it did not answer within 60 s"
    return done.returncode, done.stdout.decode("utf-8", "replace")


# ---- host compiler ----


def find_host_compiler(settings: Settings, nvcc: Nvcc | None = None) -> Compiler:
    """The first of TEJIT_CXX, CXX, c++, g++-15 ... g++-11 that runs and, for an nvcc, is one that it accepts.

    Raises:
        ToolchainError: there is none, or TEJIT_CXX names one that cannot be used.
    """
    newest_gxx, clang_below = _nvcc_bounds(nvcc) if nvcc else (None, None)
    accepted = f"g++ {OLDEST_GXX} or newer" if newest_gxx is None else f"g++ {OLDEST_GXX} to {newest_gxx}"
    purpose = f" for {nvcc}" if nvcc else ""
    found: list[str] = []
    for origin, command in _host_candidates(settings):
        compiler = _ask_compiler(command)
        if isinstance(compiler, str):
            refusal = compiler
        else:
            refusal = _refuse(compiler, newest_gxx, clang_below)
            if not refusal:
                return compiler
        if origin == "TEJIT_CXX":
            raise ToolchainError(
                f"TEJIT_CXX={settings.cxx} cannot be used{purpose}: {refusal}; accepted: {accepted}",
                f"set TEJIT_CXX to {accepted}, or unset it",
            )
        found.append(f"{origin} {shlex.join(command)}: {refusal}" if origin else f"{shlex.join(command)}: {refusal}")
    raise ToolchainError(
        f"no C++ compiler that can be used{purpose}: {'; '.join(found) or 'none on PATH'}; accepted: {accepted}",
        "apt-get install g++ (dnf install gcc-c++, conda install gxx_linux-64), or set TEJIT_CXX to one",
    )


def _host_candidates(settings: Settings) -> Iterator[tuple[str, list[str]]]:
    for origin, value in (("TEJIT_CXX", settings.cxx), ("CXX", os.environ.get("CXX"))):
        command = split_command(value or "")
        if command:
            yield origin, command
    for name in ("c++", *(f"g++-{n}" for n in range(NEWEST_GXX_NAMED, OLDEST_GXX_NAMED - 1, -1)), "g++"):
        path = shutil.which(name)
        if path:
            yield "", [path]


def split_command(value: str) -> list[str]:
    """A compiler setting as words: as it is where there is such a file, else as a shell would split it."""
    if os.path.isfile(value):
        return [value]
    try:
        return shlex.split(value)
    except ValueError:
        return [value]


def _ask_compiler(command: list[str]) -> Compiler | str:
    status, banner = _run([*command, "--version"])
    if status != 0:
        return f"it does not run ({banner.strip().splitlines()[-1] if banner.strip() else f'exit {status}'})"
    status, answer = _run([*command, "-dumpfullversion", "-dumpversion"])
    match = re.search(r"^\d+(\.\d+)*$", answer.strip(), re.MULTILINE)
    if status != 0 or match is None:
        return "it does not tell its version"
    family = "clang++" if "clang" in banner.lower() else "g++"
    return Compiler(tuple(command), family, tuple(int(n) for n in match[0].split(".")))


def _refuse(compiler: Compiler, newest_gxx: int | None, clang_below: int | None) -> str:
    major = compiler.version[0]
    if compiler.family == "g++":
        if major < OLDEST_GXX:
            return f"{compiler} is too old"
        if newest_gxx is not None and major > newest_gxx:
            return f"{compiler} is too new"
    elif clang_below is not None and major >= clang_below:
        return f"{compiler} is too new"
    return ""


def _nvcc_bounds(nvcc: Nvcc) -> tuple[int | None, int | None]:
    """The newest g++ that a toolkit accepts, and the first clang that it refuses; None where it is silent."""
    import glob

    for pattern in ("targets/*/include/crt/host_config.h", "include/crt/host_config.h"):
        for path in glob.glob(os.path.join(glob.escape(nvcc.root), pattern)):
            try:
                with open(path, encoding="utf-8", errors="replace") as header:
                    text = header.read()
            except OSError:
                continue
            gxx = re.search(r"gcc versions later than (\d+)", text)
            clang = re.search(r"clang version must be less than (\d+)", text)
            return (int(gxx[1]) if gxx else None, int(clang[1]) if clang else None)
    return None, None


# ---- nvcc ----


def find_nvcc(settings: Settings) -> Nvcc | None:
    """The first nvcc of TEJIT_NVCC, CUDA_HOME, CUDA_PATH, pip's or conda's package, PATH, /usr/local/cuda.

    Raises:
        ToolchainError: TEJIT_NVCC is set and does not run.
    """
    for origin, path in _nvcc_candidates(settings):
        status, text = _run([path, "--version"])
        match = re.search(r"\bV(\d+\.\d+\.\d+)", text)
        if status == 0 and match:
            return Nvcc(path, _toolkit_root(path), match[1])
        if origin == "TEJIT_NVCC":
            last = text.strip().splitlines()[-1] if text.strip() else f"exit {status}"
            raise ToolchainError(
                f"TEJIT_NVCC={path} is no working nvcc: {last}", "set TEJIT_NVCC to an nvcc, or unset it"
            )
    return None


def _nvcc_candidates(settings: Settings) -> Iterator[tuple[str, str]]:
    if settings.nvcc:
        yield "TEJIT_NVCC", shutil.which(settings.nvcc) or settings.nvcc
    for name in ("CUDA_HOME", "CUDA_PATH"):
        path = os.path.join(os.environ.get(name) or os.sep, "bin", "nvcc")
        if os.environ.get(name) and os.path.isfile(path):
            yield name, path
    packaged = _packaged_nvcc()
    if packaged:
        yield "package", packaged
    on_path = shutil.which("nvcc")
    if on_path:
        yield "PATH", on_path
    path = os.path.join(SYSTEM_CUDA, "bin", "nvcc")
    if os.path.isfile(path):
        yield SYSTEM_CUDA, path


def _packaged_nvcc() -> str | None:
    try:
        from cuda.pathfinder import find_nvidia_binary_utility

        with interpreter.for_libraries():
            return find_nvidia_binary_utility("nvcc")
    except Exception:
        # cuda-pathfinder missing, too old for this function, at odds with the environment: others follow.
        return None


def _toolkit_root(nvcc: str) -> str:
    # nvcc itself knows best: what is called nvcc may be a script in another directory.
    _, text = _run([nvcc, "--dryrun", "-x", "cu", "-c", "-o", os.devnull, os.devnull])
    match = re.search(r"^#\$ TOP=(.+)$", text, re.MULTILINE)
    if match:
        return os.path.realpath(match[1].strip())
    return os.path.dirname(os.path.dirname(os.path.realpath(nvcc)))


def check_nvcc(nvcc: Nvcc, torch_cuda: str, arch: str) -> None:
    """Compare a toolkit with torch's CUDA version and with the architecture that it is asked for.

    Raises:
        ToolchainError: it does not fit.
    """
    torch_major = torch_cuda.split(".")[0]
    if nvcc.major != torch_major:
        raise ToolchainError(
            f"nvcc is {nvcc.version} ({nvcc.path}), but torch was built with CUDA {torch_cuda}: "
            f"the major versions differ",
            f"install a toolkit for this torch ({pip_line(torch_cuda)}) or point TEJIT_NVCC at one, "
            f"or install a torch built for CUDA {nvcc.major}",
        )
    status, text = _run([nvcc.path, "--list-gpu-code"])
    # It lists base architectures only; where it knows 9.0 it knows 9.0a.
    known = set(re.findall(r"sm_(\d+)", text))
    if status == 0 and known and arch.rstrip("a") not in known:
        raise ToolchainError(
            f"nvcc {nvcc.version} ({nvcc.path}) cannot compile for sm_{arch}, which needs CUDA "
            f"{TOOLKIT_FOR[arch]} or newer",
            f"install a newer toolkit ({pip_line(torch_cuda)}) or point TEJIT_NVCC at one",
        )


def pip_line(torch_cuda: str) -> str:
    """The line that installs a complete toolkit for this torch."""
    # nvcc's package takes any version of its own parts, nvvm and crt: the toolkit's extras hold them to nvcc's.
    version = ".".join(torch_cuda.split(".")[:2])
    return f'pip install "cuda-toolkit[nvcc,cccl]=={version}.*" "cuda-toolkit[nvvm,crt]"'


def find_static_cudart(nvcc: Nvcc) -> tuple[str | None, str | None]:
    """The toolkit's `libcudart_static.a` and, where there is none, a shared `libcudart.so*`."""
    import glob

    for folder in ("lib64", "lib", "targets/*/lib", "lib/x86_64-linux-gnu"):
        static = sorted(glob.glob(os.path.join(glob.escape(nvcc.root), folder, "libcudart_static.a")))
        if static:
            return static[0], None
    for folder in ("lib64", "lib", "targets/*/lib", "lib/x86_64-linux-gnu"):
        shared = sorted(glob.glob(os.path.join(glob.escape(nvcc.root), folder, "libcudart.so*")))
        if shared:
            return None, shared[0]
    return None, None


def find_ninja() -> str:
    """The folder of a `ninja` program: beside this Python, in its package, or on PATH.

    Raises:
        ToolchainError: there is none.
    """
    beside = os.path.dirname(os.path.abspath(sys.executable)) if sys.executable else ""
    folders = [beside]
    try:
        import ninja

        folders.append(str(ninja.BIN_DIR))
    except (ImportError, AttributeError):
        pass
    path = shutil.which("ninja", path=os.pathsep.join(f for f in folders if f)) or shutil.which("ninja")
    if path is None:
        raise ToolchainError("ninja is missing, without it nothing can be built", "pip install ninja")
    return os.path.dirname(path)

"""NVRTC, the compiler in torch's own CUDA libraries: it builds the architecture parts where there is no nvcc."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass

from . import interpreter
from .errors import ToolchainError
from .parts import Part
from .settings import cc_of
from .toolchain import SYSTEM_CUDA, TOOLKIT_FOR, pip_line

# What load_inline passes to nvcc unasked; with the same definitions both builders read the same text.
_AS_LOAD_INLINE = (
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
)


@dataclass(frozen=True)
class Nvrtc:
    """An NVRTC that answers."""

    version: str  # "13.0"
    archs: tuple[int, ...]  # compute capabilities that it compiles for

    def __str__(self) -> str:
        return f"NVRTC {self.version}"


def find_nvrtc(torch_cuda: str) -> Nvrtc:
    """The NVRTC that torch's CUDA libraries bring.

    Raises:
        ToolchainError: there is none, or it belongs to another CUDA major version than torch.
    """
    try:
        from cuda.bindings import nvrtc

        with interpreter.for_libraries():
            status, major, minor = nvrtc.nvrtcVersion()
            listed, archs = nvrtc.nvrtcGetSupportedArchs()
        if int(status) or int(listed):
            raise RuntimeError(f"it answers {status}")
    except Exception as error:
        # cuda-python missing or of another major version, no library, a library too old for a function.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ToolchainError(f"NVRTC cannot be used ({reason})", "pip install cuda-python") from error
    found = Nvrtc(f"{major}.{minor}", tuple(int(arch) for arch in archs))
    if str(major) != torch_cuda.split(".")[0]:
        raise ToolchainError(f"{found} does not fit a torch built with CUDA {torch_cuda}", pip_line(torch_cuda))
    return found


def check_nvrtc(nvrtc: Nvrtc, torch_cuda: str, arch: str) -> None:
    """Compare an NVRTC with the architecture that it is asked for.

    Raises:
        ToolchainError: it does not know it.
    """
    if cc_of(arch) not in nvrtc.archs:
        raise ToolchainError(
            f"{nvrtc} cannot compile for sm_{arch}, which needs CUDA {TOOLKIT_FOR[arch]} or newer",
            f"install a newer toolkit ({pip_line(torch_cuda)}) or point TEJIT_NVCC at one",
        )


def options(part: Part, source: str) -> list[str]:
    """The options for one part whose sources lie in the folder `source`."""
    # -O3 and -gencode are nvcc's alone. A function that names no side is the host's for nvcc, which drops it from
    # the kernels; here there is no host.
    shared = [flag for flag in part.flags if flag.startswith(("-std=", "-D"))]
    # To look for CUDA's headers can take a process of its own, a tenth of a second: only for those who include any.
    folders = [source, *(_header_folders() if part.sources.foreign else ())]
    return [
        f"--gpu-architecture=sm_{part.arch}",
        "--device-as-default-execution-space",
        # A part is one unit: optimise its functions on all processors.
        "--split-compile=0",
        *shared,
        *_AS_LOAD_INLINE,
        *(f"--include-path={folder}" for folder in folders),
    ]


def _header_folders() -> Sequence[str]:
    """Folders of CUDA's own headers."""
    folders = []
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        with interpreter.for_libraries():
            folders = [find_nvidia_header_directory(name) for name in ("cudart", "cccl")]
    except Exception:
        # cuda-pathfinder missing or too old for this function: the places below are left.
        pass
    import torch

    packages = os.path.dirname(os.path.dirname(os.path.abspath(str(torch.__file__))))
    folders += glob.glob(os.path.join(glob.escape(packages), "nvidia", "cu*", "include"))
    folders.append(os.path.join(SYSTEM_CUDA, "include"))
    return [folder for folder in dict.fromkeys(folders) if folder and os.path.isdir(folder)]

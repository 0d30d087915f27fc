"""Facts of hardware: what a device's tensor cores take. Asked of the tensor's own device, never of the current one."""

from __future__ import annotations

import functools

import torch

from tejit import compat


# Each function of a device is a constant to a compiled region: torch 2.11 cannot even compare two tuples there.
@compat.constant_result
def cuda_capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability (major, minor) of a CUDA device; None where it cannot be asked.

    That is every other kind of device, and a CUDA device named on a machine without one (in a
    ``TensorSpec``, under ``FakeTensorMode``).
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return _capability_of_index(device.index)


@functools.cache
def _capability_of_index(index: int | None) -> tuple[int, int] | None:
    if not torch.cuda.is_available():
        return None
    try:
        return torch.cuda.get_device_capability(index)
    except (AssertionError, RuntimeError, ValueError):
        return None  # an index beyond the devices of this machine


#: What was found of CUDA devices: eager code asks several times a layer.
_every_layout: dict[torch.device, bool] = {}
_fp8_gemm: dict[torch.device, bool] = {}


@compat.constant_result
def fp8_gemm_takes_every_layout(device: torch.device) -> bool:
    """Whether the FP8 GEMM of ``device`` reads either operand transposed as well.

    Datacenter Blackwell (capability 10.0 up to below 12.0) and 13.0 up do; everything else reads only
    operands whose contracted dimension is contiguous ("TN"), so columnwise data is stored transposed.
    """
    if device.type != "cuda":
        return False
    known = _every_layout.get(device)
    if known is None:
        capability = cuda_capability(device)
        known = capability is not None and ((10, 0) <= capability < (12, 0) or capability >= (13, 0))
        _every_layout[device] = known
    return known


def fp8_gemm_reason(device: torch.device) -> str | None:
    """Why the per-tensor FP8 GEMM is not native on ``device``; None where it is (capability 8.9 up)."""
    if device.type != "cuda":
        return f"{device.type} has no FP8 GEMM; the same bytes are dequantized and multiplied"
    capability = cuda_capability(device)
    if capability is None:
        return "the compute capability of this device cannot be asked"
    if capability < (8, 9):
        return f"compute capability {capability[0]}.{capability[1]}; FP8 tensor cores start at 8.9"
    return None


@compat.constant_result
def fp8_gemm_is_native(device: torch.device) -> bool:
    """Whether the per-tensor FP8 GEMM runs on ``device``'s tensor cores."""
    known = _fp8_gemm.get(device)
    if known is None:
        known = _fp8_gemm[device] = fp8_gemm_reason(device) is None
    return known


def fp8_block_gemm_reason(device: torch.device) -> str | None:
    """Why the GEMM of FP8 blocks of 128 is not native on ``device``; None where it is (capability 9.0 alone)."""
    if device.type != "cuda":
        return f"{device.type} has no FP8 GEMM; the same bytes are dequantized and multiplied"
    capability = cuda_capability(device)
    if capability is None:
        return "the compute capability of this device cannot be asked"
    if capability != (9, 0):
        return f"compute capability {capability[0]}.{capability[1]}; the GEMM of blocks of 128 exists on 9.0 only"
    if _cuda_version() < (12, 9):
        return f"torch was built with CUDA {torch.version.cuda}; cuBLASLt multiplies blocks of 128 from 12.9 on"
    return None


def _cuda_version() -> tuple[int, ...]:
    """Of the CUDA that torch was built with; ``(0,)`` for none."""
    return tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])


@compat.constant_result
def fp8_block_gemm_is_native(device: torch.device) -> bool:
    """Whether the GEMM of FP8 blocks of 128 runs on ``device``'s tensor cores."""
    return fp8_block_gemm_reason(device) is None


def mxfp8_gemm_reason(device: torch.device) -> str | None:
    """Why the MXFP8 GEMM is not native on ``device``; None where it is (capability 10.0 up)."""
    return _small_block_reason(device, "MXFP8")


@compat.constant_result
def mxfp8_gemm_is_native(device: torch.device) -> bool:
    """Whether the MXFP8 GEMM runs on ``device``'s tensor cores."""
    return mxfp8_gemm_reason(device) is None


def nvfp4_gemm_reason(device: torch.device) -> str | None:
    """Why the NVFP4 GEMM is not native on ``device``; None where it is (capability 10.0 up)."""
    return _small_block_reason(device, "NVFP4")


@compat.constant_result
def nvfp4_gemm_is_native(device: torch.device) -> bool:
    """Whether the NVFP4 GEMM runs on ``device``'s tensor cores."""
    return nvfp4_gemm_reason(device) is None


def _small_block_reason(device: torch.device, name: str) -> str | None:
    if device.type != "cuda":
        return f"{device.type} has no {name} GEMM; the same bytes are dequantized and multiplied"
    capability = cuda_capability(device)
    if capability is None:
        return "the compute capability of this device cannot be asked"
    if capability < (10, 0):
        return (
            f"compute capability {capability[0]}.{capability[1]}; tensor cores multiply {name} from 10.0 on. The same"
            " bytes are dequantized and multiplied"
        )
    if _cuda_version() < (12, 8):
        return f"torch was built with CUDA {torch.version.cuda}; cuBLASLt multiplies {name} from 12.8 on"
    return None


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """The device meant by an argument: None is torch's default where one was set, else cuda if there is one, else
    cpu."""
    if device is None:
        device = compat.default_device()
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return device if isinstance(device, torch.device) else torch.device(device)

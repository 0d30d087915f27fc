"""Transformer Engine's own quantize kernels, called through the C interface of its published library: the peer that
the GPU benchmarks time ours against.

``TE_LIB`` names the ``libtransformer_engine.so`` of the wheel ``transformer-engine-cu13``; without it there is no peer.
Its MXFP8 and NVFP4 kernels do not run on compute capability 9.0.
"""

from __future__ import annotations

import ctypes
import glob
import os
import sys
from collections.abc import Callable

import torch

#: NVTEDType
_DTYPES = {torch.float32: 4, torch.bfloat16: 6, torch.float8_e4m3fn: 7}
#: NVTETensorParam
_PARAMETERS = {"row": 0, "col": 1, "scale": 2, "amax": 3, "row_scale_inv": 4, "col_scale_inv": 5}
#: NVTEScalingMode
_PER_TENSOR, _BLOCKS = 0, {1: 2, 2: 3}
_POW2_SCALES = 0  # NVTEQuantizationConfigAttribute


class _Shape(ctypes.Structure):
    _fields_ = (("sizes", ctypes.c_size_t * 15), ("count", ctypes.c_size_t))


class _Buffer(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("dtype", ctypes.c_int), ("shape", _Shape))


class TransformerEngine:
    """The library at ``path``. Raises ``OSError`` where it cannot be loaded."""

    def __init__(self, path: str) -> None:
        for package in sys.path:  # torch's wheels bring what the library needs, in folders the loader does not search
            for pattern in ("cu13/lib/libcudart.so*", "cu13/lib/libnvrtc.so*", "cu13/lib/libcublas*.so*"):
                for name in sorted(glob.glob(os.path.join(package, "nvidia", pattern))):
                    ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
            for pattern in ("cudnn/lib/libcudnn*.so*", "nccl/lib/libnccl.so*"):
                for name in sorted(glob.glob(os.path.join(package, "nvidia", pattern))):
                    try:
                        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
                    except OSError:
                        continue  # a part that the quantize kernels do without
        # Bound lazily: functions of a newer cuBLAS that nothing here calls may be missing.
        loader = ctypes.CDLL(None)
        loader.dlopen.restype, loader.dlopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_int]
        loader.dlerror.restype = ctypes.c_char_p
        handle = loader.dlopen(path.encode(), os.RTLD_LAZY | os.RTLD_GLOBAL)
        if not handle:
            raise OSError(loader.dlerror().decode())
        self._library = library = ctypes.CDLL(path, handle=handle)
        pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        library.nvte_create_tensor.restype = pointer
        library.nvte_create_tensor.argtypes = [number]
        library.nvte_set_tensor_param_v2.argtypes = [pointer, number, pointer, size]
        library.nvte_create_quantization_config.restype = pointer
        library.nvte_set_quantization_config_attribute.argtypes = [pointer, number, pointer, size]
        library.nvte_quantize.argtypes = [pointer] * 3
        library.nvte_quantize_v2.argtypes = [pointer] * 4
        library.nvte_compute_amax_with_config.argtypes = [pointer] * 4
        library.nvte_compute_scale_from_amax.argtypes = [pointer] * 3
        self._kept: list[torch.Tensor] = []

    def _tensor(self, mode: int, **buffers: torch.Tensor) -> int:
        handle = self._library.nvte_create_tensor(mode)
        for name, buffer in buffers.items():
            self._kept.append(buffer)
            described = _Buffer(buffer.data_ptr(), _DTYPES[buffer.dtype])
            described.shape.count = buffer.dim()
            for index, length in enumerate(buffer.shape):
                described.shape.sizes[index] = length
            self._library.nvte_set_tensor_param_v2(
                handle, _PARAMETERS[name], ctypes.byref(described), ctypes.sizeof(described)
            )
        return handle

    def _config(self, pow2: bool) -> int:
        config = self._library.nvte_create_quantization_config()
        flag = ctypes.c_uint8(pow2)
        self._library.nvte_set_quantization_config_attribute(config, _POW2_SCALES, ctypes.byref(flag), 1)
        return config

    def calls(self, x: torch.Tensor, both: bool) -> dict[str, Callable[[], object]]:
        """Calls by name ("delayed", "current", "block 1D", "block 2D") that quantize ``x``, bfloat16, to E4M3."""
        library, device = self._library, x.device
        rows, columns = x.shape
        data = {"row": torch.empty(rows, columns, device=device, dtype=torch.float8_e4m3fn)}
        if both:
            data["col"] = torch.empty(columns, rows, device=device, dtype=torch.float8_e4m3fn)

        def one() -> torch.Tensor:
            return torch.ones(1, device=device)

        def stream() -> int:
            return torch.cuda.current_stream().cuda_stream

        source = self._tensor(_PER_TENSOR, row=x)
        scale, inverse, plain = one(), one(), self._config(pow2=False)
        measured = {"scale": scale, "amax": one(), "row_scale_inv": inverse, "col_scale_inv": inverse}
        delayed = self._tensor(_PER_TENSOR, **data, **measured)
        current = self._tensor(_PER_TENSOR, **data, scale=scale, row_scale_inv=inverse, col_scale_inv=inverse)

        def quantize_current() -> None:
            library.nvte_compute_amax_with_config(source, delayed, plain, stream())
            library.nvte_compute_scale_from_amax(delayed, plain, stream())
            library.nvte_quantize_v2(source, current, plain, stream())

        result: dict[str, Callable[[], object]] = {
            "delayed": lambda: library.nvte_quantize(source, delayed, stream()),
            "current": quantize_current,
        }
        pow2 = self._config(pow2=True)
        for dim, mode in _BLOCKS.items():
            shapes = {"row_scale_inv": _scale_shape(rows, columns, dim)}
            if both:
                shapes["col_scale_inv"] = _scale_shape(columns, rows, dim)
            scales = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
            target = self._tensor(mode, **data, **scales)
            result[f"block {dim}D"] = lambda target=target: library.nvte_quantize_v2(source, target, pow2, stream())
        return result


def _scale_shape(rows: int, contracted: int, dim: int) -> tuple[int, int]:
    blocks = -(-contracted // 128)
    return (blocks, -(-rows // 4) * 4) if dim == 1 else (-(-rows // 128), -(-blocks // 4) * 4)


def find() -> TransformerEngine | None:
    """The library that ``TE_LIB`` names; None where it is not set."""
    path = os.environ.get("TE_LIB")
    return TransformerEngine(path) if path else None

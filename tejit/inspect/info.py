"""``info``: what this machine has, and which formats are native on it."""

from __future__ import annotations

from typing import Any

import torch

from tejit import device as hardware
from tejit.inspect import table

_FORMATS = {
    "FP8, one scale": hardware.fp8_gemm_reason,
    "FP8, blocks of 128": hardware.fp8_block_gemm_reason,
    "MXFP8": hardware.mxfp8_gemm_reason,
    "NVFP4": hardware.nvfp4_gemm_reason,
}


class Info(dict[str, Any]):
    """Facts by name, plain values that JSON can hold; shown as lines, in a notebook as a table."""

    def __repr__(self) -> str:
        from tejit.jit.info import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from tejit.jit.info import as_text

        rows = []
        for name, value in self.items():
            nested = value if isinstance(value, dict) else {"": value}
            rows += [(f"{name} {inner}".strip(), as_text({"": item}).strip(": \n")) for inner, item in nested.items()]
        return table.as_html(("what", "found"), rows)


def info(device: torch.device | str | None = None) -> Info:
    """What ``python -m tejit info`` tells: for each format whether its GEMM is native on ``device``, or why not; what
    is loaded, and what a build here would use or lack.

    Args:
        device: None is torch's default where one was set, else cuda if there is one, else cpu.

    Raises what ``torch.device(device)`` raises.
    """
    from tejit.jit.info import collect

    return Info(**_hardware(device), **collect())


def _hardware(device: torch.device | str | None) -> dict[str, Any]:
    where = hardware.resolve_device(device)
    return {"device": str(where), "gemm": {name: reason(where) or "native" for name, reason in _FORMATS.items()}}


def for_command_line(sources: str | None = None) -> dict[str, Any]:
    """The facts of :func:`info` where the import has loaded nothing: ``python -m tejit`` is to answer on machines on
    which that fails. Never raises.

    Args:
        sources: root of the C++ and CUDA sources; None: the package's own.
    """
    from tejit.jit.info import collect

    try:
        native = _hardware(None)
    except Exception as error:  # a driver that answers with an error is what the report is for
        native = {"device": None, "gemm": {"error": str(error) or type(error).__name__}}
    found = {**native, **collect(sources)}
    if found["loaded"] is None:
        found["loaded"] = "nothing by this command; import tejit takes the parts below"
    return found

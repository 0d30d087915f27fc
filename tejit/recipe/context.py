"""``autocast``: where quantization is switched on, and by which recipe."""

from __future__ import annotations

import threading
from types import TracebackType

import torch

from tejit import compat
from tejit import device as hardware
from tejit.recipe.recipes import Float8CurrentScaling, Recipe
from tejit.recipe.small_blocks import MXFP8BlockScaling


class _State(threading.local):
    """What the innermost ``autocast`` of this thread asked for. Backward never reads it: layers keep what
    their forward used."""

    def __init__(self) -> None:  # once a thread; torch 2.11 reads a class attribute past the thread's own value
        self.recipe: Recipe | None = None
        self.outer: list[Recipe | None] = []  # of the contexts that this thread is in


_state = _State()
#: Made once, outside any graph.
_DEFAULT, _DEFAULT_MXFP8 = Float8CurrentScaling(), MXFP8BlockScaling()


class autocast:
    """Context in which tejit's modules quantize.

    Args:
        enabled: False switches quantization off inside an outer ``autocast``.
        recipe: how to quantize; None means :func:`default_recipe`.

    One instance may be entered again after it was left, and inside itself. Works inside and outside of
    compiled regions; returning to an earlier recipe recompiles nothing. Make recipes outside of them.

    Raises ``TypeError`` where ``recipe`` is no recipe or ``enabled`` no bool.
    """

    def __init__(self, enabled: bool = True, *, recipe: Recipe | None = None) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"enabled is {enabled!r}; it must be True or False (a recipe is given as recipe=...)")
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(
                f"recipe is {recipe!r}; it must be an instance of a recipe, such as tejit.recipe.Float8CurrentScaling()"
            )
        self._recipe = (default_recipe() if recipe is None else recipe) if enabled else None

    def __enter__(self) -> autocast:
        _state.outer.append(_state.recipe)
        _state.recipe = self._recipe
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        _state.recipe = _state.outer.pop()


def current_recipe() -> Recipe | None:
    """The recipe in force in this thread; None outside of ``autocast``."""
    return _state.recipe


def default_recipe() -> Recipe:
    """The recipe that ``autocast()`` takes when none is given, by torch's default device where one was set, else
    cuda if there is one: MXFP8 on compute capability 10.x, FP8 with current scaling everywhere else."""
    return _DEFAULT_MXFP8 if _mxfp8_is_default() else _DEFAULT


@compat.constant_result
def _mxfp8_is_default() -> bool:
    capability = hardware.cuda_capability(hardware.resolve_device(None))
    return capability is not None and capability[0] == _MXFP8_MAJOR


#: Of the compute capability where MXFP8 is the default: data centre Blackwell.
_MXFP8_MAJOR = 10


def is_fp8_available(return_reason: bool = False, device: torch.device | str | None = None) -> bool | tuple[bool, str]:
    """Whether the per-tensor FP8 GEMM is native on ``device``.

    Where it is not, every recipe still runs: the same bytes are dequantized and multiplied.

    Args:
        return_reason: return ``(available, reason)``; the reason is empty where it is available.
        device: None is torch's default where one was set, else cuda if there is one, else cpu.
    """
    reason = hardware.fp8_gemm_reason(hardware.resolve_device(device))
    return (reason is None, reason or "") if return_reason else reason is None


def is_fp8_block_scaling_available(
    return_reason: bool = False, device: torch.device | str | None = None
) -> bool | tuple[bool, str]:
    """Whether the GEMM of FP8 blocks of 128 is native on ``device``; arguments as in :func:`is_fp8_available`."""
    reason = hardware.fp8_block_gemm_reason(hardware.resolve_device(device))
    return (reason is None, reason or "") if return_reason else reason is None


def is_mxfp8_available(
    return_reason: bool = False, device: torch.device | str | None = None
) -> bool | tuple[bool, str]:
    """Whether the MXFP8 GEMM is native on ``device``; arguments as in :func:`is_fp8_available`."""
    reason = hardware.mxfp8_gemm_reason(hardware.resolve_device(device))
    return (reason is None, reason or "") if return_reason else reason is None


def is_nvfp4_available(
    return_reason: bool = False, device: torch.device | str | None = None
) -> bool | tuple[bool, str]:
    """Whether the NVFP4 GEMM is native on ``device``; arguments as in :func:`is_fp8_available`."""
    reason = hardware.nvfp4_gemm_reason(hardware.resolve_device(device))
    return (reason is None, reason or "") if return_reason else reason is None

"""The update of delayed scaling: from the history of amax to the scale, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tejit.format_info import FLT_MAX

ALGORITHMS = ("max", "most_recent")


def update(
    history: Tensor,
    scale: Tensor,
    fp8_max: float | Tensor,
    margin: int = 0,
    algo: str = "max",
    used: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The next history and scales of ``n`` tensors; the arguments are left as they are.

    Row 0 of the history collects the amax of the step that ends; below it the oldest comes first. The new scale is
    ``fp8_max * 2**-margin / amax`` where amax is finite and above 0, else the old one; where that overflows, it is
    the largest float32. amax is the maximum of the whole old history, or its row 0. The history then rolls: row 0
    becomes 0, the collected amax goes to the end, the oldest is dropped. The rule is Transformer Engine's.

    Args:
        history: float32 ``(L, n)``, L >= 1.
        scale: float32 ``(n,)``.
        fp8_max: the largest value of the element type, one for all or float32 ``(n,)``.
        margin: binary orders of magnitude kept free above amax.
        algo: ``"max"`` or ``"most_recent"``.
        used: bool ``(n,)``: tensors that were quantized since the last update. The others are left alone: their
            history does not roll, their scale stays. None means all.

    Returns:
        ``(history, scale)``: new tensors of the shapes of the old ones.

    Raises ``ValueError`` for another ``algo``, and for shapes that do not fit one another.
    """
    if algo not in ALGORITHMS:
        raise ValueError(f"algo is {algo!r}; it must be one of {', '.join(ALGORITHMS)}")
    if history.dim() != 2 or history.shape[0] == 0 or tuple(scale.shape) != tuple(history.shape[1:]):
        raise ValueError(
            f"history has shape {tuple(history.shape)} and scale {tuple(scale.shape)};"
            " (length, n) with a length of at least 1, and (n,) are needed"
        )
    if used is not None and tuple(used.shape) != tuple(scale.shape):
        raise ValueError(f"used has shape {tuple(used.shape)}; one bool a tensor is needed: {tuple(scale.shape)}")
    amax = history.amax(0) if algo == "max" else history[0]
    # In float64 the product and the power are exact and the quotient rounds once to the float32 of IEEE's division
    # of the float32 numerator, which torch's own `number / tensor` does not give.
    # A number becomes a tensor by a fill, which a CUDA graph can capture; a copy from the host it cannot.
    largest = amax.new_full((), fp8_max, dtype=torch.float64) if isinstance(fp8_max, (int, float)) else fp8_max
    fresh = torch.div(largest.to(torch.float64) * 2.0**-margin, amax.to(torch.float64)).to(torch.float32)
    fresh = torch.where(torch.isinf(fresh), torch.full_like(fresh, FLT_MAX), fresh)
    fresh = torch.where(torch.isfinite(amax) & (amax > 0), fresh, scale)
    rolled = torch.cat([torch.zeros_like(history[:1]), history[2:], history[:1]])[: history.shape[0]]
    if used is None:
        return rolled, fresh
    return torch.where(used, rolled, history), torch.where(used, fresh, scale)


def update_in_place(
    histories: list[Tensor],
    scales: list[Tensor],
    previous: list[Tensor],
    fp8_max: float,
    length: int,
    margin: int,
    algo: str,
) -> None:
    """:func:`update` of the states of several modules at once, in place.

    A slot whose row 0 is 0 collected nothing and is left alone: its history does not roll, its scale stays. Row 0 says
    it of every slot alike, in eager code, in graphs and, once amax is reduced over a group, on every process. A tensor
    of nothing but zeros counts as none. Transformer Engine's kernel has the same rule.

    Args:
        histories: float32 ``(>= length, n_i)`` each; the first ``length`` rows are the history.
        scales: float32 ``(n_i,)`` each.
        previous: what receives the old scales, shaped as they are; an empty list where nobody needs them.
        fp8_max, margin, algo: as in :func:`update`.
        length: rows of the history.
    """
    sizes = [scale.shape[0] for scale in scales]
    rows = [history[:length] for history in histories]
    history = torch.cat(rows, 1)
    rolled, fresh = update(history, torch.cat(scales), fp8_max, margin, algo, used=history[0] != 0)
    if previous:
        torch._foreach_copy_(previous, scales)
    torch._foreach_copy_(rows, rolled.split(sizes, 1))
    torch._foreach_copy_(scales, fresh.split(sizes))

"""``LayerNorm`` and ``RMSNorm``: torch's, whose weight may be stored less one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tejit import compat
from tejit.nn import inputs
from tejit.nn.arguments import checked_eps
from tejit.nn.module import checked_dtype
from tejit.nn.naming import Named, checked_name


class LayerNorm(Named, nn.LayerNorm):
    """``torch.nn.LayerNorm``, of which it is a drop-in; its output stays in high precision under ``tejit.autocast``.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as in ``torch.nn.LayerNorm``.
        params_dtype: another name of ``dtype``.
        zero_centered_gamma: ``weight`` holds ``gamma - 1`` and begins at zero, where weight decay pulls it.
        name: what recipes and ``tejit.name_modules`` call the layer.

    Raises ``ValueError`` where ``dtype`` and ``params_dtype`` are both given and differ, or ``eps`` is below zero,
    infinite or NaN.
    """

    zero_centered_gamma = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        name: str | None = None,
    ) -> None:
        # Set before torch's __init__, which calls reset_parameters.
        object.__setattr__(self, "zero_centered_gamma", zero_centered_gamma)
        shape = normalized_shape if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, checked_eps(eps), elementwise_affine, bias, device, checked_dtype(dtype, params_dtype))
        self.name = checked_name(name)

    def reset_parameters(self) -> None:
        """Gamma is one and the bias zero."""
        super().reset_parameters()
        if self.zero_centered_gamma and self.elementwise_affine:
            nn.init.zeros_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """``input`` normalised over its last dimensions, those of ``normalized_shape``."""
        through = not self.zero_centered_gamma
        other = inputs.other_forward(LayerNorm.forward, self, input, quantizes=False, through=through)
        if other is not inputs.PLAIN:
            return other
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, self.zero_centered_gamma)


class RMSNorm(Named, nn.RMSNorm):
    """``torch.nn.RMSNorm``, of which it is a drop-in; its output stays in high precision under ``tejit.autocast``.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as in ``torch.nn.RMSNorm``; ``eps=None``, the
            default, is torch's: the smallest step of float32, of float64 for such an input.
        params_dtype: another name of ``dtype``.
        zero_centered_gamma: ``weight`` holds ``gamma - 1`` and begins at zero, where weight decay pulls it.
        name: what recipes and ``tejit.name_modules`` call the layer.

    Raises ``ValueError`` where ``dtype`` and ``params_dtype`` are both given and differ, or ``eps`` is below zero,
    infinite or NaN.
    """

    zero_centered_gamma = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        name: str | None = None,
    ) -> None:
        object.__setattr__(self, "zero_centered_gamma", zero_centered_gamma)
        shape = normalized_shape if isinstance(normalized_shape, int) else list(normalized_shape)
        eps = None if eps is None else checked_eps(eps)
        super().__init__(shape, eps, elementwise_affine, device, checked_dtype(dtype, params_dtype))
        self.name = checked_name(name)

    def reset_parameters(self) -> None:
        """Gamma is one."""
        super().reset_parameters()
        if self.zero_centered_gamma and self.elementwise_affine:
            nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` normalised over its last dimensions, those of ``normalized_shape``."""
        through = not self.zero_centered_gamma
        other = inputs.other_forward(RMSNorm.forward, self, x, quantizes=False, through=through)
        if other is not inputs.PLAIN:
            return other
        return rms_norm(x, self.normalized_shape, self.weight, self.eps, self.zero_centered_gamma)


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float, zero_centered: bool
) -> Tensor:
    """``F.layer_norm``; where ``zero_centered``, gamma is one more than the weight."""
    if not zero_centered or weight is None:
        return F.layer_norm(x, shape, weight, bias, eps)
    y = F.layer_norm(_operand(x), shape, _widened(weight) + 1, None if bias is None else _widened(bias), eps)
    return _result(y, x)


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None, zero_centered: bool) -> Tensor:
    """``F.rms_norm``; where ``zero_centered``, gamma is one more than the weight."""
    if not zero_centered or weight is None:
        return F.rms_norm(x, shape, weight, eps)
    y = F.rms_norm(_operand(x), shape, _widened(weight) + 1, eps)
    return _result(y, x)


def _operand(x: Tensor) -> Tensor:
    """``x`` in gamma's dtype: on CUDA torch's norms want one."""
    return x if _autocast_decides(x) else _widened(x)


def _result(y: Tensor, x: Tensor) -> Tensor:
    """The norm of :func:`_operand` in the dtype that torch gives the norm of ``x``."""
    return y if y.dtype == x.dtype or _autocast_decides(x) else y.to(x.dtype)


def _autocast_decides(x: Tensor) -> bool:
    """Whether ``torch.autocast`` gives operands and output their dtype; on the CPU it leaves norms alone."""
    return x.device.type != "cpu" and compat.autocast_enabled(x.device.type)


def _widened(tensor: Tensor) -> Tensor:
    """In float32 at least. In two bytes ``1 + weight`` would lose a small weight: in bfloat16 all below 2^-8."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor

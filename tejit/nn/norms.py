"""``LayerNorm`` and ``RMSNorm``: torch's, whose weight may be stored less one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tejit.nn.module import checked_dtype
from tejit.nn.naming import Named, checked_name


class LayerNorm(Named, nn.LayerNorm):
    """``torch.nn.LayerNorm``, of which it is a drop-in; its output stays in high precision under ``tejit.autocast``.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as in ``torch.nn.LayerNorm``.
        params_dtype: another name of ``dtype``.
        zero_centered_gamma: ``weight`` holds ``gamma - 1`` and begins at zero, where weight decay pulls it.
        name: what recipes and ``tejit.name_modules`` call the layer.

    Raises ``ValueError`` where ``dtype`` and ``params_dtype`` are both given and differ.
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
        super().__init__(shape, eps, elementwise_affine, bias, device, checked_dtype(dtype, params_dtype))
        self.name = checked_name(name)

    def reset_parameters(self) -> None:
        """Gamma is one and the bias zero."""
        super().reset_parameters()
        if self.zero_centered_gamma and self.elementwise_affine:
            nn.init.zeros_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """``input`` normalised over its last dimensions, those of ``normalized_shape``."""
        weight = gamma(self.weight, self.zero_centered_gamma)
        return F.layer_norm(input, self.normalized_shape, weight, self.bias, self.eps)


class RMSNorm(Named, nn.RMSNorm):
    """``torch.nn.RMSNorm``, of which it is a drop-in; its output stays in high precision under ``tejit.autocast``.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as in ``torch.nn.RMSNorm``; ``eps=None``, the
            default, is the smallest step of the input's dtype.
        params_dtype: another name of ``dtype``.
        zero_centered_gamma: ``weight`` holds ``gamma - 1`` and begins at zero, where weight decay pulls it.
        name: what recipes and ``tejit.name_modules`` call the layer.

    Raises ``ValueError`` where ``dtype`` and ``params_dtype`` are both given and differ.
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
        super().__init__(shape, eps, elementwise_affine, device, checked_dtype(dtype, params_dtype))
        self.name = checked_name(name)

    def reset_parameters(self) -> None:
        """Gamma is one."""
        super().reset_parameters()
        if self.zero_centered_gamma and self.elementwise_affine:
            nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` normalised over its last dimensions, those of ``normalized_shape``."""
        return F.rms_norm(x, self.normalized_shape, gamma(self.weight, self.zero_centered_gamma), self.eps)


def gamma(weight: Tensor | None, zero_centered: bool) -> Tensor | None:
    """What a norm multiplies by: its weight, or one more."""
    return weight + 1 if zero_centered and weight is not None else weight

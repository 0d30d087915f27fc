"""``GroupedLinear``: several linear layers of one shape, each over its share of the input's rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tejit import refusals
from tejit.nn import init, inputs
from tejit.nn.grouped_function import quantized_grouped_linear
from tejit.nn.module import QuantizedModule, checked_dtype
from tejit.nn.normed_module import reset_linear


class GroupedLinear(QuantizedModule):
    """``y[rows of group i] = x[rows of group i] @ weight_i.T + bias_i``, as for the experts of a mixture.

    The rows of group ``i`` are the ``m_splits[i]`` ones that follow those of the groups before it. Each group is a
    linear layer of its own: its operands are quantized by themselves, so its results are those of a
    :class:`tejit.Linear` that is given its rows. Without ``tejit.autocast`` each group is ``F.linear``. A group
    without rows quantizes nothing, and its weight's gradient is 0. The groups are multiplied one after the other.

    Args:
        num_gemms: number of groups, at least 1.
        in_features, out_features: of every group; any sizes.
        bias: whether each group adds a bias.
        device, dtype: of the parameters; None is torch's default.
        params_dtype: another name of ``dtype``.
        init_method: called with each weight instead of the default initialisation, which is that of ``nn.Linear``.
        return_bias: return ``(y without bias, biases)``, for callers that add them later.
        fuse_wgrad_accumulation, delay_wgrad_compute, save_original_input: as in :class:`tejit.Linear`, for each
            group's weight.
        name: what recipes call the module (``overrides``, ``CustomRecipe``, which is told ``grouped_linear``).

    The parameters are ``weight0``, ``weight1``, ... of shape ``(out_features, in_features)`` and ``bias0``, ``bias1``,
    ... of shape ``(out_features,)`` (None without ``bias``). Weights may be quantized tensors.

    ``torch.compile`` makes a graph for the first splits and one more for other ones, whose sizes are symbolic; then no
    more, but for groups of 0 and of 1 rows, which are cases of their own (torch 2.11 compiles a group of 1 row only
    with ``dynamic=False``).

    Raises:
        ValueError: ``num_gemms`` below 1; ``dtype`` and ``params_dtype`` differ; ``return_bias`` without ``bias``.
        TypeError: ``num_gemms`` is no int or a switch no bool.
    """

    _module_type = "grouped_linear"

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        params_dtype: torch.dtype | None = None,
        init_method: Callable[[Tensor], object] | None = None,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        dtype = checked_dtype(dtype, params_dtype)
        if isinstance(num_gemms, bool) or not isinstance(num_gemms, int):
            raise TypeError(f"num_gemms is {num_gemms!r}; it must be an int")
        if num_gemms < 1:
            raise ValueError(f"num_gemms is {num_gemms}; there must be at least one group")
        if return_bias and not bias:
            raise ValueError("return_bias=True needs bias=True: there would be no bias to return")
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self._weights = tuple([f"weight{i}" for i in range(num_gemms)])
        self.return_bias = return_bias
        self._init_method = init_method
        self._init_quantized(
            name,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            save_original_input=save_original_input,
            delay_wgrad_compute=delay_wgrad_compute,
        )
        for i in range(num_gemms):
            weight = torch.empty((out_features, in_features), device=device, dtype=dtype)
            self.register_parameter(f"weight{i}", nn.Parameter(weight))
            added = nn.Parameter(torch.empty((out_features,), device=device, dtype=dtype)) if bias else None
            self.register_parameter(f"bias{i}", added)
        self.reset_parameters()
        self._products = num_gemms
        self._init_delayed(self.weight0.device)
        called = (self.name, None, self._module_type)
        init.quantize_parameters(self, dict.fromkeys(self._weights, called))

    def reset_parameters(self) -> None:
        """Initialise each group as ``nn.Linear`` does, the weights by ``init_method`` where one was given."""
        with init.in_high_precision(self, *self._weights):
            for i, weight in enumerate(self._weights):
                reset_linear(getattr(self, weight), getattr(self, f"bias{i}"), self._init_method)

    def forward(
        self, x: Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """``(..., in_features)`` to ``(..., out_features)``; with ``return_bias`` also the list of biases.

        Args:
            x: the groups' rows one after the other.
            m_splits: rows of each group; their sum is the product of all dimensions of ``x`` but the last.
            is_first_microbatch: as in :class:`tejit.Linear`; True quantizes the weights of empty groups too, which
                later microbatches may need.

        Raises ``ValueError`` for splits of another number than ``num_gemms``, below 0 or of another sum, and what
        :class:`tejit.Linear` raises.
        """
        other = inputs.other_forward(GroupedLinear.forward, self, x, m_splits, is_first_microbatch)
        if other is not inputs.PLAIN:
            return other
        self._check_splits(x, m_splits)
        splits = tuple(m_splits)
        all_weights = [getattr(self, name) for name in self._weights]
        all_biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)]
        added = [None] * self.num_gemms if self.return_bias else all_biases
        quantizers = self._quantizers()
        flat = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        if quantizers is None:
            parts = flat.split(splits)
            operands = [operand for pair in zip(parts, all_weights, strict=True) for operand in pair]
            self._calibrate(*operands, products=(None,) * self.num_gemms)
            named = zip(all_weights, self._weights, strict=True)
            plain = [self._plain(weight, is_first_microbatch, name) for weight, name in named]
            out = torch.cat([F.linear(*group) for group in zip(parts, plain, added, strict=True)])
        else:
            rooms = {name: (quantizers, weight) for name, weight in zip(self._weights, all_weights, strict=True)}
            self._make_room(is_first_microbatch, rooms)
            found, biases = [], []
            for i, parameter in enumerate(self._weights):
                flat, weight, bias = self._operands(flat, all_weights[i], added[i])
                needs_dgrad = flat.requires_grad
                found.append(
                    self._product(quantizers, weight, needs_dgrad, is_first_microbatch, parameter=parameter, index=i)
                )
                biases.append(bias)
            out = quantized_grouped_linear(flat, splits, found, biases)
        out = out if x.dim() == 2 else out.reshape(*x.shape[:-1], self.out_features)
        return (out, all_biases) if self.return_bias else out

    def _check_splits(self, x: Tensor, m_splits: Sequence[int]) -> None:
        refusals.refuse_layouts(x)
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"the input has shape {tuple(x.shape)}; its last dimension must be in_features = {self.in_features}"
            )
        if not isinstance(m_splits, (list, tuple)):
            raise TypeError(f"m_splits is a {type(m_splits).__name__}; it must be a list of ints (tensor.tolist())")
        if len(m_splits) != self.num_gemms:
            raise ValueError(f"m_splits has {len(m_splits)} entries; it must have num_gemms = {self.num_gemms}")
        for split in m_splits:
            if split < 0:
                raise ValueError(f"m_splits has {split}; a group has 0 rows or more")
        rows = math.prod(x.shape[:-1])
        if sum(m_splits) != rows:
            raise ValueError(f"m_splits adds up to {sum(m_splits)} rows, and the input has {rows}")

    def extra_repr(self) -> str:
        """The constructor's sizes."""
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features},"
            f" bias={self.bias0 is not None}"
        )

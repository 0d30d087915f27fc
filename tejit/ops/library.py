"""Ops of the ``tejit`` library that take a whole quantizer and work on plain inner tensors.

Their fakes are derived from specs, so they serve every format. Autograd stops at inner tensors, which are bytes and
scales; ``fake_quantize`` is differentiable, straight through. ``torch.autocast`` leaves the ops alone: they compute
in the dtype that they are given. Under ``torch.vmap`` each example is quantized by itself, in a loop. None writes
into its arguments: functionalization in torch 2.11 hands such an op another object than the quantizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tejit.dynamo import TensorSpec
from tejit.kernels.library import register_fake
from tejit.ops.schema import QUANTIZER, checked_quantizer
from tejit.ops.transforms import below_autograd, one_by_one
from tejit.tensor import Quantizer

_library = torch.library.Library("tejit", "FRAGMENT")


def define(
    library: torch.library.Library,
    name: str,
    signature: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    differentiable: bool = False,
) -> Any:
    """Define one op and return it. Outputs of an op that is not ``differentiable`` never require grad."""
    library.define(f"{name}{signature}", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, implementation, "CompositeExplicitAutograd")
    register_fake(f"{library.ns}::{name}", fake, library)
    op = getattr(getattr(torch.ops, library.ns), name).default
    if not differentiable:
        library.impl(name, below_autograd(op), "Autograd", with_keyset=True)
    library.impl(name, one_by_one(op), "FuncTorchBatched", with_keyset=True)
    return op


# -- specs: the one description that implementation and fake share ------------------------------------------------
def spec_of(x: Tensor, quantizer: Any) -> TensorSpec:
    """What quantizing ``x`` gives.

    Raises ``TypeError`` for an argument that is no registered quantizer or a dtype that cannot be quantized,
    ``ValueError`` for a quantizer without usage or a shape that the format cannot hold.
    """
    quantizer = checked_quantizer(quantizer)
    spec = TensorSpec(tuple(x.shape), quantizer._check_input(x, None), quantizer, device=x.device)
    spec.create_metadata()
    spec.inner_names()
    return spec


def _spec_over(inner: list[Tensor], shape: tuple[int, ...], quantizer: Any, dtype: torch.dtype) -> TensorSpec:
    """The spec of a storage over ``inner``.

    Raises ``ValueError`` where the inner tensors are not those of such a storage.
    """
    if not inner:
        raise ValueError("no inner tensors were given")
    bare = checked_quantizer(quantizer).replace(internal=True)
    where = inner[0].device
    spec = TensorSpec(tuple(shape), dtype, bare, device=where)
    spec.create_metadata()
    expected = bare.specs_as(spec.shape, where, dtype)
    if len(inner) != len(expected):
        raise ValueError(f"{len(inner)} inner tensors were given; a tensor of this spec has {tuple(expected)}")
    for tensor, (name, (size, kind)) in zip(inner, expected.items(), strict=True):
        if tuple(tensor.shape) != tuple(size) or tensor.dtype != kind:
            raise ValueError(
                f"inner tensor {name} is {tensor.dtype} of shape {tuple(tensor.shape)}; for a tensor of shape"
                f" {spec.shape} it must be {kind} of shape {tuple(size)}"
            )
        if tensor.device != where:
            raise ValueError(f"inner tensor {name} is on {tensor.device} and the first one on {where}; move one")
    return spec


def _inner_of(x: Tensor, quantizer: Quantizer) -> list[Tensor]:
    # Detached: what is below autograd may still say that it requires grad.
    inner = quantizer._owned(quantizer.quantize_inner(x.detach()), x)
    return [tensor for tensor in inner if tensor is not None]


# -- implementations and fakes ------------------------------------------------------------------------------------
def _quantize(x: Tensor, quantizer: Any) -> list[Tensor]:
    spec_of(x, quantizer)
    return _inner_of(x, quantizer)


def _quantize_fake(x: Tensor, quantizer: Any) -> list[Tensor]:
    return spec_of(x, quantizer).create_inner_tensors()


def _quantize_split(x: Tensor, sections: list[int], quantizers: list[Any]) -> list[Tensor]:
    pieces = _split(x, sections, quantizers)
    return [tensor for piece, q in zip(pieces, quantizers, strict=True) for tensor in _quantize(piece, q)]


def _quantize_split_fake(x: Tensor, sections: list[int], quantizers: list[Any]) -> list[Tensor]:
    pieces = _split(x, sections, quantizers)
    return [tensor for piece, q in zip(pieces, quantizers, strict=True) for tensor in _quantize_fake(piece, q)]


def _split(x: Tensor, sections: list[int], quantizers: list[Any]) -> tuple[Tensor, ...]:
    if len(sections) != len(quantizers):
        raise ValueError(f"{len(sections)} sections and {len(quantizers)} quantizers: each section needs its own")
    if not isinstance(x, Tensor):  # the dispatcher lets None through
        raise TypeError(f"cannot quantize a {type(x).__name__}; a torch.Tensor is needed")
    if any(rows < 0 for rows in sections):
        raise ValueError(f"sections {list(sections)} have a negative number of rows")
    if x.dim() == 0 or sum(sections) != x.shape[0]:
        raise ValueError(f"sections {list(sections)} do not add up to the first dimension of shape {tuple(x.shape)}")
    return torch.split(x, sections)


def _dequantize(
    inner: list[Tensor], shape: list[int], quantizer: Any, nominal: torch.dtype, dtype: torch.dtype
) -> Tensor:
    return _spec_over(inner, tuple(shape), quantizer, nominal).assemble(inner).dequantize(dtype)


def _dequantize_fake(
    inner: list[Tensor], shape: list[int], quantizer: Any, nominal: torch.dtype, dtype: torch.dtype
) -> Tensor:
    _spec_over(inner, tuple(shape), quantizer, nominal)
    return torch.empty(tuple(shape), dtype=dtype, device=inner[0].device)


def _fake_quantize(x: Tensor, quantizer: Any) -> Tensor:
    if quantizer is None:
        return x.clone(memory_format=torch.contiguous_format)
    spec = spec_of(x, checked_quantizer(quantizer).replace(internal=True))
    return spec.assemble(_inner_of(x, quantizer)).dequantize()


def _fake_quantize_fake(x: Tensor, quantizer: Any) -> Tensor:
    if quantizer is not None:
        spec_of(x, quantizer)
    return torch.empty(tuple(x.shape), dtype=x.dtype, device=x.device)


def _straight_through(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad, None


quantize_op = define(_library, "quantize", f"(Tensor x, {QUANTIZER} q) -> Tensor[]", _quantize, _quantize_fake)
quantize_split_op = define(
    _library,
    "quantize_split",
    f"(Tensor x, SymInt[] sections, {QUANTIZER}[] quantizers) -> Tensor[]",
    _quantize_split,
    _quantize_split_fake,
)
dequantize_op = define(
    _library,
    "dequantize",
    f"(Tensor[] inner, SymInt[] shape, {QUANTIZER} q, ScalarType nominal, ScalarType dtype) -> Tensor",
    _dequantize,
    _dequantize_fake,
)
fake_quantize_op = define(
    _library,
    "fake_quantize",
    f"(Tensor x, {QUANTIZER}? q) -> Tensor",
    _fake_quantize,
    _fake_quantize_fake,
    differentiable=True,
)
torch.library.register_autograd("tejit::fake_quantize", _straight_through, lib=_library)

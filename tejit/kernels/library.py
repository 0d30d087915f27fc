"""The ``tejit`` op library: schema, fake and pure-torch reference of every op.

The compiled host part only adds CPU and CUDA implementations, so each op exists and computes on every
machine. All fakes are registered from this one file: torch walks ``sys.modules`` once per file that does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from tejit import compat
from tejit.kernels import backend
from tejit.kernels.activation import fake as activation_fake
from tejit.kernels.activation import reference as activation_reference
from tejit.kernels.fp8 import delayed as fp8_delayed
from tejit.kernels.fp8 import fake as fp8_fake
from tejit.kernels.fp8 import reference as fp8_reference
from tejit.kernels.fp8_block import fake as fp8_block_fake
from tejit.kernels.fp8_block import reference as fp8_block_reference
from tejit.kernels.mxfp8 import fake as mxfp8_fake
from tejit.kernels.mxfp8 import reference as mxfp8_reference
from tejit.kernels.norm import fake as norm_fake
from tejit.kernels.norm import reference as norm_reference
from tejit.kernels.nvfp4 import fake as nvfp4_fake
from tejit.kernels.nvfp4 import reference as nvfp4_reference

_library = torch.library.Library("tejit", "DEF")

# For each fake torch asks inspect which module this file is, and inspect walks all modules for the answer, which takes
# longer than defining every op. It looks here first.
getattr(inspect, "modulesbyfile", {}).setdefault(__file__, __name__)


def _define(
    name: str, signature: str, reference: Callable[..., Any], fake: Callable[..., Any], *, native: bool = True
) -> None:
    """Define one op. ``native`` ops get the overload ``reference`` too, which their CUDA kernels call where
    no architecture part serves the device."""
    implementation = backend.guarded(reference, lambda: getattr(torch.ops.tejit, name).default)
    for overload in ("", ".reference") if native else ("",):
        compat.define_op(_library, f"{name}{overload}{signature}")
        _library.impl(f"{name}{overload}", implementation, "CompositeExplicitAutograd")
    register_fake(f"tejit::{name}", _without_data(f"tejit::{name}", fake), _library)


def register_fake(qualname: str, fake: Callable[..., Any], library: torch.library.Library) -> None:
    """``torch.library.register_fake``, from this file for all of the package."""
    torch.library.register_fake(qualname, fake, lib=library)


def _without_data(qualname: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """A fake that refuses tensors with data. One argument on meta is enough for torch to run the fake, which would
    leave uninitialised memory as the result of the others."""

    def checked(*arguments: Any, **named: Any) -> Any:
        real = next((tensor for tensor in _tensors((*arguments, *named.values())) if _has_data(tensor)), None)
        if real is not None:
            raise RuntimeError(
                f"{qualname} was given a tensor on {real.device} and one on meta, which has no data; move one of"
                " them with .to(device)"
            )
        return fake(*arguments, **named)

    return checked


def _tensors(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


def _has_data(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type != "meta"


_define("fp8_amax", "(Tensor x) -> Tensor", fp8_reference.amax, fp8_fake.amax)
_define(
    "fp8_scale",
    "(Tensor amax, int fp8, bool pow2, float eps) -> (Tensor scale, Tensor scale_inv)",
    fp8_reference.scale,
    fp8_fake.scale,
)
_define(
    "fp8_quantize_current",
    "(Tensor x, int fp8, bool data, bool transpose, bool pow2, float eps, Tensor? amax)"
    " -> (Tensor data, Tensor transpose, Tensor scale_inv)",
    fp8_reference.quantize_current,
    fp8_fake.quantize_current,
)
_define(
    "fp8_quantize_current_out",
    "(Tensor x, int fp8, bool pow2, float eps, Tensor? amax, Tensor? noop,"
    " Tensor(a!)? data, Tensor(b!)? transpose, Tensor(c!) scale_inv) -> ()",
    fp8_reference.quantize_current_out,
    fp8_fake.quantize_current_out,
)
_define(
    "fp8_quantize_delayed",
    "(Tensor x, int fp8, bool data, bool transpose, Tensor scale, Tensor(a!) amax)"
    " -> (Tensor data, Tensor transpose, Tensor scale_inv)",
    fp8_reference.quantize_delayed,
    fp8_fake.quantize_delayed,
)
_define(
    "fp8_quantize_delayed_out",
    "(Tensor x, int fp8, Tensor scale, Tensor(a!) amax, Tensor? noop,"
    " Tensor(b!)? data, Tensor(c!)? transpose, Tensor(d!) scale_inv) -> ()",
    fp8_reference.quantize_delayed_out,
    fp8_fake.quantize_delayed_out,
)
_define(
    "fp8_delayed_update_",
    "(Tensor(a!)[] histories, Tensor(b!)[] scales, Tensor(c!)[] previous, float fp8_max, int length, int margin,"
    " str algo) -> ()",
    fp8_delayed.update_in_place,
    fp8_fake.delayed_update_,
    native=False,
)
_define(
    "fp8_make_empty",
    "(int[] shape, bool data, bool transpose, Device device, bool pin_memory)"
    " -> (Tensor data, Tensor transpose, Tensor scale_inv)",
    fp8_reference.make_empty,
    fp8_fake.make_empty,
    native=False,
)
_define(
    "fp8_block_quantize",
    "(Tensor x, int fp8, int dim, bool rowwise, bool columnwise, bool pow2, float eps)"
    " -> (Tensor row, Tensor row_scale_inv, Tensor col, Tensor col_scale_inv)",
    fp8_block_reference.quantize,
    fp8_block_fake.quantize,
)
_define(
    "fp8_block_quantize_out",
    "(Tensor x, int fp8, int dim, bool pow2, float eps, Tensor? noop, Tensor(a!)? row,"
    " Tensor(b!)? row_scale_inv, Tensor(c!)? col, Tensor(d!)? col_scale_inv) -> ()",
    fp8_block_reference.quantize_out,
    fp8_block_fake.quantize_out,
)
_define(
    "fp8_block_make_empty",
    "(int[] shape, int dim, bool rowwise, bool columnwise, Device device, bool pin_memory)"
    " -> (Tensor row, Tensor row_scale_inv, Tensor col, Tensor col_scale_inv)",
    fp8_block_reference.make_empty,
    fp8_block_fake.make_empty,
    native=False,
)
_define(
    "nvfp4_quantize",
    "(Tensor x, bool rowwise, bool columnwise, bool rht, int sign_mask, bool square, bool row_scaled,"
    " int four_over_six, int e4m3_max, bool swizzled, Tensor? seed, Tensor? row_amax, Tensor? col_amax)"
    " -> (Tensor row, Tensor row_scale_inv, Tensor col, Tensor col_scale_inv, Tensor amax_row, Tensor amax_col)",
    nvfp4_reference.quantize,
    nvfp4_fake.quantize,
)
_define(
    "nvfp4_quantize_out",
    "(Tensor x, bool rht, int sign_mask, bool square, bool row_scaled, int four_over_six, int e4m3_max,"
    " bool swizzled, Tensor? seed, Tensor? row_amax, Tensor? col_amax, Tensor? noop, Tensor(a!)? row,"
    " Tensor(b!)? row_scale_inv, Tensor(c!)? col, Tensor(d!)? col_scale_inv, Tensor(e!)? amax_row,"
    " Tensor(f!)? amax_col) -> ()",
    nvfp4_reference.quantize_out,
    nvfp4_fake.quantize_out,
)
_define(
    "nvfp4_amax",
    "(Tensor x, bool rowwise, bool columnwise, bool rht, int sign_mask, bool row_scaled)"
    " -> (Tensor amax_row, Tensor amax_col)",
    nvfp4_reference.amax,
    nvfp4_fake.amax,
)
_define(
    "nvfp4_make_empty",
    "(int[] shape, bool rowwise, bool columnwise, bool row_scaled, Device device, bool pin_memory)"
    " -> (Tensor row, Tensor row_scale_inv, Tensor col, Tensor col_scale_inv, Tensor amax_row, Tensor amax_col)",
    nvfp4_reference.make_empty,
    nvfp4_fake.make_empty,
    native=False,
)
_define(
    "mxfp8_quantize",
    "(Tensor x, int fp8, bool rowwise, bool columnwise, bool square, bool swizzled)"
    " -> (Tensor row, Tensor row_scale_inv, Tensor col, Tensor col_scale_inv)",
    mxfp8_reference.quantize,
    mxfp8_fake.quantize,
)
_define(
    "mxfp8_quantize_out",
    "(Tensor x, int fp8, bool square, bool swizzled, Tensor? noop, Tensor(a!)? row, Tensor(b!)? row_scale_inv,"
    " Tensor(c!)? col, Tensor(d!)? col_scale_inv) -> ()",
    mxfp8_reference.quantize_out,
    mxfp8_fake.quantize_out,
)
_define(
    "mxfp8_make_empty",
    "(int[] shape, bool rowwise, bool columnwise, Device device, bool pin_memory)"
    " -> (Tensor row, Tensor row_scale_inv, Tensor col, Tensor col_scale_inv)",
    mxfp8_reference.make_empty,
    mxfp8_fake.make_empty,
    native=False,
)

#: The arguments of a ``fused.Cast``, with which every op ends that quantizes what it computes.
_CAST = "int format, int fp8, bool rowwise, bool columnwise, bool flag, float floor, Tensor? scale, Tensor(a!)? amax"

_define(
    "norm",
    "(Tensor x, Tensor? weight, Tensor? bias, float eps, bool rms, bool zero_centered)"
    " -> (Tensor y, Tensor mean, Tensor rstd)",
    norm_reference.norm,
    norm_fake.norm,
)
_define(
    "norm_quantize",
    f"(Tensor x, Tensor? weight, Tensor? bias, float eps, bool rms, bool zero_centered, int multiple, {_CAST})"
    " -> (Tensor row, Tensor row_scale_inv, Tensor col, Tensor col_scale_inv, Tensor mean, Tensor rstd)",
    norm_reference.norm_quantize,
    norm_fake.norm_quantize,
)
_define(
    "activation",
    "(Tensor x, int kind, bool gated) -> Tensor",
    activation_reference.activation,
    activation_fake.activation,
)
_define(
    "activation_quantize",
    f"(Tensor x, int kind, bool gated, int multiple, {_CAST})"
    " -> (Tensor row, Tensor row_scale_inv, Tensor col, Tensor col_scale_inv)",
    activation_reference.activation_quantize,
    activation_fake.activation_quantize,
)

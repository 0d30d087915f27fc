"""``register_quantized_op``: a user's own op with quantized results, its fake derived from specs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tejit.device import resolve_device
from tejit.dynamo import TensorSpec
from tejit.ops import library
from tejit.ops.schema import checked_quantizer
from tejit.tensor import QuantizedTensorStorage

#: What was registered, by name: torch takes an op away with its library.
_libraries: dict[str, torch.library.Library] = {}

Specs = Callable[..., TensorSpec | tuple[TensorSpec, ...]]


def register_quantized_op(
    name: str,
    arguments: str,
    implementation: Callable[..., Any],
    specs: Specs,
    *,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Define a custom op whose results are quantized (or plain) tensors.

    The op returns inner tensors; its fake follows from ``specs``, so it traces under ``torch.compile``,
    ``torch.export`` and ``FakeTensorMode`` with every quantizer. Registering a name again replaces the op.

    Args:
        name: ``"library::op"``.
        arguments: the arguments as in a torch schema, without defaults:
            ``"(Tensor x, Tensor? weight, float eps, tejit.Quantizer q)"``; ``tejit.Quantizer?`` and
            ``tejit.Quantizer[]`` may stand there too.
        implementation: computes the results, one for each spec: a tensor for a plain spec, and for a quantized
            one a quantized tensor, a storage, or the inner tensors. It is not traced and must not change its
            arguments nor return them.
        specs: the :class:`tejit.dynamo.TensorSpec` of the result, or a tuple of several, from the same
            arguments; traceable, and it looks at shapes, dtypes and devices only.
        setup_context: ``(ctx, inputs, results)``, saves what ``backward`` needs, as in ``torch.autograd.Function``.
        backward: ``(ctx, *grads)`` to a gradient (or None) for each argument. Without it a call whose tensors require
            grad, in grad mode, is a ``RuntimeError``. Bare storages, which ``internal`` quantizers make, carry
            no gradient.

    Returns:
        A function of the arguments that gives a quantized tensor, storage or plain tensor for each spec; its
        attribute ``op`` is the op below.

    Raises:
        ValueError: ``name`` has no library, or an argument has a default, is keyword-only or is written to.
    """
    namespace, _, short = name.partition("::")
    if not (namespace and short):
        raise ValueError(f"the op's name is {name!r}; it must be 'library::op'")

    def described(values: tuple[Any, ...]) -> tuple[TensorSpec, ...]:
        found = specs(*values)
        return (found,) if isinstance(found, TensorSpec) else tuple(found)

    def run(*values: Any) -> list[Tensor]:
        wanted = specs(*values)
        results = implementation(*values)
        if isinstance(wanted, TensorSpec):
            wanted, results = (wanted,), (results,)
        return _flattened(name, wanted, results)

    def fake(*values: Any) -> list[Tensor]:
        for spec in (wanted := described(values)):
            if spec.quantizer is not None:
                checked_quantizer(spec.quantizer)
                spec.create_metadata()
        return [tensor for spec in wanted for tensor in spec.create_inner_tensors()]

    if name in _libraries:
        _libraries.pop(name)._destroy()
    target = torch.library.Library(namespace, "FRAGMENT")
    names = _names(torch._C.parse_schema(f"{name}{arguments} -> Tensor[]"))
    op = library.define(target, short, f"{arguments} -> Tensor[]", run, fake)
    _libraries[name] = target

    def results_of(values: tuple[Any, ...]) -> tuple[Any, ...]:
        flat, results, start = op(*values), [], 0
        for spec in described(values):
            end = start + len(spec.inner_names())
            results.append(spec.assemble(flat[start:end]))
            start = end
        return tuple(results)

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *values: Any) -> Any:
            results = results_of(values)
            if setup_context is not None:
                setup_context(ctx, values, results[0] if len(results) == 1 else results)
            return results[0] if len(results) == 1 else results

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            assert backward is not None
            return backward(ctx, *grads)

    def call(*args: Any, **kwargs: Any) -> Any:
        values = _bound(name, names, args, kwargs)
        if _needs_grad(values) and not _all_bare(described(values)):
            if backward is None:
                raise RuntimeError(
                    f"{name} has no derivative and a tensor that it was given requires grad; register it with"
                    " backward=..., or call it under torch.no_grad()"
                )
            return Differentiable.apply(*values)
        results = results_of(values)
        return results[0] if len(results) == 1 else results

    call.__name__ = call.__qualname__ = short
    call.__doc__ = implementation.__doc__
    call.op = op  # type: ignore[attr-defined]
    return call


def _names(schema: Any) -> tuple[str, ...]:
    for argument in schema.arguments:
        if argument.has_default_value() or argument.kwarg_only or argument.alias_info is not None:
            raise ValueError(
                f"{schema.name}: argument {argument.name} has a default, is keyword-only or is written to;"
                " a quantized op takes plain positional arguments. Write a function around the op that has defaults."
            )
    return tuple([argument.name for argument in schema.arguments])


def _bound(name: str, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    values = list(args)
    for argument in names[len(args) :]:
        if argument not in kwargs:
            raise TypeError(f"{name} needs its argument {argument!r}")
        values.append(kwargs[argument])
    if len(args) + len(kwargs) != len(names):
        raise TypeError(f"{name} takes the arguments {', '.join(names)}; got {len(args)} and {', '.join(kwargs)}")
    return tuple(values)


def _needs_grad(values: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in values)


def _all_bare(specs: tuple[TensorSpec, ...]) -> bool:
    return all(spec.quantizer is not None and spec.quantizer.internal for spec in specs)


def _flattened(name: str, specs: tuple[TensorSpec, ...], results: Any) -> list[Tensor]:
    """The inner tensors of all results.

    Raises ``RuntimeError`` where a result is not what its spec says: compiled code would believe the spec.
    """
    if len(results) != len(specs):
        raise RuntimeError(f"{name} computed {len(results)} results; its specs describe {len(specs)}")
    flat: list[Tensor] = []
    for index, (spec, result) in enumerate(zip(specs, results, strict=True)):
        flat.extend(_checked_inner(f"result {index} of {name}", spec, result))
    return flat


def _checked_inner(what: str, spec: TensorSpec, result: Any) -> list[Tensor]:
    expected = _expected(spec)
    if isinstance(result, QuantizedTensorStorage):
        if spec.quantizer is not None and result._quantizer != spec.quantizer:
            raise RuntimeError(f"{what} was made by {result._quantizer!r}; its spec says {spec.quantizer!r}")
        inner = [tensor for tensor in result._inner() if tensor is not None]
    elif isinstance(result, Tensor):
        inner = [result]
    else:
        inner = [tensor for tensor in result if tensor is not None]
    got = [(tuple(tensor.shape), tensor.dtype) for tensor in inner]
    if got != list(expected.values()):
        raise RuntimeError(f"{what} has inner tensors {got}; its spec says {expected}")
    return [tensor.detach() for tensor in inner]


def _expected(spec: TensorSpec) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    if spec.quantizer is None:
        return {"data": (tuple(spec.shape), spec.dtype)}
    quantizer = checked_quantizer(spec.quantizer)
    specs = quantizer.specs_as(tuple(spec.shape), resolve_device(spec.device), spec.dtype)
    return {name: (tuple(size), dtype) for name, (size, dtype) in specs.items()}

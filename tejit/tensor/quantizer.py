"""``Quantizer``: how a tensor is quantized, as an immutable object."""

from __future__ import annotations

import math
from typing import Any, ClassVar, NoReturn, TypeVar, get_origin

import torch
from torch import Tensor

from tejit import compat, refusals
from tejit import device as hardware
from tejit.format_info import FLT_MAX, HIGH_PRECISION_DTYPES
from tejit.kernels.fused import Cast, Four
from tejit.kernels.gemm import Operand

Self = TypeVar("Self", bound="Quantizer")
Inner = tuple[Tensor | None, ...]
Storage = Any  # a storage or quantized tensor; their room stands on this one, so its name cannot be imported here


class Quantizer(metaclass=compat.ValueMeta):
    """Base of all quantizers.

    Quantizers never change: :meth:`with_usage` and :meth:`replace` return another one. Where a class was
    registered with ``tejit.dynamo.register_value_opaque_quantizer`` its instances are values: equal when
    their class and fields are equal, and constants to ``torch.compile``.

    Attributes:
        rowwise_usage: whether data scaled along the last dimension (K) is produced.
        columnwise_usage: whether data scaled along the leading dimensions (M) is produced, the operand of
            the transposed GEMM.
        internal: produce a bare storage (no ``torch.Tensor``, no autograd) instead of a tensor.
        optimize_for_gemm: lay scales out as the GEMM reads them, where the format has such a layout.
    """

    rowwise_usage: bool
    columnwise_usage: bool
    internal: bool
    optimize_for_gemm: bool

    #: Names of the fields: the annotated attributes of the class and its bases, in order.
    _fields: tuple[str, ...] = ()

    #: Whether its tensors cannot say what they hold without it.
    _tensors_need_it = False

    # Filled by registration (floor 4): the names that make up the value; None means identity semantics.
    _value_fields: tuple[str, ...] | None = None

    def __init__(
        self,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        internal: bool = False,
        optimize_for_gemm: bool = False,
    ) -> None:
        self._init_flags(
            rowwise_usage=rowwise,
            columnwise_usage=columnwise,
            internal=internal,
            optimize_for_gemm=optimize_for_gemm,
        )

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls._fields = _field_names(cls)

    def _init_fields(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _init_flags(self, **flags: bool) -> None:
        """Set fields that are True or False.

        Raises ``TypeError`` for anything else: 1 and True would be two values, and "no" is true.
        """
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise TypeError(f"{name} is {value!r}; it must be True or False")
        self._init_fields(**flags)

    # -- immutability -------------------------------------------------------------------------------------
    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"{type(self).__name__} is immutable (cannot set {name!r} to {value!r}): a compiled graph would"
            " go on with the old value. Use quantizer.with_usage(rowwise=..., columnwise=...) or"
            " quantizer.replace(...), which return a new quantizer."
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable (cannot delete {name!r})")

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> NoReturn:
        """Not available: raises ``AttributeError`` that names :meth:`with_usage`."""
        raise AttributeError(
            f"{type(self).__name__} is immutable: set_usage(rowwise={rowwise}, columnwise={columnwise}) cannot"
            " change it. Use quantizer.with_usage(rowwise=..., columnwise=...), which returns a new quantizer."
        )

    def with_usage(self: Self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> Self:
        """The same quantizer for other directions; None keeps a direction as it is."""
        return self.replace(
            rowwise_usage=self.rowwise_usage if rowwise is None else rowwise,
            columnwise_usage=self.columnwise_usage if columnwise is None else columnwise,
        )

    def replace(self: Self, **fields: Any) -> Self:
        """A copy with some fields changed, by the fields' names (``rowwise_usage=...``, ``internal=...``).

        Raises ``TypeError`` for a name that is no field; a value that the constructor refuses is refused
        here in the same way.
        """
        arguments = self._constructor_arguments()
        for name, value in fields.items():
            if name not in arguments:
                raise TypeError(f"{type(self).__name__} has no field {name!r}; its fields are {', '.join(arguments)}")
            arguments[name] = value
        return self._from_fields(arguments)

    def _constructor_arguments(self) -> dict[str, Any]:
        """``{field: value}`` of every field; the constructor takes each under its name (the usages without
        ``_usage``)."""
        return {name: getattr(self, name) for name in self._fields}

    def _from_fields(self: Self, fields: dict[str, Any]) -> Self:
        """A new quantizer of this class from ``{field: value}``."""
        renamed = {"rowwise_usage": "rowwise", "columnwise_usage": "columnwise"}
        return type(self)(**{renamed.get(name, name): value for name, value in fields.items()})

    def get_usages(self) -> dict[str, bool]:
        """``{"rowwise": bool, "columnwise": bool}``."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    # -- identity -----------------------------------------------------------------------------------------
    def __copy__(self: Self) -> Self:
        return self

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        return self

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self._constructor_arguments().items())
        return f"{type(self).__name__}({fields})"

    # -- what a format defines ----------------------------------------------------------------------------
    def inner_tensor_specs(
        self, shape: tuple[int, ...], device: torch.device | str | None = None
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """``{attribute: (shape, dtype)}`` of the buffers of a tensor of ``shape`` on ``device``, in storage order."""
        raise NotImplementedError(f"{type(self).__name__} does not define inner_tensor_specs")

    def storage_metadata(self, fake_dtype: torch.dtype) -> dict[str, Any]:
        """``{"cls": class to construct, "nontensor_kwargs": its other keywords}`` for nominal dtype ``fake_dtype``."""
        raise NotImplementedError(f"{type(self).__name__} does not define storage_metadata")

    def quantize_inner(self, x: Tensor, amax_reduction_group: Any = None) -> Inner:
        """The buffers of quantized ``x`` as plain tensors, in the storage's order, None for an absent one."""
        raise NotImplementedError(f"{type(self).__name__} does not define quantize_inner")

    def fused_cast(self, x: Tensor) -> Cast | None:
        """How an op that computes a tensor from ``x`` is to quantize it in the same kernel: with the bytes of
        :meth:`quantize_inner`. None where no such op knows the format, and for a class of its own: who overrides
        :meth:`quantize_inner` overrides this too. Traceable."""
        return None

    def fused_inner(self, four: Four) -> Inner:
        """What :meth:`quantize_inner` returns, out of the buffers of an op that was given :meth:`fused_cast`."""
        raise NotImplementedError(f"{type(self).__name__} does not define fused_inner")

    def _check_target(self, dst: Storage) -> None:
        """Raises where :meth:`_quantize_into` cannot write what this quantizer makes into ``dst``."""

    def _quantize_into(self, x: Tensor, dst: Storage, noop_flag: Tensor | None, amax_reduction_group: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} does not define _quantize_into")

    def _allocate(self, shape: tuple[int, ...], device: torch.device, pin_memory: bool) -> Inner:
        raise NotImplementedError(f"{type(self).__name__} does not define _allocate")

    def rowwise_operand(self, inner: Inner) -> Operand:
        """The ``(M, K)`` GEMM operand in buffers made by :meth:`quantize_inner` with rowwise usage."""
        raise NotImplementedError(f"{type(self).__name__} does not define rowwise_operand")

    def columnwise_operand(self, inner: Inner) -> Operand:
        """The ``(K, M)`` GEMM operand in buffers made by :meth:`quantize_inner` with columnwise usage."""
        raise NotImplementedError(f"{type(self).__name__} does not define columnwise_operand")

    def columnwise_inner(self, inner: Inner) -> Inner:
        """``inner`` less what :meth:`columnwise_operand` does not read: what a layer keeps for its backward."""
        raise NotImplementedError(f"{type(self).__name__} does not define columnwise_inner")

    def columnwise_from_rowwise(self, inner: Inner) -> Inner | None:
        """Columnwise buffers of the same values, made from rowwise ones; None where the format cannot. Traceable."""
        return None

    def usages_of(self, storage: Any) -> tuple[bool, bool]:
        """``(rowwise, columnwise)``: what the buffers of a storage or tensor can serve; traceable."""
        raise NotImplementedError(f"{type(self).__name__} does not define usages_of")

    # -- what the nominal dtype decides, where a format keeps it ---------------------------------------------
    def specs_as(
        self, shape: tuple[int, ...], device: torch.device, nominal: torch.dtype
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """:meth:`inner_tensor_specs` of a tensor whose nominal dtype is known."""
        return self.inner_tensor_specs(shape, device)

    def _allocate_as(
        self, shape: tuple[int, ...], device: torch.device, pin_memory: bool, nominal: torch.dtype
    ) -> Inner:
        return self._allocate(shape, device, pin_memory)

    def _owned(self, inner: Inner, x: Tensor) -> Inner:
        """``inner``, made by :meth:`quantize_inner` from ``x``, as buffers that share no memory with ``x``."""
        return inner

    def alignment(self) -> int:
        """The multiple of which every dimension must be that is scaled along: K rowwise, M columnwise. Traceable."""
        return 1

    def needs_rowwise(self) -> bool:
        """Whether the format cannot be made without rowwise usage."""
        return False

    def is_quantizable(self, x: Tensor) -> bool:
        """Whether ``x`` can be quantized as it is: dtype and, where the format has one, alignment."""
        if x.dtype not in HIGH_PRECISION_DTYPES:
            return False
        multiple = self.alignment()
        columns = x.shape[-1] if x.dim() else 1
        rows = math.prod(x.shape[:-1])
        return not ((self.rowwise_usage and columns % multiple) or (self.columnwise_usage and rows % multiple))

    # -- quantizing ---------------------------------------------------------------------------------------
    def quantize(
        self,
        x: Tensor,
        *,
        out: Storage | None = None,
        dtype: torch.dtype | None = None,
        noop_flag: Tensor | None = None,
        amax_reduction_group: Any = None,
    ) -> Any:
        """Quantize ``x``.

        Args:
            x: float32, bfloat16 or float16, any shape and strides.
            out: a storage or tensor to write into; it is returned.
            dtype: nominal dtype of the result; default ``x.dtype``.
            noop_flag: float32, one element; equal to 1.0 it makes the call leave ``out`` untouched. Needs ``out``.
            amax_reduction_group: process group over which amax is reduced (MAX) first, for formats that have
                an amax of the whole tensor.

        Returns:
            A quantized tensor, differentiable straight through; a bare storage where the quantizer is ``internal``.

        Raises:
            TypeError: ``x`` or ``dtype`` has another dtype, ``x`` is sparse or no tensor.
            ValueError: ``noop_flag`` without ``out``, or no direction is wanted.
            RuntimeError: ``out`` or ``x`` requires grad in grad mode; like torch's, ``out=`` has no derivative.
        """
        if out is not None:
            self.update_quantized(x, out, noop_flag=noop_flag, amax_reduction_group=amax_reduction_group)
            return out
        if noop_flag is not None:
            raise ValueError(
                "noop_flag was given without out: a skipped call would have nothing to return."
                " Pass out=, or use update_quantized(src, dst, noop_flag=...)."
            )
        nominal = self._check_input(x, dtype)
        if self.internal or not (torch.is_grad_enabled() and x.requires_grad):
            return self._build(self.quantize_inner(x.detach(), amax_reduction_group), x, nominal)
        return _Quantize.apply(x, self, nominal, amax_reduction_group)

    def __call__(self, x: Tensor, **arguments: Any) -> Any:
        """The same as :meth:`quantize`."""
        return self.quantize(x, **arguments)

    def update_quantized(
        self,
        src: Tensor,
        dst: Storage,
        *,
        noop_flag: Tensor | None = None,
        amax_reduction_group: Any = None,
    ) -> Storage:
        """Quantize ``src`` into ``dst`` (a storage or tensor of this format and shape), in place; returns ``dst``.

        ``dst`` keeps its nominal dtype and gets what this quantizer produces for the buffers it has.

        Raises:
            TypeError: ``dst`` is of another format, ``src`` of another dtype or no tensor, ``noop_flag`` no tensor.
            ValueError: the shapes differ, or ``noop_flag`` is not one float32 element on ``dst``'s device.
            RuntimeError: ``dst`` is a tensor and it or ``src`` requires grad in grad mode (``dst.copy_(src)`` is
                differentiable; ``torch.no_grad()`` says that no derivative is wanted).
        """
        self._check_input(src, None)
        if isinstance(dst, Tensor):
            if torch.is_grad_enabled() and (dst.requires_grad or src.requires_grad):
                which = "target" if dst.requires_grad else "input"
                raise RuntimeError(
                    f"quantizing into a tensor has no derivative, and the {which} requires grad;"
                    " use torch.no_grad(), or target.copy_(input), which has one"
                )
            if torch.compiler.is_compiling():
                return self._write_in_graph(src.detach(), dst, noop_flag, amax_reduction_group)
            torch.autograd.graph.increment_version(dst)
        self._write(src.detach(), dst, noop_flag, amax_reduction_group)
        return dst

    def _write_in_graph(self, src: Tensor, dst: Any, noop_flag: Tensor | None, amax_reduction_group: Any) -> Any:
        """Write by ``copy_``: a graph holds a tensor and its buffers apart, and what went into the buffers alone would
        not be seen by what the same graph does with the tensor."""
        if noop_flag is not None or not isinstance(dst, self.storage_metadata(dst.dtype)["cls"]):
            self._write(src, dst, noop_flag, amax_reduction_group)  # says what does not fit
            return dst
        rowwise, columnwise = self.usages_of(dst)
        maker = self
        if (self.rowwise_usage, self.columnwise_usage, self.internal) != (rowwise, columnwise, False):
            maker = self.replace(rowwise_usage=rowwise, columnwise_usage=columnwise, internal=False)
        with torch.no_grad():
            self._check_target(dst)
            dst.copy_(maker._build(maker.quantize_inner(src.to(dst.device), amax_reduction_group), dst, dst.dtype))
        return dst

    def _write(
        self,
        src: Tensor,
        dst: Storage,
        noop_flag: Tensor | None = None,
        amax_reduction_group: Any = None,
    ) -> None:
        self._check_input(src, None)
        if not isinstance(dst, Tensor) and not hasattr(dst, "_INNER_TENSORS"):
            raise TypeError(
                f"{type(self).__name__} cannot write into a {type(dst).__name__}; give it a quantized tensor or storage"
            )
        if tuple(src.shape) != tuple(dst.shape):
            raise ValueError(
                f"cannot quantize a tensor of shape {tuple(src.shape)} into one of shape {tuple(dst.shape)}"
            )
        if noop_flag is not None and not isinstance(noop_flag, Tensor):
            raise TypeError(f"noop_flag is {noop_flag!r}; it must be a float32 tensor with one element")
        if noop_flag is not None and (
            noop_flag.dtype != torch.float32 or noop_flag.numel() != 1 or noop_flag.device != dst.device
        ):
            raise ValueError(
                f"noop_flag is {noop_flag.dtype} of shape {tuple(noop_flag.shape)} on {noop_flag.device};"
                f" it must be float32 with one element on {dst.device}"
            )
        with torch.no_grad():
            self._quantize_into(src.to(dst.device), dst, noop_flag, amax_reduction_group)

    def _check_input(self, x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
        if not isinstance(x, Tensor):
            way = ""
            if compat.is_proxy(x):
                way = ": tejit.ops.quantize and tejit.ops.fake_quantize take what torch.fx traces, or use torch.compile"
            raise TypeError(f"cannot quantize a {type(x).__name__}; a torch.Tensor is needed{way}")
        refusals.refuse_to_quantize(x)
        if not torch.compiler.is_compiling():
            compat.refuse_tangents(x)
            if compat.is_batched(x):
                refusals.refuse_batch(self)
        refusals.refuse_jit_tracing("how a tensor is quantized")
        nominal = x.dtype if dtype is None else dtype
        for name, value in (("input", x.dtype), ("dtype", nominal)):
            if value not in HIGH_PRECISION_DTYPES:
                raise TypeError(
                    f"cannot quantize with {name} {value}; it must be torch.float32, torch.bfloat16 or torch.float16"
                )
        return nominal

    def _build(self, inner: Inner, like: Tensor, nominal: torch.dtype) -> Any:
        metadata = self.create_metadata(tuple(like.shape), dtype=nominal)
        if torch.compiler.is_compiling() and not (self.internal or is_value_class(type(self))):
            # What a tensor knows is a constant of the graph, and an object that is no value cannot be one.
            if self._tensors_need_it:
                raise NotImplementedError(
                    f"a {type(self).__name__} that is compared by identity (it holds live state, or its class is not"
                    " registered) makes no tensors in a compiled graph: what they are is part of the graph. Quantize"
                    " outside of the compiled region"
                )
            metadata["nontensor_kwargs"] = {**metadata["nontensor_kwargs"], "quantizer": None}
        return metadata["cls"]._from_inner(self._owned(inner, like), metadata, tuple(like.shape), like.device)

    # -- allocation ---------------------------------------------------------------------------------------
    def make_empty(
        self,
        shape: tuple[int, ...] | list[int] | torch.Size,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Any:
        """A quantized tensor of ``shape`` with uninitialised buffers, allocated in one call of the extension.

        ``device=None`` is torch's default device where one was set, else cuda if there is one, else cpu.

        Raises ``ValueError`` for a shape that the format cannot hold, ``TypeError`` for a nominal ``dtype``
        other than float32, bfloat16 and float16.
        """
        where = hardware.resolve_device(device)
        size = tuple(shape)
        for index, length in enumerate(size):
            if isinstance(length, bool) or not isinstance(length, int) or length < 0:
                raise ValueError(f"dimension {index} of shape {size} is {length!r}; it must be an int of at least 0")
        metadata = self.create_metadata(size, dtype=dtype, requires_grad=requires_grad)
        inner = self._allocate_as(size, where, pin_memory, dtype)
        held = next((t.device for t in inner if t is not None), where)
        return metadata["cls"]._from_inner(inner, metadata, size, held)

    def alloc_tensors(
        self,
        shape: tuple[int, ...],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> dict[str, Tensor]:
        """Uninitialised plain tensors by attribute, from :meth:`inner_tensor_specs`; traceable.

        ``dtype`` is the nominal one, of which the buffers of a format without one of its own are.
        """
        where = hardware.resolve_device(device)
        specs = self.specs_as(shape, where, dtype)
        return {name: torch.empty(size, dtype=kind, device=where) for name, (size, kind) in specs.items()}

    def create_metadata(
        self, shape: tuple[int, ...], *, dtype: torch.dtype, requires_grad: bool = False
    ) -> dict[str, Any]:
        """The flatten context of a tensor that this quantizer makes: comparable, without tensors.

        Raises ``TypeError`` for a nominal ``dtype`` other than float32, bfloat16 and float16.
        """
        self._check_nominal(dtype)
        if not (self.rowwise_usage or self.columnwise_usage):
            raise ValueError(
                f"{type(self).__name__} has neither rowwise nor columnwise usage; take one with with_usage(...)"
            )
        metadata = self.storage_metadata(dtype)
        return {
            "cls": metadata["cls"],
            "is_tensor": not self.internal,
            "requires_grad": requires_grad,
            "shares_scale": False,
            "nontensor_kwargs": metadata["nontensor_kwargs"],
        }

    def _check_nominal(self, dtype: torch.dtype) -> None:
        if dtype not in HIGH_PRECISION_DTYPES:
            raise TypeError(f"nominal dtype is {dtype}; it must be torch.float32, torch.bfloat16 or torch.float16")


@compat.constant_result  # a graph cannot look into a class
def is_value_class(cls: type) -> bool:
    """Whether this class itself was registered as one of values; a subclass of a registered one is not."""
    return cls.__dict__.get("_value_fields") is not None


def checked_epsilon(value: Any) -> float:
    """An ``amax_epsilon`` as a float.

    Raises ``TypeError`` for what is no number, ``ValueError`` for one that is negative, NaN or beyond float32.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"amax_epsilon is {value!r}; it must be a number")
    if not 0.0 <= value <= FLT_MAX:
        raise ValueError(f"amax_epsilon is {value!r}; it must be 0 or more, and a finite float32")
    return float(value)


def _field_names(cls: type) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for klass in reversed(cls.__mro__):
        if issubclass(klass, Quantizer):
            for name, hint in compat.own_annotations(klass).items():
                if not (name.startswith("_") or _is_class_variable(hint)):
                    names[name] = None
    return tuple(names)


def _is_class_variable(hint: Any) -> bool:
    """Whether an annotation, evaluated or not, says that the attribute is the class's and no instance's."""
    if hint is ClassVar or get_origin(hint) is ClassVar:
        return True
    text = hint if isinstance(hint, str) else getattr(hint, "__forward_arg__", "")
    return text.split("[")[0].strip().split(".")[-1] == "ClassVar"


class _Quantize(torch.autograd.Function):
    """Straight-through: the gradient of the quantized tensor is the gradient of the input."""

    @staticmethod
    def forward(x: Tensor, quantizer: Quantizer, nominal: torch.dtype, group: Any) -> Any:
        return quantizer._build(quantizer.quantize_inner(x.detach(), group), x, nominal)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Its own, which transforms of functions (``torch.func``) ask for."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Any, quantizer: Quantizer, *others: Any) -> tuple[Any, None]:
        if in_dims[0] is not None:
            refusals.refuse_batch(quantizer)
        return _Quantize.apply(x, quantizer, *others), None

"""Every operation of aten that writes to an argument, and what becomes of what it writes to a quantized tensor.

The operations come from their schemas: :func:`operations` looks for arguments that are written to, makes up the others
by their types, and keeps what then runs on a plain tensor and changes it. :func:`outcome` runs one on a view of a
quantized tensor and compares with the same on the view of its dequantized values.
`docs/make_writes_table.py` makes the page of it.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.formats.registry import Case, quantized

SHAPE = (64, 96)

#: So many ways of making up arguments are tried.
_TRIES = 48

#: Of the operations that users can call, those that are not tried: they change what a tensor is rather than what is in
#: it, or believe numbers in an argument without a check.
_LEFT_OUT = (
    "batch_norm",
    "dequantize",
    "embedding",
    "empty",
    "fake_quantize",
    "fbgemm",
    "native_batch_norm",
    "new_empty",
    "quantize",
    "record_stream",
    "rename_",
    "requires_grad_",
    "resize",
    "retain_grad",
    "set_",
    "set_data",
    "sparse",
    "to_sparse",
)


@dataclass(frozen=True)
class Operation:
    """One overload with arguments that it takes.

    Attributes:
        name: of the overload, ``add_.Tensor``.
        call: writes to the tensor that it is given.
        normal: whether it is tried on values of both signs (else between 0.1 and 0.9).
        random: whether what it writes is drawn.
    """

    name: str
    call: Callable[[torch.Tensor], Any]
    normal: bool
    random: bool = False


@dataclass(frozen=True)
class View:
    """One way to take a view of a tensor of :data:`SHAPE`."""

    name: str
    take: Callable[[torch.Tensor], torch.Tensor]


VIEWS = [
    View("whole", lambda t: t),
    View("t[:8]", lambda t: t[:8]),
    View("t[:, 5]", lambda t: t[:, 5]),
    View("t[3]", lambda t: t[3]),
    View("t[3, 4]", lambda t: t[3, 4]),
    View("t[::2, None]", lambda t: t[::2, None]),
    View("t[..., 32:64]", lambda t: t[..., 32:64]),
    View("view(-1)", lambda t: t.view(-1)),
    View("view(2, 32, 96)", lambda t: t.view(2, 32, 96)),
    View("reshape(-1, 3)", lambda t: t.reshape(-1, 3)),
    View("flatten()", lambda t: t.flatten()),
    View("t()", lambda t: t.t()),
    View("t().t()", lambda t: t.t().t()),
    View("mT", lambda t: t.mT),
    View("transpose(0, 1)", lambda t: t.transpose(0, 1)),
    View("permute(1, 0)", lambda t: t.permute(1, 0)),
    View("movedim(0, 1)", lambda t: t.movedim(0, 1)),
    View("diagonal()", lambda t: t.diagonal()),
    View("narrow(0, 8, 16)", lambda t: t.narrow(0, 8, 16)),
    View("select(1, 2)", lambda t: t.select(1, 2)),
    View("chunk(4)[1]", lambda t: t.chunk(4)[1]),
    View("split(32, 1)[1]", lambda t: t.split(32, 1)[1]),
    View("split([32, 32])[1]", lambda t: t.split([32, 32])[1]),
    View("unbind(1)[7]", lambda t: t.unbind(1)[7]),
    View("tensor_split(3)[1]", lambda t: t.tensor_split(3)[1]),
    View("unsqueeze(0)", lambda t: t.unsqueeze(0)),
    View("unsqueeze(-1)", lambda t: t.unsqueeze(-1)),
    View("unsqueeze(0).squeeze()", lambda t: t.unsqueeze(0).squeeze()),
    View("expand(2, 64, 96)[1]", lambda t: t.expand(2, *SHAPE)[1]),
    View("unfold(0, 32, 32)", lambda t: t.unfold(0, 32, 32)),
    View("as_strided", lambda t: t.as_strided((96, 64), (1, 96))),
    View("view_as", lambda t: t.view_as(torch.empty(96, 64))),
    View("unflatten(0, (2, 32))", lambda t: t.unflatten(0, (2, 32))),
    View("swapaxes(0, 1)[:4]", lambda t: t.swapaxes(0, 1)[:4]),
    View("detach()", lambda t: t.detach()),
    View("data[8:]", lambda t: t.data[8:]),
    View("real", lambda t: t.real),
]


def sample(normal: bool, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    values = torch.rand(shape, generator=torch.Generator().manual_seed(5)) * 0.8 + 0.1
    if normal:  # no value near zero: that of a power would be infinite
        values = values * (torch.rand(shape, generator=torch.Generator().manual_seed(6)) < 0.5).float().mul(2).sub(1)
    return values


def _overloads() -> Iterator[tuple[str, Any]]:
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, full = name.partition("::")
        packet, _, overload = full.partition(".")
        called = hasattr(torch.Tensor, packet) or hasattr(torch, packet)
        listed = packet.startswith("_foreach_") and packet.endswith("_")  # torch's optimizers call these
        public = listed or (called and not packet.startswith("_"))
        if namespace != "aten" or not public or packet.startswith(_LEFT_OUT):
            continue
        try:
            yield full, getattr(getattr(torch.ops.aten, packet), overload or "default")
        except AttributeError:  # of another part of torch
            continue


def _written(function: Any) -> list[Any]:
    return [p for p in function._schema.arguments if p.alias_info is not None and p.alias_info.is_write]


def _choices(kind: str, like: torch.Tensor) -> list[Any]:
    """Values of a required argument of this type beside ``like``."""
    shape = tuple(like.shape)
    other = sample(False, shape) + 0.05
    tensors = [
        other,
        torch.zeros(shape, dtype=torch.int64),
        other > 0.5,
        torch.tensor(0.5),
        torch.arange(min(shape[:1] or (1,))),
        torch.rand(shape[-1:]),
    ]
    known: dict[str, list[Any]] = {
        "Tensor": tensors,
        "Optional[Tensor]": [None, *tensors],
        "List[Tensor]": [[other], [other, other]],
        "List[Optional[Tensor]]": [[torch.zeros(1, dtype=torch.int64)]],
        "number": [0.5, 2],
        "List[number]": [[0.5]],
        "float": [0.5, 0.1],
        "int": [0, 1],
        "Optional[int]": [None, 0],
        "bool": [False],
        "str": ["mean", "sum"],
        "List[int]": [list(shape), [0], [1, 1]],
        "List[float]": [[0.5]],
    }
    return known.get(kind, [None] if kind.startswith("Optional") else [])


def _ways(function: Any, written: Any) -> Iterator[Callable[[torch.Tensor], Any]]:
    """Calls of ``function`` that write to the tensor given, with made-up values of all other required arguments."""
    needed = [p for p in function._schema.arguments if p.name != written.name and not p.has_default_value()]

    def call(target: torch.Tensor, picks: tuple[int, ...]) -> Any:
        values = {p.name: _choices(str(p.type), target)[pick] for p, pick in zip(needed, picks, strict=True)}
        values[written.name] = [target] if str(written.type) == "List[Tensor]" else target
        return function(**values)

    counts = [range(len(_choices(str(p.type), torch.zeros(SHAPE)))) for p in needed]
    for picks in itertools.islice(itertools.product(*counts), _TRIES):
        yield functools.partial(call, picks=picks)


def _changes(call: Callable[[torch.Tensor], Any], normal: bool) -> bool:
    """Whether ``call`` runs on plain tensors, whole and in part, and leaves finite and clearly different values."""
    for take in (VIEWS[0].take, VIEWS[1].take):
        before = sample(normal)
        after = before.clone()
        torch.manual_seed(3)
        try:
            call(take(after))
        except Exception:  # these arguments are not its
            return False
        if after.shape != before.shape:
            return False
        moved = (take(after) - take(before)).norm() / take(before).norm()
        if not after.isfinite().all() or moved < 0.5:
            return False
        if after.abs().max() > 1e3:  # beyond what a format of one scale tells from zero beside it
            return False
    return True


def _is_random(call: Callable[[torch.Tensor], Any], normal: bool) -> bool:
    written = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        written.append(sample(normal))
        call(written[-1])
    return not torch.equal(*written)


@functools.cache
def operations() -> list[Operation]:
    """All operations of aten that write to a tensor, with arguments with which they change it."""
    found = []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for name, function in _overloads():
            for written in _written(function)[:1]:
                if str(written.type) not in ("Tensor", "List[Tensor]"):
                    continue
                ways = itertools.product((False, True), _ways(function, written))
                for normal, call in ways:
                    if _changes(call, normal):
                        found.append(Operation(name, call, normal, _is_random(call, normal)))
                        break
    return found


def outcome(case: Case, usage: tuple[bool, bool], operation: Operation, view: View) -> str:
    """What becomes of a write to a view of a quantized tensor: ``right``, ``raises``, ``silent`` (the base holds
    something else than the same write leaves in its dequantized values), or ``-`` where torch refuses it too or it
    changes too little to tell."""
    base = quantized(case.quantizer(usage), sample(operation.normal))
    before = base.dequantize()
    want = before.clone()
    torch.manual_seed(3)
    try:
        operation.call(view.take(want))
    except Exception:
        return "-"
    # A scale of its own, which delayed scaling has, saturates early.
    largest = 6.0 if case.live else 1e3
    there, then = view.take(before), view.take(want)
    clear = (then - there).norm() > 2.5 * case.error * torch.maximum(then.norm(), there.norm())
    if not want.isfinite().all() or not clear or want.abs().max() > largest:
        return "-"
    torch.manual_seed(3)
    try:
        operation.call(view.take(base))
    except Exception as error:
        return "raises" if torch.equal(base.dequantize(), before) and "INTERNAL ASSERT" not in str(error) else "silent"
    directions = [base]
    if usage == (True, True):  # the other direction holds the new values too
        directions.append(base.detach())
        try:
            directions[1].update_usage(rowwise_usage=False)
        except RuntimeError:
            directions.pop()
    for direction in directions:
        got = direction.dequantize()
        came = view.take(got)
        # In which order an operation draws depends on how the memory lies.
        near = (came - there).norm() > 0 if operation.random else (came - then).norm() < (came - there).norm()
        rest = operation.random or (got - want).norm() <= 4 * case.error * want.norm() + 1e-6
        if not (near and rest):
            return "silent"
    return "right"


#: Of :data:`VIEWS`, those of the table in the docs.
SHOWN = ("whole", "t[:8]", "t[3]", "t[:, 5]", "view(-1)", "t()", "diagonal()")


def table(cases: dict[str, Case]) -> str:
    """A row an operation in place, a column a format; in each cell what became of it, a letter a view of
    :data:`SHOWN`: ``R`` right, ``E`` an error, ``S`` silently lost, ``-`` nothing to tell by."""
    views = [view for view in VIEWS if view.name in SHOWN]
    letters = {"right": "R", "raises": "E", "silent": "S", "-": "-"}
    packets: dict[str, Operation] = {}
    for operation in operations():
        packet = operation.name.partition(".")[0]
        if packet.endswith("_") and not packet.startswith("_"):
            packets.setdefault(packet, operation)
    lines = ["| operation | " + " | ".join(cases) + " |", "|---|" + "---|" * len(cases)]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for packet, operation in packets.items():
            cells = [
                "".join(letters[outcome(case, (True, True), operation, view)] for view in views)
                for case in cases.values()
            ]
            lines.append(f"| `{packet}` | " + " | ".join(f"`{cell}`" for cell in cells) + " |")
    return "\n".join(lines) + "\n"

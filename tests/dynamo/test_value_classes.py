"""Registration of classes: what annotations may say and in which form, and which class a name stands for."""

import enum
import pickle
import types
import typing

import pytest
import torch

from tejit import Float8CurrentScalingQuantizer, Quantizer, compat
from tejit.dynamo import is_value_opaque_quantizer, register_value_opaque_quantizer
from tejit.dynamo.value import rebuild_quantizer
from tests.dynamo import future_quantizers


class Mode(enum.Enum):
    FAST = 1


class Other(enum.Enum):
    FAST = 2


class Options(enum.Flag):
    A = 1
    B = 2


@register_value_opaque_quantizer
class Twin(Quantizer):
    mode: Mode | Other
    options: Options

    def __init__(self, *, mode=Mode.FAST, options=Options.A, **base):
        super().__init__(**base)
        self._init_fields(mode=mode, options=options)


def round_trip(quantizer: Quantizer) -> Quantizer:
    expression, names = quantizer.__fx_repr__()
    twin = eval(expression, dict(names))
    assert twin == quantizer == pickle.loads(pickle.dumps(quantizer))
    assert hash(twin) == hash(quantizer)
    return twin


def test_annotations_as_text() -> None:
    cls = future_quantizers.Twin
    assert cls._fields[4:] == ("mode", "level", "side", "factor", "kind", "child")  # no class variable among them
    quantizer = cls(level=3, side="right", factor=float("inf"), child=cls(mode=None))
    twin = round_trip(quantizer)
    assert twin.mode is future_quantizers.Mode.FAST
    assert (twin.level, twin.side, twin.factor, twin.kind) == (3, "right", float("inf"), torch.half)
    assert twin.child == cls(mode=None) != cls()
    assert quantizer.replace(level=None) == quantizer.replace(level=None) != quantizer


def test_a_type_that_cannot_be_looked_up_is_named() -> None:
    with pytest.raises(TypeError, match=r"Unresolvable\.amount is annotated 'Decimal'.*TYPE_CHECKING"):
        register_value_opaque_quantizer(future_quantizers.Unresolvable)
    assert not is_value_opaque_quantizer(future_quantizers.Unresolvable)


@pytest.mark.parametrize("hint", [list, dict[str, int], object, typing.Any, complex, torch.Size, torch.Tensor | None])
def test_other_types_are_refused_by_name(hint) -> None:
    cls = types.new_class("Refused", (Quantizer,), exec_body=lambda space: space.update(__annotations__={"odd": hint}))
    with pytest.raises(TypeError, match=r"Refused\.odd is annotated"):
        register_value_opaque_quantizer(cls)
    assert "__fx_repr__" not in vars(cls)


def test_the_type_of_an_enum_decides_not_the_field() -> None:
    first, second = Twin(mode=Mode.FAST), Twin(mode=Other.FAST)
    assert first != second
    assert round_trip(first).mode is Mode.FAST
    assert round_trip(second).mode is Other.FAST
    assert round_trip(Twin(options=Options.A | Options.B)).options == Options.A | Options.B
    with pytest.raises(TypeError, match=r"Twin\.mode is <Options.A: 1> of type Options; it may be: Mode, Other"):
        hash(Twin(mode=Options.A))


def test_a_quantizer_without_value_is_no_part_of_one() -> None:
    class Identity(Quantizer):
        pass

    with pytest.raises(TypeError, match=r"Twin\.child is a Identity, which is compared by identity"):
        hash(future_quantizers.Twin(child=Identity()))


def test_symbolic_and_other_numbers_are_no_values() -> None:
    for value in (torch.tensor(1.0), 1j, b"1", (1,)):
        with pytest.raises(TypeError, match=r"Twin\.factor is .*cannot be part of a value"):
            hash(future_quantizers.Twin(factor=value))


class _LazyAnnotations:
    """What Python 3.14 offers: annotations that are only evaluated on demand. Ours are written as text, and asking
    for values raises, as it does there where a name is not defined yet."""

    class Format(enum.Enum):
        VALUE = 1
        FORWARDREF = 3

    @staticmethod
    def get_annotations(cls, *, format=Format.VALUE):
        if format is not _LazyAnnotations.Format.FORWARDREF:
            raise NameError("evaluated too early")
        return {
            name: _ForwardRef(text, cls) if isinstance(text, str) else text
            for name, text in vars(cls).get("__annotations__", {}).items()
        }


class _ForwardRef:
    def __init__(self, text, owner):
        self.__forward_arg__, self.__owner = text, owner

    def evaluate(self, *, globals, owner):
        assert owner is self.__owner
        return eval(self.__forward_arg__, globals)


def test_lazy_annotations(monkeypatch) -> None:
    """As on Python 3.14: a class may name itself and what comes later, and nothing is evaluated before registration."""
    monkeypatch.setattr(compat, "_annotationlib", _LazyAnnotations)

    def body(space):
        space["__module__"] = __name__
        space["__annotations__"] = {
            "child": "Lazy | None",
            "later": "_DefinedLater",
            "shared": "typing.ClassVar[int]",
            "plain": int,
        }

        def __init__(self, *, child=None, later=None, plain=1, **base):
            Quantizer.__init__(self, **base)
            self._init_fields(child=child, later=later, plain=plain)

        space["__init__"] = __init__

    cls = types.new_class("Lazy", (Quantizer,), exec_body=body)
    assert cls._fields[4:] == ("child", "later", "plain")
    with pytest.raises(TypeError, match=r"Lazy\.later"):
        register_value_opaque_quantizer(cls)
    monkeypatch.setitem(globals(), "_DefinedLater", enum.Enum("_DefinedLater", "ONE", module=__name__))
    register_value_opaque_quantizer(cls)
    twin = round_trip(cls(child=cls(plain=2), later=globals()["_DefinedLater"].ONE))
    assert twin.child.plain == 2


def test_annotations_are_evaluated_once(monkeypatch) -> None:
    asked = []
    evaluate = compat.evaluated_annotation
    monkeypatch.setattr(compat, "evaluated_annotation", lambda cls, hint: (asked.append(hint), evaluate(cls, hint))[1])

    @register_value_opaque_quantizer
    class Once(Float8CurrentScalingQuantizer):
        mode: Mode

        def __init__(self, *arguments, mode=Mode.FAST, **named):
            super().__init__(*arguments, **named)
            self._init_fields(mode=mode)

    assert asked
    asked.clear()
    round_trip(Once())
    round_trip(Once(amax_epsilon=0.5))
    assert asked == []


def define(level: int) -> type[Quantizer]:
    class Again(Quantizer):
        pass

    Again.level = level
    return register_value_opaque_quantizer(Again)


def test_a_class_defined_again_takes_the_place_of_the_first() -> None:
    """A notebook's cell runs twice. What was made by the first run says so instead of turning into the second."""
    first = define(1)
    old = first()
    old_key = old.__reduce__()[1][0]
    second = define(2)
    assert is_value_opaque_quantizer(second)
    assert compat.is_constant_class(second)
    assert old != second()
    assert rebuild_quantizer(old_key).level == 2
    for use in (old.__fx_repr__, old.__reduce__, lambda: hash(first())):
        with pytest.raises(TypeError, match="another class was registered as"):
            use()


def test_torch_s_refusal_leaves_the_class_as_it_was(monkeypatch) -> None:
    class Refused(Quantizer):
        def __eq__(self, other):
            return NotImplemented

    before = dict(vars(Refused))

    def refuse(cls, **arguments):
        raise RuntimeError("no")

    monkeypatch.setattr(compat, "register_constant_class", refuse)
    with pytest.raises(RuntimeError, match="no"):
        register_value_opaque_quantizer(Refused)
    assert {name: vars(Refused).get(name) for name in before} == before
    assert not is_value_opaque_quantizer(Refused)

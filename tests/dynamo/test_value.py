"""Quantizers as values: identity, immutability, registration, the expression that rebuilds them."""

import copy
import enum
import pickle

import pytest
import torch

from tejit import Float8BlockQuantizer, Float8CurrentScalingQuantizer, NVFP4Quantizer, Quantizer
from tejit.dynamo import is_value_opaque_quantizer, register_value_opaque_quantizer
from tejit.dynamo.value import rebuild_quantizer

INF, NAN = float("inf"), float("nan")


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


@register_value_opaque_quantizer
class Everything(Quantizer):
    """Every kind of field."""

    number: int
    factor: float
    name: str
    mode: Mode
    kind: torch.dtype
    child: Float8CurrentScalingQuantizer | None

    def __init__(self, *, number=3, factor=0.5, name="a'b\"c", mode=Mode.FAST, kind=torch.bfloat16, child=None, **base):
        super().__init__(**base)
        self._init_fields(number=number, factor=factor, name=name, mode=mode, kind=kind, child=child)
        self._init_fields(derived=number * 2)  # rebuilt by the constructor, no part of the value


QUANTIZERS = [
    Float8CurrentScalingQuantizer(),
    Float8CurrentScalingQuantizer(torch.float8_e5m2, rowwise=False, force_pow_2_scales=True, amax_epsilon=0.1),
    Float8BlockQuantizer(),
    Float8BlockQuantizer(torch.float8_e5m2, block_scaling_dim=1, force_pow_2_scales=False, amax_epsilon=1e-6),
    NVFP4Quantizer(),
    NVFP4Quantizer(with_rht=True, stochastic_rounding=True, with_random_sign_mask=False, columnwise=False),
    NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256, nvfp4_4over6_err_mode="MSE", with_2d_quantization=True),
    Everything(),
    Everything(factor=INF, child=Float8CurrentScalingQuantizer(amax_epsilon=1e-30)),
    Everything(factor=-INF, mode=Mode.EXACT, number=-(10**20)),
    Everything(factor=NAN),
]


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=range(len(QUANTIZERS)))
def test_round_trips_give_an_equal_value(quantizer) -> None:
    expression, names = quantizer.__fx_repr__()
    twins = [
        eval(expression, dict(names)),
        pickle.loads(pickle.dumps(quantizer)),
        quantizer.replace(),
        rebuild_quantizer(quantizer.__reduce__()[1][0]),
    ]
    for twin in twins:
        assert twin == quantizer
        assert hash(twin) == hash(quantizer)
        assert type(twin) is type(quantizer)
        assert twin is not quantizer
        assert repr(twin) == repr(quantizer)
    if isinstance(quantizer, Everything):
        assert all(twin.derived == quantizer.number * 2 for twin in twins)
    assert not any(isinstance(value, type(torch)) for value in names.values())  # a module would spoil the caches


def test_equality_is_by_class_and_every_field() -> None:
    assert len(set(QUANTIZERS)) == len(QUANTIZERS)
    base = Everything()
    changes = {
        "rowwise_usage": False,
        "columnwise_usage": False,
        "internal": True,
        "optimize_for_gemm": True,
        "number": 4,
        "factor": 0.25,
        "name": "other",
        "mode": Mode.EXACT,
        "kind": torch.float16,
        "child": Float8CurrentScalingQuantizer(),
    }
    for name, value in changes.items():
        changed = base.replace(**{name: value})
        assert changed != base, name
        assert getattr(changed, name) == value
    assert base != "something else"


def test_two_classes_of_one_name_differ() -> None:
    def define():
        class Local(Quantizer):
            pass

        Local.__module__ = f"somewhere.{len(made)}"
        return register_value_opaque_quantizer(Local)

    made = []
    made.append(define())
    made.append(define())
    first, second = made[0](), made[1]()
    assert first != second
    for quantizer in (first, second):
        expression, names = quantizer.__fx_repr__()
        assert eval(expression, dict(names)) == quantizer


def test_quantizers_are_immutable_and_the_error_helps() -> None:
    quantizer = Float8CurrentScalingQuantizer()
    with pytest.raises(AttributeError, match=r"cannot set 'rowwise_usage' to False.*with_usage.*replace"):
        quantizer.rowwise_usage = False
    with pytest.raises(AttributeError, match="with_usage"):
        quantizer.set_usage(rowwise=False)
    with pytest.raises(AttributeError, match="immutable"):
        del quantizer.internal
    with pytest.raises(TypeError, match="no field 'rowise_usage'"):
        quantizer.replace(rowise_usage=False)
    assert copy.copy(quantizer) is quantizer
    assert copy.deepcopy(quantizer) is quantizer
    other = quantizer.with_usage(columnwise=False)
    assert quantizer.columnwise_usage
    assert other.get_usages() == {"rowwise": True, "columnwise": False}


def test_registration_refuses_other_fields_by_name() -> None:
    class WithTensor(Quantizer):
        scale: torch.Tensor

    with pytest.raises(TypeError, match=r"WithTensor\.scale is annotated"):
        register_value_opaque_quantizer(WithTensor)
    with pytest.raises(TypeError, match="not a subclass"):
        register_value_opaque_quantizer(int)
    assert not is_value_opaque_quantizer(WithTensor)


def test_a_subclass_must_be_registered_itself() -> None:
    class Sub(Float8CurrentScalingQuantizer):
        pass

    assert is_value_opaque_quantizer(Float8CurrentScalingQuantizer)
    assert is_value_opaque_quantizer(Float8CurrentScalingQuantizer())
    assert not is_value_opaque_quantizer(Sub)
    assert Sub() != Float8CurrentScalingQuantizer()
    assert Sub() != Sub()  # identity semantics until it is registered


class Extended(Float8CurrentScalingQuantizer):
    """Not registered, with a field of its own."""

    level: int

    def __init__(self, *arguments, level=1, **named):
        super().__init__(*arguments, **named)
        self._init_fields(level=level)


def test_fields_of_a_subclass_survive_every_copy() -> None:
    @register_value_opaque_quantizer
    class Registered(Extended):
        pass

    for cls in (Extended, Registered):
        quantizer = cls(level=3)
        assert quantizer.with_usage(columnwise=False).level == 3
        assert quantizer.replace(internal=True).level == 3
    assert pickle.loads(pickle.dumps(Extended(level=3))).level == 3
    assert Registered(level=3) == Registered(level=3) != Registered(level=4)


def test_flags_are_bools_and_eps_is_a_float32() -> None:
    for arguments in ({"rowwise": 1}, {"internal": "no"}, {"force_pow_2_scales": 1}, {"amax_epsilon": "a"}):
        with pytest.raises(TypeError, match="must be"):
            Float8CurrentScalingQuantizer(**arguments)
    with pytest.raises(ValueError, match=r"1e\+39"):
        Float8CurrentScalingQuantizer(amax_epsilon=1e39)


def test_a_process_group_in_the_value_is_an_error_everywhere() -> None:
    quantizer = Everything(child=object())
    for use in (lambda: quantizer == quantizer, lambda: hash(quantizer), quantizer.__fx_repr__):
        with pytest.raises(TypeError, match=r"Everything\.child.*amax_reduction_group"):
            use()

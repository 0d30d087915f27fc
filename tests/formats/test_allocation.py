"""C++, Python and the quantizing op make the same tensors, of every shape, and refuse the same shapes."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tejit.dynamo import TensorSpec, to_tensor_spec
from tests.common import DEVICES, assert_bitwise_equal, poisoned_memory, provoking, short
from tests.formats.registry import buffers, described, each_case, quantized

SHAPES = [
    (),
    (1,),
    (32,),
    (64, 96),
    (2, 32, 64),
    (2, 2, 8, 96),
    (4, 4, 4, 32),
    (0, 64),
    (64, 0),
    (5, 7),
    (3, 40),
    (33, 64),
    (64, 33),
    (64, 40),
    (48, 48),
    (129, 32),
]


def ways(q, shape, dtype, device, x):
    """Each way to have a tensor of a shape, by name."""
    return {
        "make_empty": lambda: q.make_empty(shape, dtype=dtype, device=device),
        "create_tensor": lambda: TensorSpec(shape, dtype, q, device=device).create_tensor(),
        "quantize": lambda: quantized(q, x),
    }


def outcome(make):
    try:
        return make(), None
    except ValueError as error:
        return None, str(error)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "internal"])
@each_case(usages=True)
@pytest.mark.parametrize("shape", SHAPES, ids=short)
def test_all_ways_agree(shape, case, usage, internal, device) -> None:
    q = case.quantizer(usage, internal, device)
    x = provoking("normal", shape, torch.bfloat16).to(device)
    made, errors = {}, {}
    for name, way in ways(q, shape, torch.bfloat16, device, x).items():
        made[name], errors[name] = outcome(way)
    assert len(set(errors.values())) == 1, errors
    assert (errors["quantize"] is None) == case.fits(shape, usage), errors["quantize"]
    if errors["quantize"] is not None:
        return
    want = described(made["quantize"])
    for name, tensor in made.items():
        assert described(tensor) == want, name
    # The kernel writes the same bytes into tensors made either way.
    bytes_of = buffers(quantized(q, x))
    for name in ("make_empty", "create_tensor"):
        with poisoned_memory():
            target = ways(q, shape, torch.bfloat16, device, x)[name]()
        quantized(q, x, out=target)
        for attribute, buffer in buffers(target).items():
            assert_bitwise_equal(buffer, bytes_of[attribute], f"{name}: {attribute}")


@each_case(usages=True)
@pytest.mark.parametrize("shape", [(64, 96), (2, 32, 64), (64, 40), (33, 64), (0, 64)], ids=short)
def test_without_data(shape, case, usage) -> None:
    """Fake tensors and meta tensors are described as the real ones."""
    q = case.quantizer(usage)
    fits = case.fits(shape, usage)
    want = described(quantized(q, provoking("normal", shape, torch.float32))) if fits else None
    for device in ("cpu", "meta"):
        x = torch.empty(shape, device=device)
        for name, way in ways(q, shape, torch.float32, device, x).items():
            if device == "cpu":
                with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                    fake = {**ways(q, shape, torch.float32, device, mode.from_tensor(x))}
                    made, _ = outcome(fake[name])
            elif case.live and name == "quantize":
                continue  # its scale is on a device of its own
            else:
                made, _ = outcome(way)
            assert (made is not None) == fits, (device, name)
            if want is not None:
                got = described(made)
                assert got[:2] == want[:2]
                assert [(n, s, d) for n, s, d, *_ in got[2]] == [(n, s, d) for n, s, d, *_ in want[2]], (device, name)


@each_case(usages=True)
def test_a_spec_comes_back_from_what_it_made(case, usage) -> None:
    for internal in (False, True):
        q = case.quantizer(usage, internal)
        made = quantized(q, provoking("normal", (64, 96), torch.float16))
        spec = to_tensor_spec(made)
        assert spec.quantizer.inner_tensor_specs((64, 96), "cpu").keys() == buffers(made).keys()
        twin = spec.assemble([getattr(made, name) for name in spec.inner_names()])
        assert type(twin) is type(made)
        assert_bitwise_equal(twin.dequantize(), made.dequantize())
        assert described(spec.create_tensor())[2:] == described(made)[2:]
        if spec.quantizer.get_usages() == {"rowwise": usage[0], "columnwise": usage[1]} and not case.live:
            assert spec == TensorSpec((64, 96), torch.float16, q, False, torch.device("cpu"))


@each_case(only=lambda case: case.row > 1)
def test_the_error_names_the_dimension_its_size_and_the_next_that_works(case) -> None:
    """pytorch/ao#3233, TE#688: NVFP4 of (64, 40) names K, 40, 16 and 48."""
    q = case.quantizer((True, False))
    good = -(-40 // case.row) * case.row
    for _, way in ways(q, (64, 40), torch.float32, "cpu", torch.randn(64, 40)).items():
        with pytest.raises(ValueError) as caught:
            way()
        for part in ("K", "= 40", f"multiple of {case.row}", str(good)):
            assert part in str(caught.value)

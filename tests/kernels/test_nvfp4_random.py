"""NVFP4's stochastic rounding: the generator against published vectors, and what the rounded values must be."""

import numpy as np
import pytest
import torch

from tejit import NVFP4Quantizer
from tejit.format_info import E2M1_VALUES
from tejit.kernels.nvfp4 import elements, reference
from tejit.kernels.nvfp4.philox import philox, random_bytes
from tests.common import DEVICES, assert_bitwise_equal, provoking
from tests.kernels.nvfp4_modes import MODES, Mode, quantize

#: The three philox4x32 vectors for ten rounds of Random123's tests/kat_vectors (D. E. Shaw Research):
#: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_philox_equals_random123(counter, key, result) -> None:
    words = philox(tuple(torch.tensor(w) for w in counter), tuple(torch.tensor(w) for w in key))
    assert tuple(int(w) for w in words) == result


def test_bytes_come_from_the_index_of_the_block_the_seed_and_the_direction() -> None:
    """Written out: seed and offset give key and upper counter, little-endian bytes from word 0."""

    def signed(number: int) -> int:
        return number - 2**64 if number >= 2**63 else number

    counter, key, result = KNOWN_ANSWERS[2]
    seed = torch.tensor([signed(key[0] | key[1] << 32), signed(counter[2] | counter[3] << 32)])
    block = torch.tensor([signed(counter[0] | counter[1] << 32)])
    want = torch.from_numpy(np.array(result, "<u4").view(np.uint8).astype(np.int64))
    assert torch.equal(random_bytes(block, seed, False)[0], want)
    other = torch.tensor([int(seed[0]), signed((int(seed[1]) + 2**63) % 2**64)])
    assert torch.equal(random_bytes(block, other, True)[0], want)


def rounded(how: str, x: torch.Tensor, seed: tuple[int, int]) -> torch.Tensor:
    """The codes' values of x, whose blocks all have a maximum of 6 and so a multiplier of 1."""
    row, scales, _, _, _, _ = quantize(how, x, Mode(seed=seed), True, False)
    values = elements.e2m1_values(elements.unpack(row))
    assert (reference.e4m3_values(scales[: x.shape[0], : x.shape[1] // 16]) == 448).all()
    return values


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["kernels", "torch"])
@pytest.mark.parametrize("value", [0.3, -0.3, 0.01, 0.75, 1.1, 1.9, 2.5, -3.9, 4.2, 5.9])
def test_the_mean_of_many_roundings_is_the_value(value: float, how: str, device: str, need_kernels) -> None:
    """pytorch/ao#3384: 15,000 roundings in 100 calls; within 3 sigma, plus half a step of the 256 levels."""
    if how == "kernels":
        need_kernels(device)
    calls, rows = 100, 10
    x = torch.full((rows, 16), value, device=device)
    x[:, 15] = 6.0
    sums = torch.zeros(15, dtype=torch.float64)
    below = max(v for v in E2M1_VALUES if v <= abs(value))
    above = min(v for v in E2M1_VALUES if v >= abs(value))
    for call in range(calls):
        got = rounded(how, x, (call * 977, call))[:, :15].double().cpu()
        assert set(got.abs().flatten().tolist()) <= {below, above}
        sums += got.sum(0)
    step = above - below
    chance = (abs(value) - below) / step if step else 0.0
    sigma = step * (chance * (1 - chance) / (calls * rows * 15)) ** 0.5
    assert abs((sums.sum() / (calls * rows * 15)).item() - value) <= 3 * sigma + step / 512
    per_element = (sums / (calls * rows) - value).abs()
    assert (per_element <= 5 * sigma * 15**0.5 + step / 512).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["kernels", "torch"])
def test_values_of_the_format_stay_what_they_are(how: str, device: str, need_kernels) -> None:
    if how == "kernels":
        need_kernels(device)
    values = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], device=device)
    for seed in range(50):
        assert torch.equal(rounded(how, values.expand(8, 16), (seed, seed)), values.expand(8, 16))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["sr", "sr rht", "sr 16x16"])
def test_bits_do_not_depend_on_who_computes_them(name: str, device: str, need_kernels) -> None:
    """A row's codes are those of its index, whatever else is in the tensor and however many threads work."""
    need_kernels(device)
    x = provoking("normal", (512, 1024), torch.bfloat16).to(device)
    amax = x.float().abs().amax().reshape(1)
    whole = quantize("kernels", x, MODES[name], given=(amax, amax))
    part = quantize("kernels", x[:64].contiguous(), MODES[name], True, False, (amax, None))
    assert_bitwise_equal(part[0], whole[0][:64])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for one, other in zip(quantize("kernels", x, MODES[name], given=(amax, amax)), whole, strict=True):
            assert_bitwise_equal(one, other)
    finally:
        torch.set_num_threads(threads)


def test_directions_and_offsets_draw_independently() -> None:
    x = provoking("normal", (256, 256), torch.float32)
    x = torch.minimum(x, x.t()).contiguous()  # symmetric: both directions quantize the same matrix
    first = quantize("torch", x, Mode(seed=(1, 0)))
    second = quantize("torch", x, Mode(seed=(1, 1)))
    plain = quantize("torch", x, Mode())
    assert_bitwise_equal(plain[0], plain[2])
    for one, other in ((first[0], first[2]), (first[0], second[0]), (first[2], second[2])):
        differing = (elements.unpack(one) != elements.unpack(other)).double().mean()
        assert 0.2 < differing < 0.6  # about a third: both neighbours are likely


@pytest.mark.parametrize("device", DEVICES)
def test_two_calls_differ_and_a_seed_repeats_them(device: str) -> None:
    q = NVFP4Quantizer(stochastic_rounding=True)
    x = provoking("normal", (64, 64), torch.bfloat16).to(device)
    torch.manual_seed(11)
    first = [q(x) for _ in range(3)]
    torch.manual_seed(11)
    again = [q(x) for _ in range(3)]
    for one, other in zip(first, again, strict=True):
        assert_bitwise_equal(one._rowwise_data, other._rowwise_data)
        assert_bitwise_equal(one._columnwise_data, other._columnwise_data)
    assert not torch.equal(first[0]._rowwise_data, first[1]._rowwise_data)

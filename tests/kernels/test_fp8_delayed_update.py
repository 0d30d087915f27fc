"""The update of delayed scaling, step by step against values worked out by hand from the rule of the format."""

import numpy as np
import pytest
import torch

from tejit.format_info import FLT_MAX
from tejit.kernels.fp8 import delayed

INF, NAN = float("inf"), float("nan")


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values).reshape(-1, 1)


def test_five_steps_of_a_history_of_four() -> None:
    """amax of the steps: 7, 14, 3.5, 1, 1. The 14 leaves the history three steps after it came in."""
    history, scale = torch.zeros(4, 1), torch.ones(1)
    for amax, rows, want in (
        (7.0, [0, 0, 0, 7], 64.0),
        (14.0, [0, 0, 7, 14], 32.0),
        (3.5, [0, 7, 14, 3.5], 32.0),
        (1.0, [0, 14, 3.5, 1], 32.0),  # the 7 is dropped now, and counted for the last time
        (1.0, [0, 3.5, 1, 1], 32.0),
        (1.0, [0, 1, 1, 1], 128.0),
    ):
        history[0] = amax
        history, scale = delayed.update(history, scale, 448.0)
        assert history[:, 0].tolist() == rows
        assert scale.tolist() == [want]


def test_most_recent_looks_at_row_0_only() -> None:
    history, scale = delayed.update(column(2.0, 100.0, 50.0), torch.ones(1), 448.0, algo="most_recent")
    assert scale.tolist() == [224.0]
    assert history[:, 0].tolist() == [0.0, 50.0, 2.0]
    _, scale = delayed.update(column(2.0, 100.0, 50.0), torch.ones(1), 448.0)
    assert scale.tolist() == [np.float32(448) / np.float32(100)]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_histories(length: int) -> None:
    """One row only collects; two rows keep the last step."""
    history, scale = delayed.update(torch.full((length, 1), 7.0), torch.ones(1), 448.0)
    assert history[:, 0].tolist() == [0.0] + [7.0] * (length - 1)
    assert scale.tolist() == [64.0]


def test_margin_takes_powers_of_two() -> None:
    for margin, want in ((0, 64.0), (1, 32.0), (3, 8.0), (-1, 128.0)):
        assert delayed.update(column(7.0, 0.0), torch.ones(1), 448.0, margin)[1].tolist() == [want]


@pytest.mark.parametrize("algo", delayed.ALGORITHMS)
def test_what_gives_no_scale_keeps_the_old_one(algo: str) -> None:
    history = torch.tensor([[0.0, INF, NAN, 1e-45, 2.0**-120, 448.0]])
    got, scale = delayed.update(history, torch.full((6,), 3.0), 448.0, algo=algo)
    assert scale.tolist()[:3] == [3.0, 3.0, 3.0]
    assert scale.tolist()[3:] == [float(np.float32(FLT_MAX)), float(np.float32(FLT_MAX)), 1.0]
    assert got.tolist() == [[0.0] * 6]


def test_each_tensor_has_its_own_largest_value() -> None:
    _, scale = delayed.update(torch.tensor([[7.0, 7.0]]), torch.ones(2), torch.tensor([448.0, 57344.0]))
    assert scale.tolist() == [64.0, 8192.0]


def test_what_did_not_run_is_left_alone() -> None:
    """Its history does not roll and its scale stays, while its neighbour's do."""
    history = torch.tensor([[7.0, 0.0], [1.0, 2.0], [3.0, 4.0]])
    got, scale = delayed.update(history, torch.tensor([5.0, 6.0]), 448.0, used=torch.tensor([True, False]))
    assert got.tolist() == [[0.0, 0.0], [3.0, 2.0], [7.0, 4.0]]
    assert scale.tolist() == [64.0, 6.0]


def test_the_arguments_are_left_as_they_are() -> None:
    history, scale = column(7.0, 1.0, 2.0), torch.ones(1)
    delayed.update(history, scale, 448.0)
    assert history[:, 0].tolist() == [7.0, 1.0, 2.0]
    assert scale.tolist() == [1.0]


def test_the_quotient_is_correctly_rounded() -> None:
    """Oracle: numpy's float32 division."""
    amax = torch.rand(1, 20000, generator=torch.Generator().manual_seed(2)) * 100 + 1e-3
    _, scale = delayed.update(amax, torch.ones(20000), 448.0)
    want = np.float32(448.0) / amax[0].numpy()
    assert (scale.numpy() == want).all()


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"'mean'.*max, most_recent"):
        delayed.update(torch.ones(2, 1), torch.ones(1), 448.0, algo="mean")
    for history, scale in (
        (torch.ones(2), torch.ones(2)),
        (torch.ones(0, 1), torch.ones(1)),
        (torch.ones(2, 3), torch.ones(2)),
    ):
        with pytest.raises(ValueError, match="history has shape"):
            delayed.update(history, scale, 448.0)
    with pytest.raises(ValueError, match=r"used has shape \(2,\)"):
        delayed.update(torch.ones(2, 1), torch.ones(1), 448.0, used=torch.ones(2, dtype=torch.bool))


def test_one_graph() -> None:
    compiled = torch.compile(delayed.update, fullgraph=True, backend="aot_eager")
    history, scale, used = torch.rand(16, 5), torch.ones(5), torch.tensor([True, False, True, True, False])
    for one, other in zip(
        compiled(history, scale, 448.0, 1, "max", used),
        delayed.update(history, scale, 448.0, 1, "max", used),
        strict=True,
    ):
        assert torch.equal(one, other)

"""amax over a process group: delayed scaling when it rolls, current scaling and NVFP4 when a tensor is quantized."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

#: What each process runs; everything but rank 0's data is smaller, so that the group's amax is rank 0's. The oracle is
#: a second, lone model on each rank that sees the largest data itself.
WORKER = """
import sys
import torch, torch.distributed as dist
import tejit
from tejit.recipe import DelayedScaling, Float8CurrentScaling, NVFP4BlockScaling
from tests.nn.test_delayed import assert_same, layers, state

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
group = dist.group.WORLD

def data(step, of):
    x = torch.randn(4, 31, generator=torch.Generator().manual_seed(step))
    return x * (1.0 if of == 0 else 0.25)

def step(module, x, factor, recipe, group=None, compiled=None):
    module.zero_grad()
    with tejit.autocast(recipe=recipe, amax_reduction_group=group):
        y = (compiled or module)(x)
    (y.float().square().sum() * factor).backward()

delayed = DelayedScaling(amax_history_len=3)
for how in sys.argv[3].split():
    together, alone = layers()[:1], layers()[:1]
    function = lambda x: together(x)
    if how == "inside":
        def function(x):
            with tejit.autocast(recipe=delayed, amax_reduction_group=group):
                return together(x)
    if how != "eager":
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    for n in range(4):
        if how == "inside":
            function(data(n, rank)).float().square().sum().backward()
        else:
            step(together, data(n, rank), 1.0, delayed, group, function)
        step(alone, data(n, 0), 1.0, delayed)
        history = together[0]._delayed_amax_history[:, 0]
        assert torch.equal(history, alone[0]._delayed_amax_history[:, 0]), (how, rank, n, "input")
        both = [torch.empty_like(together[0]._delayed_grad_amax_history) for _ in range(2)]
        dist.all_gather(both, together[0]._delayed_grad_amax_history)
        assert torch.equal(*both), (how, rank, n, "gradients")
        assert both[0][1:].any()
    scales = [torch.empty(2) for _ in range(2)]
    dist.all_gather(scales, together[0]._delayed_scale)
    assert torch.equal(*scales)

# A slot that collected nothing keeps its history on every rank: the weight's in later microbatches, and that of a group
# of rows which is empty everywhere; where one rank has rows, all roll.
for how in sys.argv[3].split():
    layer, grouped = layers()[0], tejit.GroupedLinear(3, 31, 17)
    def function(x, first, splits):
        if how != "inside":
            return layer(x, is_first_microbatch=first), grouped(x, splits)
        with tejit.autocast(recipe=delayed, amax_reduction_group=group):
            return layer(x, is_first_microbatch=first), grouped(x, splits)
    if how != "eager":
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    for n in range(6):
        with torch.no_grad():
            layer.weight.clamp_(-1, 1)[0, 0] = 8.0 / 2 ** (n // 3)
        with tejit.autocast(enabled=how != "inside", recipe=delayed, amax_reduction_group=group):
            one, two = function(data(n, rank), n % 3 == 0, [4, 0, 0] if rank == 0 else [2, 2, 0])
        (one.sum() + two.sum()).backward()
    assert layer._delayed_amax_history[:3, 1].tolist() == [0.0, 8.0, 4.0], (how, rank)
    assert layer._delayed_scale[1] == 448 / 8, (how, rank)
    inputs = grouped._delayed_amax_history[:3, ::2]
    assert inputs.count_nonzero(0).tolist() == [2, 2, 0], (how, rank, inputs)
    assert grouped._delayed_grad_amax_history[:3].count_nonzero(0).tolist() == [2, 2, 0], (how, rank)
    for mine in (inputs.contiguous(), grouped._delayed_scale, grouped._delayed_grad_scale):
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine)
        assert torch.equal(*both), (how, rank)

# reduce_amax=False: the group is there and not asked.
lone = DelayedScaling(amax_history_len=3, reduce_amax=False)
together, alone = layers(), layers()
step(together, data(0, rank), 1.0, lone, group)
step(alone, data(0, rank), 1.0, lone)
assert_same(state(together), state(alone))

# Current scaling: an input quantized with the group's amax, so doubling one rank's amax changes the other's result.
torch.manual_seed(0)
layer = tejit.Linear(64, 32)
for recipe in (Float8CurrentScaling(force_pow_2_scales=True), NVFP4BlockScaling(disable_stochastic_rounding=True)):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    large = torch.cat([x, x[:16] * 37.0]) if rank == 0 else x
    with torch.no_grad():
        with tejit.autocast(recipe=recipe, amax_reduction_group=group):
            got = layer(large)
        with tejit.autocast(recipe=recipe):
            want, other = layer(torch.cat([x, x[:16] * 37.0])), layer(x)
    assert torch.equal(got[:16], want[:16]), (rank, type(recipe))
    assert rank == 0 or not torch.equal(other[:16], want[:16]), "the test sees no difference"
dist.destroy_process_group()
print("done", rank)
"""


def run(tmp_path: Path, how: str) -> None:
    meeting = tmp_path / "meeting"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(meeting), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(told)


@pytest.mark.full
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("how", ["eager", "compiled", "inside"])
def test_two_processes_agree_on_amax(how, tmp_path) -> None:
    run(tmp_path, how)

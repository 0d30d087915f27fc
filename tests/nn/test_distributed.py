"""DDP and FSDP2 on two processes: they train as one process does that sees the same batches."""

from __future__ import annotations

import contextlib
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tejit
from tejit import Float8CurrentScalingQuantizer, MXFP8Quantizer
from tejit.recipe import DelayedScaling
from tests.nn.bounds import STATELESS, bounds, relative_error
from tests.nn.test_linear_bounds import made

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")

WORLD, STEPS, ROWS, FEATURES = 2, 4, 24, 64
LEARNING_RATE = 0.5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gelu = tejit.Linear(FEATURES, 96), nn.GELU()
        self.experts = tejit.GroupedLinear(3, 96, 32)

    def forward(self, x: Tensor, splits: list[int]) -> Tensor:
        return self.experts(self.gelu(self.first(x)), splits)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, FEATURES, generator=generator), torch.randn(ROWS, 32, generator=generator)


#: The group of each row of a batch, in order. The last group has one row, so on rank 0 it has none.
GROUPS = torch.tensor([0] * 12 + [1] * 11 + [2])


def share(tensor: Tensor, rank: int | None) -> Tensor:
    return tensor if rank is None else tensor[rank::WORLD]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train(model: nn.Module, shares: list[int] | None, context) -> dict[str, list[Tensor]]:
    """Train on these ranks' shares of each batch, one after the other, or on all of it at once.

    Returns the gradients of each step, and the parameters and losses afterwards.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    gradients, losses = [], []
    for step in range(STEPS):
        x, target = batch(step)
        for rank in shares or [None]:
            splits = torch.bincount(share(GROUPS, rank), minlength=3).tolist()
            with context():
                loss = (model(share(x, rank), splits) - share(target, rank)).square().mean()
            (loss / len(shares or [None])).backward()
            losses.append(loss.detach())
        gradients.extend([whole(p.grad) for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return {"gradients": gradients, "parameters": [whole(p) for p in model.parameters()], "losses": losses}


def context_of(name: str | None, group=None):
    if name is None:
        return contextlib.nullcontext
    recipe = DelayedScaling() if name == "delayed" else made(name)
    return lambda: tejit.autocast(recipe=recipe, amax_reduction_group=group)


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    for module in (model.first, model.experts, model):
        fully_shard(module, mesh=mesh)
    return model


# -- what the processes run ---------------------------------------------------------------------------------------
def _process(rank: int, folder: str, function, arguments) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    try:
        torch.save(function(rank, *arguments), f"{folder}/{rank}.pt")
        dist.barrier()  # nobody hangs up while another one still listens
    finally:
        dist.destroy_process_group()


def on_two_processes(folder, function, *arguments):
    """What ``function(rank, *arguments)`` returned on each."""
    torch.multiprocessing.spawn(_process, (str(folder), function, arguments), nprocs=WORLD)
    return [torch.load(f"{folder}/{rank}.pt") for rank in range(WORLD)]


def replicated(model: nn.Module) -> nn.Module:
    # Buffers of delayed scaling are each rank's own, unless amax is reduced.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.14 gives the argument another name
        return nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)


def train_each(rank: int, names: list[str | None], kinds: list[str]):
    found = {}
    for name in names:
        for kind in kinds:
            model = (replicated if kind == "ddp" else sharded)(Model())
            found[name, kind] = train(model, [rank], context_of(name))
    return found


def train_with_common_amax(rank: int):
    found = {"own amax": train(replicated(Model()), [rank], context_of("current"))}
    for name in ("current", "delayed"):
        for kind, wrap in (("ddp", replicated), ("fsdp", sharded)):
            model = Model()
            found[name, kind] = train(wrap(model), [rank], context_of(name, dist.group.WORLD))
            found[name, kind]["scales"] = [model.first._delayed_scale.clone(), model.experts._delayed_scale.clone()]
    return found


def shard_quantized(rank: int):
    """The messages of fully_shard over quantized parameters; frozen or not, the whole model or one layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, messages = init_device_mesh("cpu", (WORLD,)), []
    for quantizer in (Float8CurrentScalingQuantizer(), MXFP8Quantizer()):
        for frozen in (False, True):
            model = Model()
            model.first.weight = nn.Parameter(quantizer(model.first.weight.detach()), requires_grad=not frozen)
            try:
                fully_shard(model, mesh=mesh)
                messages.append(f"no error; the weight is a {type(model.first.weight)}")
            except NotImplementedError as error:
                messages.append(str(error))
    model = Model()
    model.first.weight = nn.Parameter(quantizer(model.first.weight.detach()))
    fully_shard(model, mesh=mesh, ignored_params={model.first.weight})
    with tejit.autocast(recipe=made("MXFP8")):
        model(batch(0)[0], [ROWS, 0, 0]).sum().backward()
    assert type(model.first.weight.grad) is Tensor
    return messages


def replicate_quantized(rank: int):
    """DDP over quantized parameters that differ between the ranks."""
    warnings.simplefilter("ignore")  # what dequantizes says so
    model = Model()
    with torch.no_grad():
        model.first.weight.mul_(rank + 1)
    quantizer = Float8CurrentScalingQuantizer()
    model.first.weight = nn.Parameter(quantizer(model.first.weight.detach()))
    started = model.first.weight.dequantize()
    ddp = replicated(model)
    broadcast = model.first.weight.dequantize()
    result = train(ddp, [rank], context_of("current"))
    assert isinstance(model.first.weight, tejit.Float8Tensor)
    torch.manual_seed(rank)
    with tejit.quantized_model_init(recipe=tejit.recipe.MXFP8BlockScaling(), preserve_high_precision_init_val=True):
        layer = tejit.Linear(32, 32)
    had = layer.weight.get_high_precision_init_val() is not None
    replicated(layer)
    kept = layer.weight.get_high_precision_init_val()
    return {
        "started": started,
        "broadcast": broadcast,
        "codes": model.first.weight._data,
        "kept": (had, kept is not None),
        **result,
    }


# -- tests --------------------------------------------------------------------------------------------------------
def check(found, name: str | None, kinds) -> None:
    ranks = [result[name, "ddp"] for result in found]
    # One process that runs both shares, one after the other, adds the same two gradients: equal to the bit.
    shares = train(Model(), list(range(WORLD)), context_of(name))
    for result in [result[name, kind] for result in found for kind in kinds]:
        for kind in ("gradients", "parameters"):
            for got, want in zip(result[kind], shares[kind], strict=True):
                assert torch.equal(got, want), (name, kind)
    for rank, result in enumerate(ranks):
        assert torch.equal(torch.stack(result["losses"]), torch.stack(shares["losses"][rank::WORLD]))
    # The whole batch at once has other scales: both are as far from high precision as their operands' errors, which
    # are independent, add up to over the four products that a gradient of the first layer goes through.
    at_once = train(Model(), None, context_of(name))
    start = [p.detach() for p in Model().parameters()]
    limit = 1e-5
    if name is not None:
        bound = bounds(name, torch.float32)
        limit = math.sqrt(2 * (2 * bound["y"] ** 2 + bound["dgrad"] ** 2 + bound["wgrad"] ** 2))
    for got, want, before in zip(ranks[0]["parameters"], at_once["parameters"], start, strict=True):
        assert relative_error(got - before, want - before) < limit


def test_ddp_trains_as_one_process_does(tmp_path) -> None:
    check(on_two_processes(tmp_path, train_each, ["current"], ["ddp"]), "current", ["ddp"])


@pytest.mark.full
def test_ddp_and_fsdp2_under_every_recipe_and_none(tmp_path) -> None:
    names = [None, *[name for name in STATELESS if not name.startswith("NVFP4") or name == "NVFP4 plain"]]
    found = on_two_processes(tmp_path, train_each, names, ["ddp", "fsdp"])
    for name in names:
        check(found, name, ["ddp", "fsdp"])


@pytest.mark.full
def test_delayed_scaling_without_a_group_keeps_a_state_on_each_rank(tmp_path) -> None:
    found = on_two_processes(tmp_path, train_each, ["delayed"], ["ddp", "fsdp"])
    for one, two in zip(*[result["delayed", "ddp"]["parameters"] for result in found], strict=True):
        assert torch.equal(one, two)
    for kind in ("gradients", "parameters"):
        for result in found:
            for one, two in zip(result["delayed", "ddp"][kind], result["delayed", "fsdp"][kind], strict=True):
                assert torch.equal(one, two)


@pytest.mark.full
def test_amax_over_the_ranks_is_that_of_the_whole_batch(tmp_path) -> None:
    """Then the ranks quantize by the scales of one process that has the whole batch: in the first step only the order
    of sums differs, and the codes that it tips over. A group that is empty on one rank takes part.

    A code of E5M2 is tipped by up to a quarter of its value: one of ROWS x 96 values of like size is 0.25 / 48 of a
    gradient's norm. Four of them, of twice that size, are 0.02.
    """
    limit = 0.02
    found = on_two_processes(tmp_path, train_with_common_amax)
    for name in ("current", "delayed"):
        at_once = train(Model(), None, context_of(name))
        for result in (found[0][name, kind] for kind in ("ddp", "fsdp")):
            count = len(result["parameters"])
            for got, want in zip(result["gradients"][:count], at_once["gradients"][:count], strict=True):
                assert relative_error(got, want) < limit
        if name == "current":
            pairs = zip(found[0]["own amax"]["gradients"][:count], at_once["gradients"][:count], strict=True)
            assert max(relative_error(got, want) for got, want in pairs) > limit
        for kind in ("ddp", "fsdp"):
            one, two = (result[name, kind] for result in found)
            for got, want in zip(one["parameters"] + one["scales"], two["parameters"] + two["scales"], strict=True):
                assert torch.equal(got, want)
            if name == "delayed":
                largest = torch.stack([batch(step)[0].abs().max() for step in range(STEPS)]).max()
                assert torch.equal(one["scales"][0][0], torch.tensor(torch.finfo(torch.float8_e4m3fn).max) / largest)


@pytest.mark.full
def test_sharding_quantized_parameters_is_an_error(tmp_path) -> None:
    for messages in on_two_processes(tmp_path, shard_quantized):
        assert len(messages) == 4
        for message in messages:
            assert "Tensor(" in message
            assert "sharding those is not supported. Keep the parameters in high precision" in message


@pytest.mark.full
def test_ddp_over_quantized_parameters_keeps_the_ranks_equal(tmp_path) -> None:
    """The ranks start from rank 0's values and stay equal to the bit; gradients are those of one process."""
    first, second = on_two_processes(tmp_path, replicate_quantized)
    assert not torch.equal(first["started"], second["started"])
    assert torch.equal(first["broadcast"], first["started"])
    assert torch.equal(second["broadcast"], first["started"])
    assert torch.equal(first["codes"], second["codes"])
    assert second["kept"] == (True, False)  # rank 0's values came in their place
    model = Model()
    model.first.weight = nn.Parameter(Float8CurrentScalingQuantizer()(model.first.weight.detach()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = train(model, list(range(WORLD)), context_of("current"))
    for kind in ("gradients", "parameters"):
        for got, other, want in zip(first[kind], second[kind], alone[kind], strict=True):
            for one, two, expected in zip(*[values(t) for t in (got, other, want)], strict=True):
                assert torch.equal(one, two)
                assert torch.equal(one, expected)


def values(tensor: Tensor) -> list[Tensor]:
    return [tensor.dequantize() if isinstance(tensor, tejit.QuantizedTensor) else tensor]

"""A linear layer, forward and backward, in FP8 with current scaling against bfloat16 ``nn.Linear`` and torchao's
tensorwise FP8, all compiled, on the GPU.

    python -m tests.benchmarks.gpu_linear [--sizes 8192x8192x8192 ...] [--out results.json]

Sizes are tokens x in_features x out_features. Prints the time of each and the ratios; without torchao there is no peer.
Exits with 1 where the bars of 8192x8192x8192 are missed: at least 1.6 times as fast as bfloat16, at most 3% slower than
torchao.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import torch
from torch import nn

import tejit
from tests.benchmarks.measure import event_medians, write

SPEEDUP_BAR, PEER_BAR, BAR_SIZE = 1.6, 1.03, "8192x8192x8192"


def torchao_twin(plain: nn.Linear) -> nn.Module | None:
    """torchao's layer with ``plain``'s weight; None without torchao."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        return None
    twin = nn.Sequential(nn.Linear(plain.in_features, plain.out_features, bias=False, device="meta"))
    twin[0].weight = nn.Parameter(plain.weight.detach().clone())
    return convert_to_float8_training(twin, config=Float8LinearConfig.from_recipe_name("tensorwise"))


def step(module: nn.Module, x: torch.Tensor, grad: torch.Tensor, quantize: bool):
    compiled = torch.compile(module, fullgraph=True)

    def run() -> None:
        with tejit.autocast(enabled=quantize):
            out = compiled(x)
        torch.autograd.grad(out, [x, *module.parameters()], grad)

    return run


def measure(tokens: int, fan_in: int, fan_out: int) -> dict[str, float]:
    x = torch.randn(tokens, fan_in, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(tokens, fan_out, device="cuda", dtype=torch.bfloat16)
    plain = nn.Linear(fan_in, fan_out, bias=False, device="cuda", dtype=torch.bfloat16)
    ours = tejit.Linear(fan_in, fan_out, bias=False, device="cuda", dtype=torch.bfloat16)
    ours.load_state_dict(plain.state_dict())
    calls = {"bf16": step(plain, x, grad, False), "fp8": step(ours, x, grad, True)}
    peer = torchao_twin(plain)
    if peer is not None:
        calls["torchao"] = step(peer, x, grad, False)
    times = event_medians(calls)
    flops = 3 * 2 * tokens * fan_in * fan_out
    found = {f"{name}_us": time for name, time in times.items()}
    found |= {f"{name}_TFLOPs": flops / time / 1e6 for name, time in times.items()}
    found["speedup"] = times["bf16"] / times["fp8"]
    if peer is not None:
        found["over torchao"] = times["fp8"] / times["torchao"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["8192x4096x4096", "8192x4096x14336", "8192x8192x8192"])
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    results, missed = {}, False
    for size in options.sizes:
        results[size] = found = measure(*map(int, size.split("x")))
        line = (
            f"{size}: bf16 {found['bf16_us']:.0f} us ({found['bf16_TFLOPs']:.0f} TFLOP/s), fp8 {found['fp8_us']:.0f} us"
            f" ({found['fp8_TFLOPs']:.0f}), {found['speedup']:.2f} times as fast"
        )
        if "over torchao" in found:
            line += f"; {found['over torchao']:.3f} of torchao's {found['torchao_us']:.0f} us"
        print(line)
        if size == BAR_SIZE:
            missed = found["speedup"] < SPEEDUP_BAR or found.get("over torchao", 0.0) > PEER_BAR
    write(options.out, {"benchmark": "gpu_linear", "results": results})
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())

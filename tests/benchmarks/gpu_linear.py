"""A linear layer, forward and backward, in FP8 against bfloat16 ``nn.Linear``, both compiled, on the GPU.

    python -m tests.benchmarks.gpu_linear [--sizes 8192x8192x8192 ...] [--out results.json]

Sizes are tokens x in_features x out_features. Prints the time of each and the ratio.
"""

from __future__ import annotations

import argparse
import pathlib

import torch
from torch import nn

import tejit
from tests.benchmarks.measure import event_medians, write


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
    times = event_medians({"bf16": step(plain, x, grad, False), "fp8": step(ours, x, grad, True)})
    flops = 3 * 2 * tokens * fan_in * fan_out
    return {
        "bf16_us": times["bf16"],
        "fp8_us": times["fp8"],
        "speedup": times["bf16"] / times["fp8"],
        "bf16_TFLOPs": flops / times["bf16"] / 1e6,
        "fp8_TFLOPs": flops / times["fp8"] / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["8192x4096x4096", "8192x4096x14336", "8192x8192x8192"])
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    results = {}
    for size in options.sizes:
        results[size] = found = measure(*map(int, size.split("x")))
        print(
            f"{size}: bf16 {found['bf16_us']:.0f} us ({found['bf16_TFLOPs']:.0f} TFLOP/s), fp8 {found['fp8_us']:.0f} us"
            f" ({found['fp8_TFLOPs']:.0f}), {found['speedup']:.2f} times as fast"
        )
    write(options.out, {"benchmark": "gpu_linear", "results": results})


if __name__ == "__main__":
    main()

"""Train a Hugging Face model in bf16 and in low precision, from the same weights and on the same data.

The model is a small Llama made from a config, so nothing is downloaded; the text is that of train_lm.py. Three lines
are tejit's: `tejit.convert` makes the linear layers of the decoder tejit's, in place, `tejit.explain` tells what they
will do, and `tejit.autocast` around the forward pass switches quantization on. A pretrained model from
`AutoModelForCausalLM.from_pretrained` is converted by the same lines.

With its defaults it takes three to four minutes on two CPU cores, most of them in torch.compile (--backend none: no
compilation, and slower steps). It writes no file.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in train_lm.py

try:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import tejit
except ModuleNotFoundError as missing:
    if missing.name not in ("torch", "transformers", "tejit"):
        raise
    sys.exit(f"finetune_hf.py needs {missing.name}: run  pip install '.[examples]'  in the folder of pyproject.toml")

from torch import Tensor, nn

from lm.data import Text, TextError, read_text, training_batch, validation_windows
from lm.recipes import BASELINE, DEFAULT, RECIPES

# By how PyTorch compiles: not at all, without its code generator, with it.
BACKENDS = ("none", "aot_eager", "inductor")


class Size(NamedTuple):
    """A model, its windows of `context` bytes, and how many of them a step and a validation take."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    validation: int
    learning_rate: float


SIZES = {
    "tiny": Size(2, 64, 2, 32, 4, 8, 4e-3),
    "small": Size(4, 128, 4, 128, 8, 64, 2e-3),
    "large": Size(12, 1024, 16, 1024, 8, 64, 6e-4),
}


def build(size: Size, seed: int) -> LlamaForCausalLM:
    """A Llama over bytes, with grouped queries and the embedding tied to the head."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=size.width,
        intermediate_size=3 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        max_position_embeddings=size.context,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def in_decoder(module: nn.Module, name: str) -> bool:
    """What is converted: all but the head, which is tied to the embedding and whose errors reach the loss directly."""
    return ".layers." in name


class Trainer:
    """A model with its optimizer; the recipe by name, or plain bf16."""

    def __init__(self, name: str, size: Size, seed: int, device: torch.device, backend: str) -> None:
        make = RECIPES[name].make
        self.recipe, self.device = None if make is None else make(), device
        self.model = build(size, seed).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=size.learning_rate, weight_decay=0.1)
        if self.recipe is not None:  # after the optimizer: it holds the same parameters
            tejit.convert(self.model, recipe=self.recipe, filter_fn=in_decoder)
        if backend != "none":
            torch._dynamo.reset()
            self.model.compile(backend=backend, fullgraph=True, dynamic=False)

    def loss(self, windows: Tensor) -> Tensor:
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(self.device.type, dtype=torch.bfloat16))
            if self.recipe is not None:
                stack.enter_context(tejit.autocast(recipe=self.recipe))
            logits = self.model(input_ids=windows[:, :-1]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())

    def step(self, windows: Tensor) -> Tensor:
        loss = self.loss(windows)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    @torch.no_grad()
    def validate(self, windows: Tensor, batch: int) -> float:
        self.model.eval()
        losses = [self.loss(part) for part in windows.split(batch)]
        self.model.train()
        return torch.stack(losses).mean().item()


def introduction(size: Size, text: Text, arguments: argparse.Namespace) -> str:
    return (
        f"text: {text.files} files, {len(text.train) / 1e6:.1f} MB to train on\n"
        f"model: a Llama of {size.layers} layers of width {size.width}\n"
        f"each run: {arguments.steps} steps of {size.batch} x {size.context} bytes on {arguments.device}"
    )


def run(name: str, size: Size, text: Text, arguments: argparse.Namespace) -> float:
    """Train with one recipe; returns the validation loss in nats per byte."""
    label, compiles = RECIPES[name].label, arguments.backend != "none"
    first = "; torch.compile comes before the first step and takes a minute on two CPU cores" if compiles else ""
    print(f"\n{label}: building the model{first}", flush=True)
    trainer = Trainer(name, size, arguments.seed, arguments.device, arguments.backend)
    generator = torch.Generator().manual_seed(arguments.seed)
    if trainer.recipe is not None:
        tokens = training_batch(text, 2, size.context, torch.Generator().manual_seed(0))[:, :-1]
        print(str(tejit.explain(trainer.model, input_ids=tokens, recipe=trainer.recipe)).splitlines()[0], flush=True)
    started = time.perf_counter()
    for step in range(1, arguments.steps + 1):
        loss = trainer.step(training_batch(text, size.batch, size.context, generator))
        if step == 1 or step % max(1, arguments.steps // 5) == 0:
            seconds = time.perf_counter() - started
            print(f"{label}: step {step}, loss {loss.item():.3f}, {seconds:.0f} s", flush=True)
    again = ", compiled once more for evaluation" if compiles else ""
    print(f"{label}: validation on {size.validation} x {size.context} bytes{again}", flush=True)
    return trainer.validate(validation_windows(text, size.validation, size.context), size.batch)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--recipe", nargs="+", choices=RECIPES, default=DEFAULT, metavar="NAME", help=", ".join(RECIPES)
    )
    parser.add_argument("--size", choices=SIZES, default="small", help="large is meant for a GPU")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of each run; default 150")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the data; default 0")
    default_device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--device", type=torch.device, default=default_device, help=f"default here {default_device}")
    parser.add_argument(
        "--backend", choices=BACKENDS, default="inductor", help="of torch.compile; none: do not compile"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 done, 1 an error that was printed."""
    arguments = parse(argv)
    size = SIZES[arguments.size]
    try:
        text = read_text().to(arguments.device)
    except TextError as error:
        print(f"finetune_hf.py: {error}", file=sys.stderr)
        return 1
    print(introduction(size, text, arguments), flush=True)
    losses = {name: run(name, size, text, arguments) for name in arguments.recipe}
    print()
    for name, loss in losses.items():
        against = f"  {100 * (loss / losses[BASELINE] - 1):+.2f} % against bf16" if BASELINE in losses else ""
        print(f"{name} ({RECIPES[name].label}): validation loss {loss:.4f}{against if name != BASELINE else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

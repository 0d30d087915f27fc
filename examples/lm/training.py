"""One training run: the same weights, data and schedule for every recipe, so that only the format differs."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import tejit
from lm.data import Text, training_batch
from lm.masters import Masters
from lm.model import LanguageModel, Shape
from lm.recipes import Options

EVALUATIONS = 10
FETCH_EVERY = 10


@dataclass(frozen=True)
class Size:
    """A model and how to train it; `batch` counts windows of `shape.context` bytes, and `validation_bytes` are what
    is validated on each time."""

    shape: Shape
    batch: int
    steps: int
    learning_rate: float
    warmup: int
    validation_bytes: int = 16_384

    @property
    def validation_count(self) -> int:
        """Windows to validate on: whole batches, so that a compiled model meets one shape only."""
        return self.batch * max(1, self.validation_bytes // (self.batch * self.shape.context))


SIZES = {
    "tiny": Size(Shape(layers=2, width=64, heads=2, context=64), 16, 300, 4e-3, 20),
    "small": Size(Shape(layers=4, width=128, heads=4, context=128), 16, 300, 2e-3, 40),
    "large": Size(Shape(layers=12, width=1024, heads=16, context=1024), 8, 1000, 6e-4, 100, 131_072),
}


@dataclass
class History:
    """Losses in nats per byte: one training loss a step, and validation losses with the steps they belong to.

    `seconds` is the time of training without validation and without each process's first step, which may
    compile; `timed_bytes` is what was trained on in it.
    """

    train: list[float] = field(default_factory=list)
    validation_steps: list[int] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    seconds: float = 0.0
    timed_bytes: int = 0

    @property
    def bytes_per_second(self) -> float:
        return self.timed_bytes / self.seconds if self.seconds else math.nan


class StopRequest:
    """Asks the loop to stop between two steps: after `steps` of them, or at the first Ctrl-C."""

    def __init__(self, steps: int | None = None) -> None:
        self.steps_left = steps
        self.requested = steps == 0

    def step_done(self) -> None:
        if self.steps_left is not None:
            self.steps_left -= 1
            self.requested |= self.steps_left <= 0

    @contextmanager
    def on_interrupt(self) -> Iterator[None]:
        """Turn the first Ctrl-C into a request, so that the step is finished; the second one ends at once."""

        def handle(signum: int, frame: Any) -> None:
            self.requested = True
            signal.signal(signal.SIGINT, signal.default_int_handler)

        previous = signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)


class Run:
    """The state of training with one recipe; everything that later steps depend on is in `state_dict`."""

    def __init__(
        self,
        name: str,
        size: Size,
        steps: int,
        *,
        seed: int,
        device: torch.device,
        options: Options | None = None,
        compile: bool = False,
    ) -> None:
        options = options or Options()
        self.name, self.label = name, options.label(name)
        self.size, self.steps, self.device = size, steps, device
        self.recipe = options.recipe(name, size.shape.layers)
        self.step, self.history = 0, History()

        torch.manual_seed(seed)
        self.data_generator = torch.Generator().manual_seed(seed)
        self.model = LanguageModel(size.shape, seed=seed).to(device)
        before = dict(self.model.named_parameters())
        if self.recipe is not None:
            tejit.convert(
                self.model,
                recipe=self.recipe,
                filter_fn=lambda module, name: name.startswith("blocks."),
                quantize_params=options.quantized_params,
            )
        self.masters = Masters(self.model, before)
        trained = self.masters.trained(self.model)
        matrices = [parameter for parameter in trained if parameter.dim() > 1]
        vectors = [parameter for parameter in trained if parameter.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=size.learning_rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.loss: Callable[[Tensor], Tensor] = self._loss
        if compile:
            torch._dynamo.reset()  # the graphs of an earlier run count towards a limit
            self.loss = torch.compile(self._loss, dynamic=False, fullgraph=True)

    @property
    def done(self) -> bool:
        return self.step >= self.steps

    def _loss(self, windows: Tensor) -> Tensor:
        logits = self.model(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())

    def precision(self) -> ExitStack:
        """The contexts of a forward pass: bf16 by torch's autocast in every run, the recipe within it."""
        stack = ExitStack()
        stack.enter_context(torch.autocast(self.device.type, dtype=torch.bfloat16))
        if self.recipe is not None:
            stack.enter_context(tejit.autocast(recipe=self.recipe))
        return stack

    def learning_rate(self) -> float:
        """Linear warm-up, then half a cosine down to a twentieth."""
        warmup = min(self.size.warmup, max(1, self.steps // 5))
        if self.step < warmup:
            return self.size.learning_rate * (self.step + 1) / warmup
        progress = (self.step - warmup) / max(1, self.steps - warmup)
        return self.size.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))

    def train_step(self, text: Text) -> Tensor:
        """One optimizer step on `text`, which is on the run's device. Returns the loss, still there: reading it would
        make the GPU wait."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        windows = training_batch(text, self.size.batch, self.size.shape.context, self.data_generator)
        with self.precision():
            loss = self.loss(windows)
        loss.backward()
        self.masters.take_gradients()
        nn.utils.clip_grad_norm_([p for group in self.optimizer.param_groups for p in group["params"]], 1.0)
        self.optimizer.step()
        self.masters.write_back()
        self.optimizer.zero_grad()
        self.step += 1
        return loss.detach()

    @torch.no_grad()
    def validate(self, windows: Tensor) -> float:
        """The mean loss on `windows` (count, context + 1), on the run's device, noted in the history."""
        self.model.eval()
        with self.precision():
            losses = [self.loss(batch) for batch in windows.split(self.size.batch)]
        self.model.train()
        loss = torch.stack(losses).mean().item()
        self.history.validation_steps.append(self.step)
        self.history.validation.append(loss)
        return loss

    def state_dict(self) -> dict[str, Any]:
        state = {
            "step": self.step,
            "history": asdict(self.history),
            "model": self.model.state_dict(),
            "masters": self.masters.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "data_generator": self.data_generator.get_state(),
            "torch_generator": torch.get_rng_state(),
        }
        if self.device.type == "cuda":  # recipes that round stochastically draw from it
            state["cuda_generator"] = torch.cuda.get_rng_state(self.device)
        return state

    def finished_state_dict(self) -> dict[str, Any]:
        """What is kept of a run that needs no resuming: the history, and the weights on the CPU."""
        weights = self.model.state_dict()
        weights = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in weights.items()}
        return {"step": self.step, "history": asdict(self.history), "model": weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.history = state["step"], History(**state["history"])
        self.model.load_state_dict(state["model"])
        self.masters.load_state_dict(state["masters"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.data_generator.set_state(state["data_generator"])
        torch.set_rng_state(state["torch_generator"])
        if self.device.type == "cuda" and "cuda_generator" in state:
            torch.cuda.set_rng_state(state["cuda_generator"], self.device)


def progress_bar(run: Run) -> tqdm[NoReturn]:
    return tqdm(
        total=run.steps,
        initial=run.step,
        desc=run.label,
        unit="step",
        dynamic_ncols=True,
        mininterval=0.1 if sys.stderr.isatty() else 10,  # a log keeps every line
    )


def train(run: Run, text: Text, validation: Tensor, *, stop: StopRequest, save: Callable[[], None]) -> None:
    """Train until the run is done or `stop` asks to; calls `save` after each validation.

    Raises:
        FloatingPointError: a training loss is not finite.
    """
    every = max(1, run.steps // EVALUATIONS)
    pending: list[Tensor] = []
    started: float | None = None  # None until the first step is over: it may compile
    with progress_bar(run) as bar:
        val = run.history.validation[-1] if run.history.validation else run.validate(validation)
        while not run.done and not stop.requested:
            pending.append(run.train_step(text))
            stop.step_done()
            bar.update()
            validating = run.step % every == 0 or run.done
            if not (validating or started is None or stop.requested or run.step % FETCH_EVERY == 0):
                continue
            losses = torch.stack(pending).tolist()  # waits for the device, so the clock is read after it
            now = time.perf_counter()
            if started is not None:
                run.history.seconds += now - started
                run.history.timed_bytes += len(pending) * run.size.batch * run.size.shape.context
            pending.clear()
            run.history.train += losses
            if not math.isfinite(sum(losses)):
                raise FloatingPointError(
                    f"recipe {run.name!r}: the training loss is {losses[-1]} at step {run.step}; "
                    "a lower learning rate or another --seed may help"
                )
            if validating:
                val = run.validate(validation)
            bar.set_postfix(train=f"{losses[-1]:.3f}", val=f"{val:.3f}", refresh=False)
            if validating:
                save()
            started = time.perf_counter()

"""Train a small byte-level language model in bf16 and in low precision, and compare the losses.

The text is the Python standard library's own source code, so nothing is downloaded. Every run starts
from the same weights and sees the same data in the same order; fp32 parameters, AdamW,
torch.autocast(bfloat16). Only the Linear layers inside the transformer change their format.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

# Read once, when torch starts its threads. By default they spin while they wait for each other, and as soon
# as any other program wants a core, a step takes ten times as long. The results are the same.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

try:
    import matplotlib  # noqa: F401
    import torch
    import tqdm  # noqa: F401

    import tejit  # noqa: F401
except ModuleNotFoundError as missing:
    if missing.name not in ("matplotlib", "torch", "tqdm", "tejit"):
        raise
    sys.exit(f"train_lm.py needs {missing.name}: run  pip install '.[examples]'  in the folder of pyproject.toml")

from lm.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from lm.data import Text, TextError, read_text, unigram_entropy, validation_windows
from lm.model import parameter_count
from lm.recipes import DEFAULT, RECIPES, Options
from lm.report import draw, table
from lm.results import Result, Results, ResultsError, merge
from lm.training import SIZES, History, Run, Size, StopRequest, train

FAILED, STOPPED = 1, 3

RESUME_HELP = """\
several commands, one picture:
  train_lm.py --recipe none    --results none.json
  train_lm.py --recipe current --results current.json
  train_lm.py --merge none.json current.json --out loss.png

resuming:
  The checkpoint holds weights, optimizer, step, the states of the random generators and the curves. A
  resumed run goes on exactly where the file ends: every later loss and weight equals the unbroken run's,
  bit for bit. That covers runs with the same arguments, Python sources, torch, kind of machine and number
  of threads: on the CPU always, on a GPU with --deterministic (without it, attention's backward adds up in
  a changing order). It does not cover tokens/s, nor another device or another --compile after the break.
  Ctrl-C finishes the current step, saves and stops.
"""


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def device(text: str) -> torch.device:
    try:
        wanted = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no device: give cpu, cuda or cuda:1") from None
    if wanted.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text!r} is not supported here: give cpu, cuda or cuda:1")
    if wanted.type == "cuda":
        count = torch.cuda.device_count()
        if (wanted.index or 0) >= count:
            raise argparse.ArgumentTypeError(f"{text!r}: torch {torch.__version__} sees {count} CUDA devices here")
    return wanted


def picture(text: str) -> Path:
    path, endings = Path(text), (".png", ".svg", ".pdf")
    if path.suffix.lower() not in endings:
        raise argparse.ArgumentTypeError(f"{text!r} ends in none of {', '.join(endings)}")
    return in_existing_folder(text)


def in_existing_folder(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder {str(path.parent)!r} does not exist: make it first")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder: name a file in it")
    return path


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=RESUME_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = ", ".join(f"{name} {size.steps}" for name, size in SIZES.items())
    recipes = ", ".join(f"{name}: {row.label}" for name, row in RECIPES.items())
    parser.add_argument(
        "--recipe",
        nargs="+",
        choices=[*RECIPES, "all"],
        default=DEFAULT,
        metavar="NAME",
        help=f"one or more of: {recipes}, or all; default {' '.join(DEFAULT)}",
    )
    parser.add_argument("--high-precision-ends", action="store_true", help="keep the first and the last block in bf16")
    parser.add_argument(
        "--quantized-params",
        action="store_true",
        help="let the weights live quantized, with masters in fp32 for the optimizer",
    )
    parser.add_argument("--size", choices=SIZES, default="small", help="the model; large is meant for a GPU")
    parser.add_argument("--steps", type=positive, help=f"optimizer steps of each run; default {steps}")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the data; default 0")
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=device, default=default_device, help=f"default here {default_device}")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model, backward included")
    parser.add_argument(
        "--out", type=picture, default=Path("loss.png"), metavar="FILE", help="the picture; default loss.png"
    )
    parser.add_argument(
        "--results", type=in_existing_folder, metavar="FILE", help="write the finished runs there, for --merge"
    )
    parser.add_argument(
        "--merge",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="train nothing: one table and one picture of the runs in these files",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint (see below)")
    parser.add_argument(
        "--checkpoint",
        type=in_existing_folder,
        default=Path("checkpoint.pt"),
        metavar="FILE",
        help="written after each validation; default checkpoint.pt",
    )
    parser.add_argument(
        "--stop-after",
        type=positive,
        metavar="N",
        help="save and stop after N steps of this call, for --resume",
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="use only deterministic GPU algorithms, which may be slower",
    )
    return parser.parse_args(argv)


def make_deterministic() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    # Filling fresh memory costs time, and nothing here reads it before writing.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)


def introduction(size: Size, steps: int, text: Text, device: torch.device) -> str:
    shape, threads = size.shape, f", threads: {torch.get_num_threads()}" if device.type == "cpu" else ""
    parameters = parameter_count(shape)
    return (
        f"text: {text.files} files, {len(text.train) / 1e6:.1f} MB to train on, "
        f"{len(text.validation) / 1e6:.1f} MB held out\n"
        f"model: {shape.layers} layers of width {shape.width}, {parameters / 1e6:.1f} M parameters\n"
        f"each run: {steps} steps of {size.batch} x {shape.context} bytes on {device}{threads}"
    )


def run_recipes(arguments: argparse.Namespace, names: Sequence[str]) -> Results | None:
    """Train with each recipe. Returns the results, None when stopped.

    Raises:
        TextError: there is no source text on this machine.
        CheckpointError: with --resume, the checkpoint is missing, unreadable or made with other settings.
        FloatingPointError: a loss is not finite.
    """
    size, path = SIZES[arguments.size], arguments.checkpoint
    steps = arguments.steps or size.steps
    text = read_text().to(arguments.device)
    validation = validation_windows(text, size.validation_count, size.shape.context)
    # What runs that are compared have in common.
    common = asdict(size) | {"size": arguments.size, "steps": steps, "text": text.digest}
    options = Options(arguments.high_precision_ends, arguments.quantized_params)
    # What the losses depend on; a checkpoint made with anything else is refused.
    settings = common | {"seed": arguments.seed} | asdict(options)
    states = load_checkpoint(path, settings) if arguments.resume else {}
    if not arguments.resume and path.exists():
        print(f"{path} will be replaced (--resume would go on from it)")
    print(introduction(size, steps, text, arguments.device), flush=True)

    stop = StopRequest(arguments.stop_after)
    for name in names:
        state = states.get(name)
        if state is not None and "optimizer" not in state:
            continue  # finished in an earlier call
        run = Run(
            name,
            size,
            steps,
            seed=arguments.seed,
            device=arguments.device,
            options=options,
            compile=arguments.compile,
        )
        if state is not None:
            run.load_state_dict(state)

        def save(run: Run = run) -> None:
            states[run.name] = run.finished_state_dict() if run.done else run.state_dict()
            save_checkpoint(path, settings, states)

        with stop.on_interrupt():
            train(run, text, validation, stop=stop, save=save)
        if not run.done:
            save()
            print(f"stopped after step {run.step} of recipe {name!r}: add --resume to go on from {path}")
            return None
    runs = [Result(name, options.label(name), arguments.seed, History(**states[name]["history"])) for name in names]
    return Results(common, unigram_entropy(text, validation), tuple(runs))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 done, 1 an error that was printed, 3 stopped, to be resumed."""
    arguments = parse(argv)
    if arguments.deterministic:
        make_deterministic()
    names = [name for name in RECIPES if name in arguments.recipe or "all" in arguments.recipe]
    try:
        results = merge(arguments.merge) if arguments.merge else run_recipes(arguments, names)
    except (TextError, CheckpointError, ResultsError, FloatingPointError) as error:
        print(f"train_lm.py: {error}", file=sys.stderr)
        return FAILED
    if results is None:
        return STOPPED
    if arguments.results is not None:
        results.save(arguments.results)
    print(table(results))
    draw(results, arguments.out)
    print(f"curves: {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

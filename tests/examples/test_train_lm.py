"""The main job, run as a user runs it: the real script in a process of its own."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tejit
from tests import pace

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RECIPES = ("none", "current")


def environment() -> dict[str, str]:
    """The script imports the tejit of these tests, installed or not."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def run_script(folder: Path, *arguments: str, status: int = 0) -> str:
    """Run train_lm.py in `folder` and return what it printed. One thread is fastest for a tiny model."""
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "train_lm.py"), "--device", "cpu", *arguments],
        cwd=folder,
        env=environment() | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == status, result.stdout + result.stderr
    return result.stdout + result.stderr


def printed_losses(output: str) -> dict[str, float]:
    """The table's column of validation losses: by recipe, and the unigram entropy under "entropy"."""
    rows = re.findall(r"^(\S+) \(.*?\)\s+(\d+\.\d+)\s", output, re.MULTILINE)
    losses = {name: float(loss) for name, loss in rows}
    entropy = re.search(r"^byte frequencies alone\s+(\d+\.\d+)$", output, re.MULTILINE)
    assert entropy is not None, output
    return losses | {"entropy": float(entropy[1])}


def load(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoint.pt", weights_only=True)["runs"]


TINY = ("--size", "tiny", "--steps", "12")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("unbroken")
    return folder, run_script(folder, *TINY, "--results", "runs.json")


@pytest.fixture(scope="module")
def examples_on_path() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield


def test_prints_a_row_for_each_recipe_and_draws_the_curves(unbroken: tuple[Path, str]) -> None:
    folder, output = unbroken
    losses = printed_losses(output)
    assert list(losses) == [*RECIPES, "entropy"]
    assert 3.0 < losses["entropy"] < 3.7
    difference = re.search(r"^current .* ([+-]\d+\.\d\d) %", output, re.MULTILINE)
    assert difference is not None, output
    assert float(difference[1]) == pytest.approx(100 * (losses["current"] / losses["none"] - 1), abs=0.02)
    picture = (folder / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000


def test_every_recipe_is_a_row_of_its_own(tmp_path: Path, examples_on_path: None) -> None:
    from lm.recipes import RECIPES as rows

    output = run_script(tmp_path, "--size", "tiny", "--steps", "4", "--recipe", "all")
    assert list(printed_losses(output)) == [*rows, "entropy"]
    assert all(f"{name} ({row.label})" in output for name, row in rows.items())
    runs = load(tmp_path)
    losses = [run["history"]["train"] for run in runs.values()]
    assert all(loss[0] == pytest.approx(math.log(256), rel=0.02) for loss in losses)
    assert len({loss[-1] for loss in losses}) == len(rows) == 6  # no two recipes compute alike


def test_recipes_are_compared_as_named(tmp_path: Path) -> None:
    output = run_script(tmp_path, "--size", "tiny", "--steps", "1", "--recipe", "mxfp8", "none")
    assert list(printed_losses(output)) == ["none", "mxfp8", "entropy"]


def test_runs_share_weights_and_data_and_differ_by_the_format(unbroken: tuple[Path, str]) -> None:
    histories = [load(unbroken[0])[name]["history"] for name in RECIPES]
    assert [len(history["train"]) for history in histories] == [12, 12]
    first, last = [[history["train"][step] for history in histories] for step in (0, -1)]
    assert first[0] == pytest.approx(first[1], rel=1e-3)
    assert first[0] == pytest.approx(math.log(256), rel=0.02)  # untrained: every byte equally likely
    assert last[0] != last[1]
    assert last[0] == pytest.approx(last[1], rel=0.05)


def test_resumed_equals_unbroken_to_the_bit(unbroken: tuple[Path, str], tmp_path: Path) -> None:
    assert "step 5 of recipe 'none'" in run_script(tmp_path, *TINY, "--stop-after", "5", status=3)
    stopped = run_script(tmp_path, *TINY, "--resume", "--stop-after", "13", status=3)
    assert "step 6 of recipe 'current'" in stopped
    run_script(tmp_path, *TINY, "--resume")
    resumed, whole = load(tmp_path), load(unbroken[0])
    for name in RECIPES:
        for curve in ("train", "validation_steps", "validation"):
            assert resumed[name]["history"][curve] == whole[name]["history"][curve], (name, curve)
        for key, weight in whole[name]["model"].items():
            assert torch.equal(resumed[name]["model"][key], weight), (name, key)


def test_loss_falls_below_the_unigram_entropy(tmp_path: Path) -> None:
    losses = printed_losses(run_script(tmp_path, "--size", "tiny", "--steps", "100", "--recipe", "current"))
    assert losses["current"] < losses["entropy"] - 0.3


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--steps", "0"], "0 is not a positive number"),
        (["--recipe", "fp7"], "invalid choice: 'fp7'"),
        (["--device", "nowhere"], "'nowhere' is no device"),
        (["--device", "cuda:99"], "'cuda:99': torch"),
        (["--out", "loss.txt"], "'loss.txt' ends in none of .png"),
        (["--out", "missing/loss.png"], "the folder 'missing' does not exist"),
        (["--checkpoint", "."], "'.' is a folder"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str],
    complaint: str,
    examples_on_path: None,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from train_lm import parse

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        parse(arguments)
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "there is no checkpoint"),
        (b"", "cannot be read"),
        (b"PK\x03\x04 torn off", "cannot be read"),
        ({"weights": torch.ones(1)}, "is no checkpoint of this program"),
        ({"format": 1, "settings": {"seed": 1}, "runs": {}}, "was made with seed = 1, this run has seed = 0"),
    ],
)
def test_checkpoints_that_cannot_be_resumed_say_why(
    content: Any, complaint: str, examples_on_path: None, tmp_path: Path
) -> None:
    from lm.checkpoint import CheckpointError, load_checkpoint

    path = tmp_path / "checkpoint.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=re.escape(complaint)):
        load_checkpoint(path, {"seed": 0})


def test_text_is_split_by_file_and_leaves_tests_and_packages_out(examples_on_path: None, tmp_path: Path) -> None:
    from lm.data import MAX_BYTES_PER_FILE, TextError, is_validation, read_text, source_files

    for number in range(200):
        folder = tmp_path / ("site-packages" if number % 10 == 0 else "test" if number % 10 == 1 else "package")
        folder.mkdir(exist_ok=True)
        line = f"{number:03} {folder.name}\n"
        (folder / f"module{number}.py").write_text(line * (2 * MAX_BYTES_PER_FILE // len(line)))
    text = read_text(tmp_path)
    both = [bytes(split.tolist()) for split in (text.train, text.validation)]
    assert not any(b"site-packages" in split or b"test" in split for split in both)
    files = source_files(tmp_path)
    assert text.files == len(files) == 160
    for path in files:
        number = re.search(r"module(\d+)", path)
        assert number is not None
        mark = f"{int(number[1]):03} package\n".encode()
        assert [mark in split for split in both] == [not is_validation(path), is_validation(path)]
    assert sum(map(len, both)) == 160 * MAX_BYTES_PER_FILE + 158  # cut, and joined by line ends
    assert read_text(tmp_path).digest == text.digest

    (tmp_path / "empty").mkdir()
    with pytest.raises(TextError, match="holds 0 bytes of Python source"):
        read_text(tmp_path / "empty")


def test_unigram_entropy_is_the_cross_entropy_of_byte_frequencies(examples_on_path: None) -> None:
    from lm.data import Text, unigram_entropy

    train = torch.tensor([97] * 600 + [98] * 300 + [99] * 100, dtype=torch.uint8)
    windows = torch.tensor([[0, 97, 98], [0, 97, 200]])
    frequencies = np.array([601, 301, 601, 1]) / (1000 + 256)
    expected = -np.log(frequencies).mean()
    assert unigram_entropy(Text(train, train, 1, ""), windows) == pytest.approx(expected, rel=1e-12)


def test_weights_depend_on_the_seed_alone(examples_on_path: None) -> None:
    from lm.model import LanguageModel, Shape

    shape = Shape(layers=2, width=32, heads=2, context=16)
    expected = LanguageModel(shape, seed=3).state_dict()
    torch.manual_seed(12345)
    torch.rand(7)
    found = LanguageModel(shape, seed=3).state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    other = LanguageModel(shape, seed=4).state_dict()
    assert not torch.equal(other["head.weight"], expected["head.weight"])


def test_large_is_as_large_as_it_says(examples_on_path: None) -> None:
    from lm.model import parameter_count
    from lm.training import SIZES

    large = SIZES["large"]
    assert parameter_count(large.shape) > 100e6
    assert (large.batch * large.shape.context, large.steps) == (8192, 1000)
    assert large.validation_count % large.batch == 0


def test_ends_in_high_precision_are_the_first_and_the_last_block(examples_on_path: None) -> None:
    from lm.recipes import Options
    from lm.training import SIZES, Run

    run = Run("mxfp8", SIZES["small"], 1, seed=0, device=torch.device("cpu"), options=Options(high_precision_ends=True))
    windows = torch.zeros(1, 33, dtype=torch.int64)
    with run.precision():
        found = tejit.explain(run.model, windows[:, :-1]).products
    high = {p.layer for p in found if p.runs == "high precision"}
    quantized = {p.layer for p in found} - high
    layers = ("attention.qkv", "attention.out", "mlp.up", "mlp.out")
    assert high == {"head"} | {f"blocks.{index}.{layer}" for index in (0, 3) for layer in layers}
    assert quantized == {f"blocks.{index}.{layer}" for index in (1, 2) for layer in layers}


def test_quantized_weights_learn_by_their_masters_and_resume_to_the_bit(examples_on_path: None, tmp_path: Path) -> None:
    from lm.data import Text
    from lm.recipes import Options
    from lm.training import SIZES, Run

    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 9, (2, 4000), dtype=torch.uint8, generator=generator)
    text = Text(data[0], data[1], 1, "")

    def run(steps: int = 4) -> Run:
        options = Options(quantized_params=True)
        return Run("mxfp8", SIZES["tiny"], steps, seed=0, device=torch.device("cpu"), options=options)

    unbroken, broken = run(), run()
    assert len(unbroken.masters.pairs) == 8
    losses = [unbroken.train_step(text).item() for _ in range(4)]
    assert losses[-1] < losses[0]
    for parameter, master in unbroken.masters.pairs.values():
        quantized = parameter.detach().clone()
        with torch.no_grad():
            quantized.copy_(master)
        assert torch.equal(quantized.dequantize(), parameter.dequantize())
    for _ in range(2):
        broken.train_step(text)
    torch.save(broken.state_dict(), tmp_path / "state.pt")
    resumed = run()
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [resumed.train_step(text).item() for _ in range(2)] == losses[2:]


def test_files_of_results_become_one_table_and_one_picture(
    unbroken: tuple[Path, str],
    examples_on_path: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from train_lm import main

    folder, output = unbroken
    monkeypatch.chdir(tmp_path)
    arguments = [*TINY, "--device", "cpu", "--recipe", "none", "--seed", "1", "--results", "seed1.json"]
    assert main(arguments) == 0
    capsys.readouterr()
    assert main(["--merge", str(folder / "runs.json"), "seed1.json", "--out", "all.png"]) == 0
    merged = capsys.readouterr().out
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    rows = re.findall(r"^(\S+) \((.*?)\)\s+(\d+\.\d+)", merged, re.MULTILINE)
    assert [row[:2] for row in rows] == [
        ("none", "bf16, seed 0"),
        ("current", "FP8 current scaling, seed 0"),
        ("none", "bf16, seed 1"),
    ]
    own = printed_losses(output)
    losses = [float(loss) for *_, loss in rows]
    assert losses[:2] == [own["none"], own["current"]]
    apart = 100 * (max(losses[0], losses[2]) / min(losses[0], losses[2]) - 1)
    found = re.search(r"^2 seeds of bf16: .*, (\d+\.\d+) % apart\.$", merged, re.MULTILINE)
    assert found is not None, merged
    assert float(found[1]) == pytest.approx(apart, abs=0.02)
    # Seeds are counted, not runs.
    for files, seeds in (([folder / "runs.json"] * 2, 0), ([folder / "runs.json"] * 2 + [Path("seed1.json")], 2)):
        assert main(["--merge", *map(str, files), "--out", "all.png"]) == 0
        again = capsys.readouterr().out
        assert again.count("none (bf16") == len(files)
        assert re.findall(r"^(\d+) seeds of", again, re.MULTILINE) == [str(seeds)] * (seeds > 0)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "is no file of results (FileNotFoundError"),
        ("{", "is no file of results (JSONDecodeError"),
        ("{}", "is no file of results (KeyError"),
        ('{"format": 0}', "has format 0, this program reads 1"),
        ('{"format": 1, "settings": {"steps": 13}, "entropy": 3, "runs": []}', "was made with steps = 13"),
    ],
)
def test_results_that_cannot_be_merged_say_why(
    content: str | None, complaint: str, examples_on_path: None, tmp_path: Path
) -> None:
    from lm.results import Results, ResultsError, merge

    Results({"steps": 12}, 3.3, ()).save(tmp_path / "good.json")
    if content is not None:
        (tmp_path / "bad.json").write_text(content)
    with pytest.raises(ResultsError, match=re.escape(complaint)):
        merge([tmp_path / "good.json", tmp_path / "bad.json"])


def test_attention_never_looks_ahead(examples_on_path: None) -> None:
    from lm.model import LanguageModel, Shape

    model = LanguageModel(Shape(layers=2, width=32, heads=2, context=16))
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 9] = 200
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


@pytest.mark.perf
def test_the_text_is_read_in_seconds(examples_on_path: None) -> None:
    from lm.data import read_text

    started = time.perf_counter()
    text = read_text()
    assert time.perf_counter() - started < 5
    assert len(text.train) > 5_000_000


@pytest.mark.full
def test_default_run_meets_its_bars(tmp_path: Path) -> None:
    """On two cores within four minutes, far below the unigram entropy, FP8 within 2 % of bf16."""
    started = time.perf_counter()
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "train_lm.py")],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - started
    assert result.returncode == 0, result.stderr
    losses = printed_losses(result.stdout)
    assert losses["none"] < losses["entropy"] - 1
    assert losses["current"] == pytest.approx(losses["none"], rel=0.02)
    assert seconds < 240 * pace.of_imports()

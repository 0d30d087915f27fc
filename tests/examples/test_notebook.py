"""The notebook runs from its first cell to its last, and the committed output is that of such a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"

nbformat = pytest.importorskip("nbformat")


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell) -> str:
    """What a cell wrote to its output, warnings apart."""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def test_it_is_committed_with_the_output_of_one_run() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    assert sum("text/html" in output.get("data", {}) for cell in cells for output in cell.outputs) == 1  # explain's


def test_it_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    committed, notebook = (nbformat.read(NOTEBOOK, as_version=4) for _ in range(2))
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}})
    client.execute()  # an exception in a cell is raised here
    for cell, before in zip(code_cells(notebook), code_cells(committed), strict=True):
        # Numbers may differ by machine; who is told of, and in which order, does not.
        got, want = (text.splitlines() for text in (printed(cell), printed(before)))
        assert [line.split()[:1] for line in got] == [line.split()[:1] for line in want]

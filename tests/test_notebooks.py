"""The notebooks of the documentation run, and are kept with their outputs, which the site shows.

``python -m tests.test_notebooks`` runs them and keeps what they put out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pages import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
MAX_BYTES = 300_000

nbformat = pytest.importorskip("nbformat", reason="needs the extra dev")

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code(notebook: Any) -> list[Any]:
    """The cells that run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def executed(path: Path, folder: Path) -> Any:
    """The notebook with its outputs, run in another folder by this interpreter. Raises what a cell raises."""
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
    return notebook


@each
def test_a_notebook_is_kept_with_all_its_outputs_and_small(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < MAX_BYTES
    assert [cell.execution_count for cell in code(notebook)] == [*range(1, 1 + len(code(notebook)))]
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data"}
    assert {output.name for output in outputs if output.output_type == "stream"} == {"stdout"}, "no warnings"
    assert str(ROOT) not in path.read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")  # of Jupyter
@each
def test_a_notebook_runs_and_puts_out_what_it_is_kept_with(path: Path, tmp_path: Path) -> None:
    kept = [kinds(cell) for cell in code(nbformat.read(path, as_version=4))]
    assert [kinds(cell) for cell in code(executed(path, tmp_path))] == kept


def kinds(cell: Any) -> list[str]:
    """What a cell puts out: so many lines of text, which may come in several pieces, or a picture."""
    text = "".join(output.text for output in cell.outputs if output.output_type == "stream")
    shown = [", ".join(sorted(output.data)) for output in cell.outputs if output.output_type != "stream"]
    return [f"{text.count(chr(10))} lines", *shown]


def main() -> None:
    """Runs all, and keeps their outputs."""
    for path in NOTEBOOKS:
        nbformat.write(executed(path, path.parent), path)


if __name__ == "__main__":
    main()

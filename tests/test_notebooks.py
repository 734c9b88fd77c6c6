"""The notebooks run from what comes with the package, and their outputs are stored."""

import ast
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import gac
from gac import plots

FOLDER = Path(__file__).parent.parent / "notebooks"
WITH_SMOLLM2 = "03_from_model_to_checkpoint"
NAMES = ["01_cliffs_of_a_gpu", "02_a_plan_versus_palu", pytest.param(WITH_SMOLLM2, marks=pytest.mark.smollm2)]

TWO_LAYERS = """
from gac.models import loading
from gac.models.packaged import Packaged
read, config = Packaged.read, Packaged.config
def first_two(*given):
    model = read(*given)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:2], 2
    return model
def of_two(*given):
    made = config(*given)
    made.num_hidden_layers = 2
    return made
Packaged.read, Packaged.config = first_two, of_two
loading.SHAPES = {name: shapes for name, shapes in loading.SHAPES.items() if name != "smollm2"}
"""
"""SmolLM2 with its first two layers: real weights at real sizes, in a tenth of the time."""
SHORTER = {"wiki-sample:8x512": "wiki-sample:2x128", '"windows": 8, "length": 512': '"windows": 2, "length": 128'}


def cells(name: str) -> list[Any]:
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_every_notebook_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == {str(getattr(one, "values", (one,))[0]) for one in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # what it makes goes away with the test
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    if name == WITH_SMOLLM2:
        for cell in notebook.cells:
            for long, short in SHORTER.items():
                cell.source = cell.source.replace(long, short)
        notebook.cells.insert(0, nbformat.v4.new_code_cell(TWO_LAYERS))
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": FOLDER}}).execute()


PUBLIC = {"gac": {*gac.__all__, "plots"}, "plots": set(plots.__all__)}


def names_of_gac(code: str) -> set[str]:
    """What a cell takes of GAC: imported from ``gac`` and modules in it, or an attribute of ``gac`` or ``plots``."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "gac":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("gac.")}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in PUBLIC:
            found.add(ast.unparse(node))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_what_is_stored_was_run_in_order_and_uses_public_names_alone(name: str) -> None:
    assert [cell.execution_count for cell in cells(name)] == list(range(1, len(cells(name)) + 1))
    assert not [output for cell in cells(name) for output in cell.outputs if output.output_type == "error"]
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert "/home/" not in text
    assert "/tmp/" not in text
    found = set().union(*(names_of_gac(cell.source) for cell in cells(name)))
    assert {one for one in found if one.partition(".")[2] not in PUBLIC.get(one.partition(".")[0], ())} == set()
    assert any(one.startswith("gac.") for one in found)

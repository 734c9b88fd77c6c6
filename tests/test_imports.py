"""What importing loads: planning and the command line start without torch."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "scipy", "ortools", "datasets", "pydantic", "rich")

PLANNING = (
    "gac.allocation.crosscheck",
    "gac.allocation.resolve",
    "gac.lab.tables",
    "gac.plan.summary",
    "gac.plots",
    "gac.profiling.cliffs",
    "gac.profiling.sweeps.coverage",
    "gac.profiling.sweeps.sweep",
    "gac.reporting.evaluation",
    "gac.reporting.gpu_tables",
    "gac.tokens.page",
)
"""Between them they load every module that measures no model: plans, forms, families, tables, cliffs, studies."""


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after the statement."""
    code = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("module", ["gac", "gac.cli"])
def test_the_package_and_the_command_line_load_nothing_heavy(module: str) -> None:
    assert loaded_by(f"import {module}").isdisjoint({*HEAVY, "numpy"})


def test_a_plan_loads_nothing_to_show_itself_with() -> None:
    assert loaded_by("import gac.plan.plan").isdisjoint({*HEAVY, "pandas", "matplotlib"})


def test_planning_loads_no_torch() -> None:
    """All of them in one process: what none of them loads, none loads by itself."""
    assert loaded_by(f"import {', '.join(PLANNING)}").isdisjoint({"torch", "transformers"})


def test_listing_and_looking_up_profiles_loads_no_torch() -> None:
    calls = "from gac.cli import main\nmain(['profiles', '--json'], standalone_mode=False)"
    assert "torch" not in loaded_by(calls)


def test_every_public_name_is_there() -> None:
    code = "import gac\nfor name in gac.__all__: getattr(gac, name)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_transformers_learns_of_compressed_models_when_it_is_loaded() -> None:
    code = (
        "import gac, sys, importlib.util\n"
        "importlib.util.find_spec('transformers.models.auto.configuration_auto')\n"  # a look does not count
        "from transformers import CONFIG_MAPPING\n"
        "assert 'gac_llama' in CONFIG_MAPPING\n"
        "assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith('gac')]\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""What importing loads: planning and the command line start without torch."""

import subprocess
import sys

import gac

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


def test_the_package_and_the_command_line_load_nothing_heavy() -> None:
    assert loaded_by("import gac.cli").isdisjoint({*HEAVY, "numpy"})


def test_a_plan_loads_nothing_to_show_itself_with() -> None:
    assert loaded_by("import gac.plan.plan").isdisjoint({*HEAVY, "pandas", "matplotlib"})


def test_planning_and_listing_profiles_load_no_torch() -> None:
    """All of them in one process: what none of them loads, none loads by itself."""
    calls = "from gac.cli import main\nmain(['profiles', '--json'], standalone_mode=False)"
    assert loaded_by(f"import {', '.join(PLANNING)}\n{calls}").isdisjoint({"torch", "transformers"})


def test_every_public_name_is_there() -> None:
    assert all(hasattr(gac, name) for name in gac.__all__)


def test_transformers_learns_of_compressed_models_when_it_is_loaded() -> None:
    code = (
        "import gac, sys, importlib.util\n"
        "importlib.util.find_spec('transformers.models.auto.configuration_auto')\n"  # a look does not count
        "from transformers import CONFIG_MAPPING\n"
        "assert 'gac_llama' in CONFIG_MAPPING\n"
        "assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith('gac')]\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

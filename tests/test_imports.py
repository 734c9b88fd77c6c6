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


STEPS = {
    "import gac.cli": {*HEAVY, "numpy"},
    "import gac.plan.plan": {*HEAVY, "pandas", "matplotlib"},
    f"import {', '.join(PLANNING)}": {"torch", "transformers"},
    "gac.cli.main(['profiles', '--json'], standalone_mode=False)": {"torch", "transformers"},
}
"""What an interpreter does, and what it has not loaded then: what none of the modules loads, none loads by itself."""


def test_planning_and_the_command_line_load_nothing_heavy() -> None:
    names = "print('now', *{name.partition('.')[0] for name in sys.modules})"
    code = "\n".join(["import sys", *(f"{statement}\n{names}" for statement in STEPS)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = [line.split() for line in done.stdout.splitlines() if line.startswith("now ")]
    assert [heavy & {*names} for heavy, names in zip(STEPS.values(), loaded, strict=True)] == [set()] * len(STEPS)


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

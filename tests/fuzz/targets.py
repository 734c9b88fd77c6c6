"""Targets of the fuzzer: every reader of a file or a name that comes from someone else. Bytes in, or a GacError."""

import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from gac.allocation.frontier_record import Frontier
from gac.allocation.rules import RULES
from gac.core.errors import UNSAFE, GacError, PlanError
from gac.core.io import from_json
from gac.core.workloads import Workload
from gac.forms import FORMS, form_named
from gac.models.families import family_of, text_config
from gac.plan.plan import Plan
from gac.profiling.reading import parse, read_line
from gac.profiling.records import Line, RowLine

CHECKPOINT_FILES = ("config.json", "plan.json", "model.safetensors.index.json")
SEPARATOR = b"\n%%\n"


def read_profile(data: bytes) -> None:
    """Parse, and build every row; lines that were decoded together say the same when they are read one by one."""
    measured = parse(data, "profile").measurements
    _, *rest = data[: data.rfind(b"\n")].split(b"\n")
    rows = [line for line in map(_line, rest) if isinstance(line, RowLine)]
    for row, line in zip(measured, rows, strict=True):
        launches = tuple((launch.name, *launch.grid) for launch in row.launches)
        assert launches == tuple((measured.kernels[kernel].name, *grid) for kernel, *grid in line.launches)
        for name in ("operator", "shape", "dtype", "cache", "samples", "sm_clock_mhz"):
            assert getattr(row, name) == getattr(line, name), name
        assert row.error is not None or (row.passes[0], row.iqr_ns) == (line.median_ns, line.iqr_ns)


def _line(text: bytes) -> Line:
    try:
        return read_line(text, "alone")
    except GacError as failure:
        raise AssertionError(f"read among others, and refused alone: {failure}") from failure


def read_plan(data: bytes) -> None:
    """Read, and derive everything that a command shows."""
    plan = from_json(Plan, data, "plan", PlanError)
    plan.summary()
    assert plan.compare(plan).differences == ()
    assert 0 <= plan.aligned_fraction <= 1
    assert plan.budget.kept >= 0
    assert plan.kept_of_model >= 0


def read_frontier(data: bytes) -> None:
    """Read, and make the plans of its ends."""
    frontier = from_json(Frontier, data, "frontier", PlanError)
    for index in (0, -1):
        frontier.plan(index).summary()


def read_checkpoint(data: bytes) -> None:
    """Open a directory whose config, plan and shard index are given; it has no weights, so it is never opened."""
    from gac.checkpoint.load import load

    with tempfile.TemporaryDirectory() as folder:
        for name, content in zip(CHECKPOINT_FILES, data.split(SEPARATOR), strict=False):
            (Path(folder) / name).write_bytes(content)
        load(Path(folder))


def read_report(data: bytes) -> None:
    """Read what ``gac eval`` wrote, and draw it."""
    from gac.cli.plot import outcomes_of

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        path.write_bytes(data)
        outcomes_of(path)


def read_config(data: bytes) -> None:
    """Open a directory of which only the config is read, and list what every choice moves."""
    from gac.models.loading import load_config
    from gac_extensions.lab.dims_moved import choices

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(data)
        config = text_config(load_config(folder))
        choices(family_of(config).sites(config), tuple(FORMS.names))


def read_name(data: bytes) -> None:
    """Read a name as a workload, a form and a rule; each alone may refuse it."""
    text = data.decode("utf-8", "replace")
    for read in (Workload.parse, form_named, RULES.get):
        with suppress(GacError):
            read(text)


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    "profile": read_profile,
    "plan": read_plan,
    "frontier": read_frontier,
    "checkpoint": read_checkpoint,
    "report": read_report,
    "config": read_config,
    "name": read_name,
}


def survives(target: str, data: bytes) -> bool:
    """True if the bytes were read; False where a GacError that can be shown refused them. Anything else is raised."""
    refused = ""
    try:
        TARGETS[target](data)
    except GacError as failure:
        refused = str(failure)
    assert len(refused) < 10_000
    assert not UNSAFE.search(refused.replace("\n", " "))
    return not refused

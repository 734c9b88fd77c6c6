"""Commands that measure this machine's GPU, and list the latency tables."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import gac
from gac.cli.command import Answer, Command
from gac.cli.options import (
    AT_LEAST_1,
    FILE,
    Target,
    flag,
    forms_option,
    option,
    passes_option,
    reject_options,
    several,
    workloads_option,
)
from gac.core.display import fields
from gac.core.distributed.launch import processes
from gac.core.errors import GacError, ProfileError, did_you_mean
from gac.plan.engines import ENGINES, TRANSFORMERS, VLLM

if TYPE_CHECKING:
    from gac.profiling.records import Point
    from gac.profiling.sweeps.profiler import Estimate
    from gac.profiling.table import Profile

GENERAL = "general"


def _number(_ctx: click.Context, _option: click.Parameter, value: float | None) -> float | None:
    if value is not None and math.isnan(value):  # NaN is in every range and would never be reached
        raise click.BadParameter("nan is not a number.")
    return value


@click.command(cls=Command, resume="Every timing is saved in the file; rerun the command to resume.")
@several("--model models", "Measure the shapes of a known model, a directory or a hub id (config only).", None, "NAME")
@workloads_option("Workload of the models")
@forms_option("A form that the models' weights may take.")
@option(
    "--engine",
    "Measure the models as this engine runs them. vllm: GEMMs as GAC's plugin runs them, and whole steps of the dense "
    "models in vLLM.",
    click.Choice([*ENGINES]),
    default=TRANSFORMERS.name,
)
@option("--engine-python", "With --engine vllm: Python of another environment, with vLLM and GAC.", FILE)
@flag("--tokens", "Also measure attention over the shares of a context that gac tokens prices, for decode workloads.")
@option(
    "--tensor-parallel",
    "Measure the part of each GPU, with the models' weights split over N GPUs.",
    AT_LEAST_1,
    "N",
    default=1,
)
@several("--sweep sweeps", "Measure the shapes of a study (gac study lists them), or 'general'.", None, "NAME")
@option("--dtype", "bf16 or fp16, of models and of the general sweep.", default="bf16")
@several(
    "--scheme schemes",
    "Also measure the GEMMs of models and of the general sweep in this scheme: w4a16, ...",
    None,
    "NAME[:N]",
)
@passes_option
@option(
    "--gpus", "Measure with N GPUs of this host at once, all of one kind, into one table.", AT_LEAST_1, "N", default=1
)
@flag("--collectives", "Measure all-reduces, all-gathers and reduce-scatters of the GPUs of torchrun's processes.")
@flag("--aa", "A/A test: time every shape twice, as A and as B, and count false differences.")
@option("--seconds", "Stop after about this time; the next run continues.", click.FloatRange(0), callback=_number)
@flag("--estimate only_estimate", "Print how much there is to measure, and stop.")
@option("-o --output", "The file to write. Default: this GPU's own file.", Target(ProfileError))
def profile(
    models: Sequence[str],
    sweeps: Sequence[str],
    dtype: str,
    schemes: Sequence[str],
    passes: int,
    gpus: int,
    collectives: bool,
    aa: bool,
    seconds: float | None,
    only_estimate: bool,
    output: Path | None,
    engine_python: Path | None,
    **runs: Any,
) -> Answer:
    """Measure this machine's GPU.

    Without --model and --sweep: a general sweep over every operator, along the dims that compression changes. A
    second run on the same file continues the first one.

    Collectives: torchrun --nproc-per-node 2 -m gac profile --collectives, once for each number of GPUs.
    """
    passes = 2 * passes if aa else passes
    if collectives:
        others = {"models", "sweeps", "schemes", "gpus", "engine", "engine_python", "tokens", "aa"}
        reject_options(others, "without --collectives, in a second run on the same file.")
        return _collectives(runs["workloads"], dtype, output, passes, seconds, only_estimate)
    in_vllm = runs["engine"] == VLLM.name
    if not in_vllm:
        reject_options({"engine_python"}, "with --engine vllm.")
    from gac.profiling.sweeps.profiler import estimate, profile_gpu
    from gac.profiling.timing.device import require_gpu

    if processes() > 1:
        problem = f"gac profile in {processes()} processes"
        remedy = "Start it without torchrun; --gpus takes several GPUs."
        raise ProfileError(problem, "one process, or --collectives", remedy)
    sweeps = sweeps or (() if models else (GENERAL,))
    _check_sweeps(sweeps)
    if schemes and not models and GENERAL not in sweeps:
        problem = f"schemes {', '.join(schemes)} with sweeps {', '.join(sweeps)}, whose dtypes are fixed"
        raise ProfileError(problem, f"a model, or the sweep {GENERAL}", "Add one of these, or leave --scheme out.")
    of_models = tuple(_model_points(models, dtype, schemes, **runs))
    require_gpu()
    swept = (point for name in sweeps for point in _sweep_points(name, dtype, schemes))
    points = tuple(dict.fromkeys((*of_models, *swept)))
    if only_estimate:
        return _estimated(estimate(points, output, passes, gpus=gpus))
    path = profile_gpu(points, output, passes, seconds, gpus)
    if in_vllm and runs["tensor_parallel"] == 1:
        _profile_steps(models, runs["workloads"], path, dtype, engine_python, schemes)
    return _profiled(path, aa)


def _profile_steps(
    models: Sequence[str], workloads: Sequence[str], path: Path, dtype: str, python: Path | None, schemes: Sequence[str]
) -> None:
    from gac.core.workloads import Workload
    from gac.evaluation.engines.steps import profile_steps
    from gac.models.families import text_config
    from gac.models.loading import load_config
    from gac.models.shapes import shapes_of

    configs = {name: text_config(shapes_of(load_config(name))) for name in models}
    profile_steps(configs, [Workload.parse(text) for text in workloads], path, dtype, python, schemes)


def _collectives(
    workloads: Sequence[str], dtype: str, output: Path | None, passes: int, seconds: float | None, only_estimate: bool
) -> Answer:
    from gac.core.workloads import Workload
    from gac.profiling.sweeps.collectives import collective_points, estimate_collectives, profile_collectives

    points = collective_points(processes(), [Workload.parse(text) for text in workloads], dtype)
    if only_estimate:
        return _estimated(estimate_collectives(points, output, passes))
    return _profiled(profile_collectives(points, output, passes, seconds), aa=False)


def _estimated(estimate: "Estimate") -> Answer:
    document = {"path": str(estimate.path), "shapes": estimate.shapes, "timings": estimate.remaining}
    return Answer(document | {"seconds": round(estimate.seconds, 1)}, lambda: [str(estimate)])


def _model_points(
    models: Sequence[str],
    dtype: str,
    schemes: Sequence[str],
    workloads: Sequence[str],
    forms: Sequence[str],
    engine: str,
    tokens: bool,
    tensor_parallel: int,
) -> Iterator["Point"]:
    from gac.core.workloads import Workload
    from gac.models.loading import load_config
    from gac.profiling.sweeps.coverage import fused_points, model_points
    from gac_extensions.tokens.defaults import SHARES, STEP
    from gac_extensions.tokens.layers import token_points

    parsed, runs_in = [Workload.parse(text) for text in workloads], ENGINES[engine]
    for config in map(load_config, models):
        of_model = model_points(config, parsed, dtype, forms, schemes, tensor_parallel)
        fused = fused_points(config, parsed, dtype, forms, schemes, tensor_parallel)
        for point in (*of_model, *fused):
            if runs_in.has_kernels(point.operation, point.dtype):
                yield replace(point, operation=runs_in.operation(point.operation, point.dtype))
        if tokens:
            yield from token_points(config, parsed, SHARES, STEP, dtype)


def _check_sweeps(names: Sequence[str]) -> None:
    from gac_extensions.lab.studies import STUDIES

    known = (GENERAL, *STUDIES.names)
    if unknown := next((name for name in names if name not in known), None):
        remedy = did_you_mean(unknown, known, "Correct the name; gac study lists the studies.")
        raise ProfileError(f"sweep {unknown!r} is unknown", f"one of {', '.join(known)}", remedy)


def _sweep_points(name: str, dtype: str, schemes: Sequence[str]) -> tuple["Point", ...]:
    if name == GENERAL:
        import torch

        from gac.profiling.sweeps.coverage import general_points

        return general_points(dtype, torch.cuda.get_device_capability(), schemes)
    from gac_extensions.lab.studies import STUDIES

    return STUDIES.get(name).points()


def _profiled(path: Path, aa: bool) -> Answer:
    from gac.profiling.sweeps.profiler import summary
    from gac_extensions.lab.cliffs import count_false_alarms

    table: Profile = gac.Profile.load(path)
    counts = {"shapes": len(table.measurements), "failed": len(table.failed)}
    document: dict[str, Any] = {"path": str(path), "gpu": table.header.gpu, **counts}
    document |= fields(table, "converged_fraction", "spread", "drift", "digest")
    lines = [summary(table), f"saved as {path}"]
    if aa:
        report = count_false_alarms(table)
        document["aa"] = asdict(report) | {"fraction": report.fraction}
        lines.append(str(report))
    return Answer(document, lambda: lines)


@click.command(cls=Command)
@click.argument("name", required=False)
def profiles(name: str | None) -> Answer:
    """List the latency tables on this machine, or the contents of one.

    Those shipped with GAC, and those that `gac profile` saved; a saved one hides a shipped one of the same name.

    NAME is one of them, or a file: its GPU and versions, and its models, schemes, workloads and operators.
    """
    from gac.profiling.folders import saved_profiles, shipped_profiles
    from gac.reporting.gpu_tables import profiles_table

    if name is not None:
        return _contents(gac.Profile.load(name))
    entries = [_entry(path, "shipped") for path in shipped_profiles()]
    entries += [_entry(path, "saved") for path in saved_profiles()]
    return Answer({"profiles": entries}, lambda: [profiles_table(entries)])


def _contents(table: "Profile") -> Answer:
    from gac.profiling.contents import known_models, known_steps
    from gac.reporting.gpu_tables import contents_tables

    models, steps, header = known_models(table), known_steps(table), table.header
    document = {"name": table.path.stem, "path": str(table.path), "shapes": len(table.measurements)}
    document |= fields(header, "gpu", "date", "gac_version", "driver", "libraries") | fields(table, "digest")
    document |= {"models": [*map(asdict, models)], "steps": [*map(asdict, steps)]}
    return Answer(document, lambda: [*table.tables(), *contents_tables(models, steps)])


def _entry(path: Path, where: str) -> dict[str, Any]:
    """One line of the list; a file that cannot be read is listed with its problem."""
    entry: dict[str, Any] = {"name": path.stem, "where": where, "path": str(path)}
    try:
        table = gac.Profile.load(path)
    except GacError as failure:
        return entry | {"problem": str(failure)}
    header, rows = table.header, table.measurements
    counts = {"shapes": len(rows), "operators": sorted({row.operator for row in rows})}
    return entry | {"gpu": header.gpu, **counts, "torch": header.torch, "date": header.date, "digest": table.digest}

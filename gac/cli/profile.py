"""Commands that measure this machine's GPU, and list what was measured."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import gac
from gac.cli.options import (
    Target,
    forms_option,
    output_option,
    passes_option,
    tensor_parallel_option,
    workloads_option,
)
from gac.cli.verb import Answer, Verb
from gac.core.distributed.launch import processes
from gac.core.errors import GacError, ProfileError, did_you_mean

if TYPE_CHECKING:
    from gac.profiling.records import Point
    from gac.profiling.sweeps.profiler import Estimate
    from gac.profiling.table import Profile

GENERAL = "general"


def _number(_ctx: click.Context, _option: click.Parameter, value: float | None) -> float | None:
    """Refuse NaN, which is in every range and would never be reached."""
    if value is not None and math.isnan(value):
        raise click.BadParameter("nan is not a number.")
    return value


@click.command(
    cls=Verb, resume="Every timing that was taken is in the file; the same command goes on where this one stopped."
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME",
    help="Measure what this model's allocation needs: a known name, a directory or a hub id, of which only the "
    "config is read. Repeatable.",
)
@workloads_option("What the models run")
@forms_option("A form that the models' weights may take. Repeatable.")
@click.option("--fuse", is_flag=True, help="Also measure what the models run if q/k/v, and gate/up, share one GEMM.")
@click.option(
    "--tokens",
    is_flag=True,
    help="Also measure attention over the shares of a context that gac tokens prices, of workloads that decode.",
)
@tensor_parallel_option("Measure the parts that each GPU has of the models' weights where these are split over so many")
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    metavar="NAME",
    help="Measure the shapes of a study (gac study lists them), or 'general'. Repeatable.",
)
@click.option("--dtype", default="bf16", show_default=True, help="bf16 or fp16, of models and of the general sweep.")
@click.option(
    "--scheme",
    "schemes",
    multiple=True,
    metavar="NAME[:N]",
    help="Measure the GEMMs of models and of the general sweep in this scheme too: w4a16, fp8, ... Repeatable.",
)
@passes_option
@click.option(
    "--gpus",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Measure with so many GPUs of this host at once, into one table. They have to be alike.",
)
@click.option(
    "--collectives",
    is_flag=True,
    help="Measure all-reduces, all-gathers and reduce-scatters of as many GPUs as torchrun has started processes.",
)
@click.option("--aa", is_flag=True, help="Time every shape as A and as B, and say how often they seem to differ.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    callback=_number,
    help="Stop after about this many seconds; the next run continues.",
)
@click.option("--estimate", "only_estimate", is_flag=True, help="Say how much there is to measure, and stop.")
@output_option(Target(ProfileError), "The file to write. Default: this GPU's own file.")
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
    **runs: Any,
) -> Answer:
    """Measure this machine's GPU.

    Without --model and --sweep: a general sweep over every operator, along the dims that compression changes. A
    second run on the same file goes on where the first one stopped.

    Collectives: torchrun --nproc-per-node 2 -m gac profile --collectives, once for each number of GPUs.
    """
    passes = 2 * passes if aa else passes
    if collectives:
        _check_alone(models, sweeps, schemes, gpus, aa, runs)
        return _collectives(runs["workloads"], dtype, output, passes, seconds, only_estimate)
    from gac.profiling.sweeps.profiler import estimate, profile_gpu
    from gac.profiling.timing.device import require_gpu

    if processes() > 1:
        given = f"gac profile in {processes()} processes"
        raise ProfileError(
            given, "one process, or --collectives", "Start it without torchrun; --gpus takes several GPUs."
        )
    named = sweeps or (() if models else (GENERAL,))
    _check_sweeps(named)
    if schemes and not models and GENERAL not in named:
        given = f"schemes {', '.join(schemes)} with sweeps {', '.join(named)}, whose dtypes are fixed"
        raise ProfileError(given, f"a model, or the sweep {GENERAL}", "Add one of these, or leave --scheme out.")
    of_models = tuple(_model_points(models, dtype, schemes, **runs))
    require_gpu()
    swept = (point for name in named for point in _sweep_points(name, dtype, schemes))
    points = tuple(dict.fromkeys((*of_models, *swept)))
    if only_estimate:
        return _estimated(estimate(points, output, passes, gpus=gpus))
    path = profile_gpu(points, output, passes, seconds, gpus)
    return _profiled(path, gac.Profile.load(path), aa)


def _check_alone(
    models: Sequence[str], sweeps: Sequence[str], schemes: Sequence[str], gpus: int, aa: bool, runs: Mapping[str, Any]
) -> None:
    """Refuse what says which GEMMs to time, beside collectives."""
    named = {
        "--model": models,
        "--sweep": sweeps,
        "--scheme": schemes,
        "--gpus": gpus > 1,
        "--fuse": runs["fuse"],
        "--tokens": runs["tokens"],
        "--aa": aa,
    }
    if beside := [option for option, given in named.items() if given]:
        raise ProfileError(
            f"--collectives with {', '.join(beside)}",
            "collectives by themselves: of any model, by rows and columns",
            "Run gac profile twice on the same file, once with --collectives.",
        )


def _collectives(
    workloads: Sequence[str],
    dtype: str,
    output: Path | None,
    passes: int,
    seconds: float | None,
    only_estimate: bool,
) -> Answer:
    from gac.core.workloads import Workload
    from gac.profiling.sweeps.collectives import collective_points, estimate_collectives, profile_collectives

    points = collective_points(processes(), [Workload.parse(text) for text in workloads], dtype)
    if only_estimate:
        return _estimated(estimate_collectives(points, output, passes))
    path = profile_collectives(points, output, passes, seconds)
    return _profiled(path, gac.Profile.load(path), aa=False)


def _estimated(ahead: "Estimate") -> Answer:
    document = {"path": str(ahead.path), "shapes": ahead.shapes, "timings": ahead.remaining}
    return Answer(document | {"seconds": round(ahead.seconds, 1)}, lambda: [str(ahead)])


def _model_points(
    models: Sequence[str],
    dtype: str,
    schemes: Sequence[str],
    workloads: Sequence[str],
    forms: Sequence[str],
    fuse: bool,
    tokens: bool,
    tensor_parallel: int,
) -> Iterator["Point"]:
    from gac.core.workloads import Workload
    from gac.models.loading import load_config
    from gac.profiling.sweeps.coverage import fused_points, model_points, token_points
    from gac.tokens.defaults import SHARES, STEP

    parsed = [Workload.parse(text) for text in workloads]
    for config in map(load_config, models):
        points = model_points(config, parsed, dtype, forms, schemes, tensor_parallel)
        if fuse:
            points += fused_points(config, parsed, dtype, forms, schemes, tensor_parallel)
        yield from points
        if tokens:
            yield from token_points(config, parsed, SHARES, STEP, dtype)


def _check_sweeps(names: Sequence[str]) -> None:
    from gac.lab.studies import STUDIES

    known = (GENERAL, *STUDIES.names)
    if unknown := next((name for name in names if name not in known), None):
        remedy = did_you_mean(unknown, known, "Correct the name; gac study lists the studies.")
        raise ProfileError(f"sweep {unknown!r} is unknown", f"one of {', '.join(known)}", remedy)


def _sweep_points(name: str, dtype: str, schemes: Sequence[str]) -> tuple["Point", ...]:
    if name == GENERAL:
        import torch

        from gac.profiling.sweeps.general import general_points

        return general_points(dtype, torch.cuda.get_device_capability(), schemes)
    from gac.lab.studies import STUDIES

    return STUDIES.get(name).points()


def _profiled(path: Path, measured: "Profile", aa: bool) -> Answer:
    from gac.profiling.cliffs import count_false_alarms
    from gac.profiling.sweeps.profiler import summary

    document: dict[str, Any] = {
        "path": str(path),
        "gpu": measured.header.gpu,
        "shapes": len(measured.measurements),
        "failed": len(measured.failed),
        "converged_fraction": measured.converged_fraction,
        "spread": measured.spread,
        "drift": measured.drift,
        "digest": measured.digest,
    }
    lines = [summary(measured), f"saved as {path}"]
    if aa:
        report = count_false_alarms(measured)
        document["aa"] = asdict(report) | {"fraction": report.fraction}
        lines.append(str(report))
    return Answer(document, lambda: lines)


@click.command(cls=Verb)
def profiles() -> Answer:
    """List the latency tables on this machine.

    Those shipped with GAC, and those that `gac profile` saved; a saved one hides a shipped one of the same name.
    """
    from gac.profiling.folders import saved_profiles, shipped_profiles
    from gac.reporting.gpu_tables import profiles_table

    entries = [_entry(path, "shipped") for path in shipped_profiles()]
    entries += [_entry(path, "saved") for path in saved_profiles()]
    return Answer({"profiles": entries}, lambda: [profiles_table(entries)])


def _entry(path: Path, where: str) -> dict[str, Any]:
    """One line of the list; a file that cannot be read is listed with what is wrong with it."""
    entry: dict[str, Any] = {"name": path.stem, "where": where, "path": str(path)}
    try:
        read = gac.Profile.load(path)
    except GacError as failure:
        return entry | {"problem": str(failure)}
    header = read.header
    counts = {"shapes": len(read.measurements), "operators": sorted({row.operator for row in read.measurements})}
    return entry | {"gpu": header.gpu, **counts, "torch": header.torch, "date": header.date, "digest": read.digest}

"""The command that repeats a published experiment."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import gac
from gac.cli.options import Target, output_option, passes_option, profile_option
from gac.cli.verb import Answer, Verb, note
from gac.core.errors import GacError, ProfileError

if TYPE_CHECKING:
    from gac.lab.studies import Study, StudyResult
    from gac.profiling.table import Profile


@click.command(
    cls=Verb, resume="Every timing that was taken is in the studies' file; the same command goes on from there."
)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--all", "every", is_flag=True, help="Run every study.")
@profile_option("Judge from this recorded profile; needs no GPU.")
@output_option(Target(ProfileError), "Where to keep the timings. Default: the studies' own file of this GPU.")
@passes_option
def study(names: Sequence[str], every: bool, profile: str | None, output: Path | None, passes: int) -> Answer:
    """Repeat a published experiment on this GPU, and say whether its claim holds.

    Measures what the studies' file of this GPU lacks, sets the result beside the published table, and judges.
    Without NAME, the studies are listed.
    """
    from gac.lab.studies import STUDIES
    from gac.lab.tables import studies_table, study_tables, verdicts_table

    named = tuple(STUDIES.get(name) for name in dict.fromkeys(names))
    chosen = tuple(STUDIES) if every else named
    if not chosen and profile is not None:
        raise click.UsageError("--profile judges studies: name them, or give --all.")
    if not chosen:
        names = ("name", "title", "claim", "source")
        entries = [{name: getattr(one, name) for name in names} | {"shapes": len(one.points())} for one in STUDIES]
        return Answer({"studies": entries}, lambda: [studies_table(entries)])
    measured = _measured(chosen, profile, output, passes)
    results, problems = _judged(chosen, measured)
    document: dict[str, Any] = {
        "gpu": measured.header.gpu,
        "profile": measured.path.stem,
        "digest": measured.digest,
        "results": [asdict(result) for result in results],
        "problems": problems,
    }
    summary = [verdicts_table(measured.header.gpu, results)] if len(results) > 1 else []
    return Answer(document, lambda: [table for result in results for table in study_tables(result)] + summary)


def _measured(studies: Sequence["Study"], profile: str | None, output: Path | None, passes: int) -> "Profile":
    """The recorded profile, or this GPU's studies measured to the end."""
    if profile is not None:
        return gac.Profile.load(profile)
    from gac.profiling.folders import studies_path
    from gac.profiling.sweeps.profiler import profile_gpu, summary
    from gac.profiling.timing.device import require_gpu

    gpu = require_gpu()
    path = output or studies_path(gpu)
    points = tuple(dict.fromkeys(point for one in studies for point in one.points()))
    measured = gac.Profile.load(profile_gpu(points, path, passes))
    note(summary(measured))
    return measured


def _judged(studies: Sequence["Study"], measured: "Profile") -> tuple[list["StudyResult"], dict[str, str]]:
    """Results, and why the other studies have none; a study asked for alone fails with its own error."""
    results, problems = [], {}
    for one in studies:
        try:
            results.append(one.judge(measured.find))
        except GacError as failure:
            if len(studies) == 1:
                raise
            problems[one.name] = str(failure)
            note(f"{one.name}: {failure}")
    return results, problems

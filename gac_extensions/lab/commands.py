"""Commands that say what a dim changes and which constraints it breaks, and repeat published experiments."""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import gac
from gac.cli.command import Answer, Command, note
from gac.cli.options import LARGEST, Target, flag, forms_option, option, passes_option, profile_option, shape_option
from gac.core.display import fields
from gac.core.errors import GacError, ModelError, ProfileError
from gac.forms import FORMS

if TYPE_CHECKING:
    from gac.profiling.table import Profile
    from gac_extensions.lab.mechanisms import Run
    from gac_extensions.lab.studies import Study, StudyResult


@click.command(cls=Command)
@click.argument("model")
@forms_option("A form to show, or tokens (kept in the cache). Default: all.", default=())
def graph(model: str, forms: Sequence[str]) -> Answer:
    """Show which dims of which operators each choice for MODEL changes.

    MODEL is a known name (llama-3-8b), a directory or a hub id; only its config is read. A low-rank pair's rank is N of
    one GEMM and K of the next, a width N of the MLP's first ones and K of its last, and so on. The tokens that a layer
    keeps in its cache are N of attention's scores and K of its mixed values.
    """
    from gac.forms.planned_sites import check_forms_fit
    from gac.models.families import family_of
    from gac.models.loading import load_config
    from gac_extensions.lab.dims_moved import TOKENS, choices, choices_table, tokens_kept
    from gac_extensions.tokens.defaults import STEP

    config = load_config(model)
    family, of_weights = family_of(config), [form for form in forms if form != TOKENS]
    for form in of_weights:
        FORMS.get(form, also=(TOKENS,))
    sites = family.sites(config)
    check_forms_fit(sites, of_weights, config.model_type)
    rows = choices(sites, of_weights if forms else FORMS.names)
    with nullcontext() if forms else suppress(ModelError):
        rows += (tokens_kept(family, config, STEP),) if TOKENS in forms or not forms else ()
    return Answer({"model": model, "choices": [asdict(row) for row in rows]}, lambda: [choices_table(rows)])


@click.command(cls=Command)
@click.argument("operator")
@click.argument("dim", type=click.IntRange(min=1, max=LARGEST))
@option("--axis", "The axis of the dim. Default: r of a pair, k of a GEMM, d of attention.", metavar="AXIS")
@shape_option
@option("--dtype", "bf16, fp16, fp8, or a table's name for a scheme.", default="bf16")
@profile_option("Take costs and kernels from this latency table.")
def explain(
    operator: str, dim: int, axis: str | None, shape: dict[str, int], dtype: str, profile: str | None
) -> Answer:
    """List the constraints that a dim breaks, the cost of each, and the kernels that ran.

    OPERATOR is linear, low_rank, sdpa, ...; DIM is the size of one of its axes: a rank, a head_dim, a width. Without
    --profile the rules of every architecture are listed, with published costs.
    """
    from gac_extensions.lab.mechanisms.explain import explain as look_up
    from gac_extensions.lab.tables import explanation_tables

    table = None if profile is None else gac.Profile.load(profile)
    explanation = look_up(operator, dim, table, axis, shape or None, dtype)
    document = asdict(explanation) | {"fixed": dict(explanation.fixed), "ran": list(map(_ran, explanation.ran))}
    document["rules"] = [
        asdict(finding)
        | {"rule": finding.rule.name}
        | fields(finding.rule, "level", "constraint", "since", "before")
        | {"sources": [asdict(source) for source in finding.rule.sources]}
        for finding in explanation.findings
    ]
    del document["findings"]
    return Answer(document, lambda: explanation_tables(explanation))


def _ran(run: "Run") -> dict[str, Any]:
    waves = run.waves
    counts = (None, None, None, True) if waves is None else (waves.tiles, waves.count, waves.last, waves.exact)
    entries = zip(("tiles", "waves", "last_wave", "exact"), counts, strict=True)
    return asdict(run.kernel) | {"grid": run.launch.grid} | dict(entries)


@click.command(cls=Command, resume="Every timing is saved in the studies' file; rerun the command to resume.")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@flag("--all every", "Run every study.")
@profile_option("Judge from this recorded profile; needs no GPU.")
@option("-o --output", "File of the timings. Default: the studies' own file of this GPU.", Target(ProfileError))
@passes_option
def study(names: Sequence[str], every: bool, profile: str | None, output: Path | None, passes: int) -> Answer:
    """Repeat a published experiment on this GPU, and judge whether its claim holds.

    Measures what is missing in the studies' file of this GPU, shows the result with the published table, and judges.
    Without NAME, the studies are listed.
    """
    from gac_extensions.lab.studies import STUDIES
    from gac_extensions.lab.tables import studies_table, study_table, verdicts_table

    chosen = tuple(STUDIES.get(name) for name in dict.fromkeys(names))
    chosen = tuple(STUDIES) if every else chosen
    if not chosen and profile is not None:
        raise click.UsageError("--profile judges studies: name them, or give --all.")
    if not chosen:
        entries = [
            fields(entry, "name", "title", "claim", "source") | {"shapes": len(entry.points())} for entry in STUDIES
        ]
        return Answer({"studies": entries}, lambda: [studies_table(entries)])
    table = _measured(chosen, output, passes) if profile is None else gac.Profile.load(profile)
    results, problems = _judged(chosen, table)
    document: dict[str, Any] = {
        "gpu": table.header.gpu,
        "profile": table.path.stem,
        "digest": table.digest,
        "results": [asdict(result) for result in results],
        "problems": problems,
    }
    summary = [verdicts_table(table.header.gpu, results)] if len(results) > 1 else []
    return Answer(document, lambda: [*map(study_table, results), *summary])


def _measured(studies: Sequence["Study"], output: Path | None, passes: int) -> "Profile":
    from gac.profiling.folders import default_path
    from gac.profiling.sweeps.profiler import profile_gpu, summary
    from gac.profiling.timing.device import require_gpu

    table = default_path(require_gpu())  # the studies get another file, since allocation takes this one
    path = output or table.with_name(f"{table.stem}-studies.jsonl")
    points = tuple(dict.fromkeys(point for study in studies for point in study.points()))
    profile = gac.Profile.load(profile_gpu(points, path, passes))
    note(summary(profile))
    return profile


def _judged(studies: Sequence["Study"], profile: "Profile") -> tuple[list["StudyResult"], dict[str, str]]:
    """Results, and the errors of the other studies; a single study raises its own."""
    results, problems = [], {}
    for study in studies:
        try:
            results.append(study.judge(profile.find))
        except GacError as failure:
            if len(studies) == 1:
                raise
            problems[study.name] = str(failure)
            note(f"{study.name}: {failure}")
    return results, problems

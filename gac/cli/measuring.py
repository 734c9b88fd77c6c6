"""What the commands that measure a model share: their options, and what they say before they begin."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import click

from gac.cli.options import table_option, workloads_option
from gac.cli.verb import note
from gac.forms import DEFAULT_FORMS

Command = TypeVar("Command", bound=Callable[..., Any])

STATISTICS_KEPT = (
    "Finished layers, and gradients at most two minutes old, are kept in GAC_HOME; the same command goes on from there."
)

_method_option = click.option(
    "--method",
    default="kfac",
    show_default=True,
    help="How errors are measured: kfac, svd-llm, asvd[:ALPHA], svd, or palu[:HEADS].",
)
_form_option = click.option(
    "--form",
    "forms",
    multiple=True,
    default=DEFAULT_FORMS,
    show_default=True,
    help="A form that competes with staying dense. Repeatable.",
)
_calibration_option = click.option(
    "--calibration",
    default="wiki-sample",
    show_default=True,
    metavar="TEXT[:NxL]",
    help="wiki-sample, wikitext2, c4 or a file, and N windows of L tokens (64x1024).",
)


def _aligned(ctx: click.Context, _option: click.Parameter, sound: bool) -> bool | int:
    """What ``--align`` and ``--align-to``, which is read first, say together."""
    step: int | None = ctx.params.pop("step")
    if step is not None and not sound:
        raise click.UsageError("--align-to goes without --no-align.", ctx)
    return sound if step is None else step


_step_option = click.option(
    "--align-to", "step", type=click.IntRange(min=1), is_eager=True, metavar="N", help="Of those, multiples of N only."
)
_align_option = click.option(
    "--align/--no-align",
    default=True,
    show_default=True,
    callback=_aligned,
    help="Keep to dims that the profile shows sound.",
)


def _fused(ctx: click.Context, _option: click.Parameter, everywhere: bool) -> bool | Literal["auto"]:
    """What ``--fuse`` and ``--fuse-where-faster``, which is read first, say together."""
    chosen: bool = ctx.params.pop("chosen")
    if chosen and everywhere:
        raise click.UsageError("--fuse goes without --fuse-where-faster.", ctx)
    return "auto" if chosen else everywhere


_where_faster_option = click.option(
    "--fuse-where-faster", "chosen", is_flag=True, is_eager=True, help="The same where the plan is better so."
)
_fuse_option = click.option(
    "--fuse",
    is_flag=True,
    callback=_fused,
    help="Run q/k/v, and gate/up, with their first GEMMs as one, and plan them for it.",
)
_one_row_option = click.option(
    "--one-row",
    is_flag=True,
    help="Run linear weights in Triton where they have one row (decoding one sequence, in CUDA graphs or compiled), "
    "and plan for it; the profile has to hold those shapes.",
)
_refit_option = click.option(
    "--refit",
    type=click.Choice(("residual", "update", "none")),
    help="Fit weights again, layer by layer, to the model as it is compressed so far: to the dense model's outputs and "
    "residual stream, or (SVD-LLM) second factors alone. By default residual for kfac, where the layers allow it.",
)
_shots_option = click.option(
    "--shots",
    type=int,
    default=1,
    show_default=True,
    help="2: take the gradients again, from the model compressed to 0.8, and plan with those. Loses less, and takes "
    "twice as long to calibrate and a second copy of the weights.",
)
_seed_option = click.option(
    "--seed", type=int, default=0, show_default=True, help="Which calibration windows; 0: the first ones."
)
tokenizer_option = click.option(
    "--tokenizer", metavar="NAME", help="A tokenizer's directory or hub id, if not the model's."
)

_OPTIONS = (
    table_option,
    _method_option,
    _form_option,
    workloads_option("What latency is predicted for"),
    _calibration_option,
    _align_option,
    _step_option,
    _fuse_option,
    _where_faster_option,
    _one_row_option,
    _refit_option,
    _shots_option,
    _seed_option,
    tokenizer_option,
)


def measuring_options(command: Command) -> Command:
    """The options of every command that measures what a model's choices lose, in this order."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def say_cost(model: str, budget: float, calibration: str, method: str, shots: int, rule: str = "loss") -> None:
    """Read what is cheap to read, so that a wrong argument fails now, and say what the rest will take.

    Raises:
        GacError: the model, its family, the text, the budget or the method is not usable, or not in so many shots.
    """
    from gac.allocation.limits import budget_limit
    from gac.compression.first_shot import FIRST_KEPT, check_shots
    from gac.io import home
    from gac.models.families import family_of
    from gac.models.loading import load_config
    from gac.sensitivity.calibration import kept_on_disk, moment_bytes
    from gac.sensitivity.registry import METHODS
    from gac.sensitivity.text import TextSpec, check_text

    spec = TextSpec.parse(calibration)
    check_text(spec.name)
    config = load_config(model)
    sites = family_of(config).sites(config)
    budget_limit(budget, sum(site.params for site in sites))
    check_shots(shots, METHODS.get(method), rule, sites, config.model_type)
    size = moment_bytes(sites)
    folder = home() / "statistics"
    kept = f"and factors in {folder}" if kept_on_disk(sites) else f"not kept on disk, factors in {folder}"
    note(
        f"{model}: {len(sites)} sites; calibration on {spec.windows} windows of {spec.length} tokens of {spec.name}; "
        f"{size / 1e9:.2g} GB of statistics {kept}, used again where they are there"
    )
    if shots == 2:
        times = "twice" if kept_on_disk(sites) else "three times"
        note(
            f"two shots: calibration takes {times} as long and twice the disk, and there has to be room "
            f"for a second copy of the weights, compressed to {FIRST_KEPT:g}"
        )

"""What the commands that measure a model share: the options that make a recipe, and what they say before they begin."""

from collections.abc import Callable
from functools import partial, wraps
from math import comb
from pathlib import Path
from typing import Any, TypeVar

import click

from gac.cli.options import (
    FILE,
    bos_option,
    decode_kernel_option,
    forms_option,
    latency_option,
    refuse_given,
    table_option,
    tensor_parallel_option,
    workloads_option,
)
from gac.cli.verb import note
from gac.forms import DEFAULT_FORMS, LATENCY_FORMS, form_named
from gac.plan.recipe import HEADS, Options, Recipe
from gac.schemes import DEFAULT_SCHEME, SCHEMES

Command = TypeVar("Command", bound=Callable[..., Any])

STATISTICS_KEPT = (
    "Finished layers, and gradients at most two minutes old, are kept in GAC_HOME; the same command goes on from there."
)


_MEASURED = (
    table_option,
    click.option(
        "--method",
        default="kfac",
        show_default=True,
        help="How errors are measured: kfac, svd-llm, asvd[:ALPHA], svd, or palu[:HEADS].",
    ),
    forms_option(
        "A form that competes with staying dense. Repeatable.",
        default=(),
        shown=f"{', '.join(DEFAULT_FORMS)}; with --latency below 1 and --method kfac {', '.join(LATENCY_FORMS)}",
    ),
    click.option(
        "--scheme",
        "schemes",
        multiple=True,
        default=(DEFAULT_SCHEME,),
        show_default=True,
        metavar="NAME[:N]",
        help="Allowed weight formats: "
        + ", ".join(f"{scheme.name} ({scheme.meaning})" for scheme in SCHEMES)
        + ". N is the size of groups of columns. Repeatable; give bf16 too where weights may stay as they are.",
    ),
    click.option(
        "--rotate/--no-rotate",
        default=None,
        help="First fold the gains of RMSNorm, and rotate the residual stream and the values of heads: the same "
        "function, which loses less when rounded where features stand out. A head that is tied to the embedding "
        "becomes a weight of its own. Default: with a scheme of at most 4 bits, where no head does.",
    ),
    click.option(
        "--head",
        default=DEFAULT_SCHEME,
        show_default=True,
        metavar="NAME",
        help=f"Format of embedding and LM head: {' or '.join(HEADS)}. Counted in the bytes of the whole model "
        "and in the predicted loss, not in limits.",
    ),
    workloads_option("What latency is predicted for"),
    click.option(
        "--calibration",
        multiple=True,
        default=["wiki-sample"],
        show_default=True,
        metavar="TEXT[:NxL]",
        help="wiki-sample, wikitext2, c4 or a file, and N windows of L tokens (64x1024). Repeatable: each text has the "
        "share that its windows are of all.",
    ),
    click.option(
        "--align/--no-align",
        default=True,
        show_default=True,
        help="Keep to dims that the profile shows to be sound.",
    ),
    click.option(
        "--align-to",
        "step",
        type=click.IntRange(min=1),
        metavar="N",
        help="Of those dims, only multiples of N.",
    ),
    click.option(
        "--fuse/--no-fuse",
        default=None,
        help="Run the first GEMMs of q/k/v, and of gate/up, as one, and plan for it: everywhere, or nowhere. Default: "
        "where it gives a better plan.",
    ),
    decode_kernel_option(
        "triton: decode one sequence with a Triton kernel (in CUDA graphs or compiled code), and plan for it. The "
        "profile has to hold those shapes."
    ),
    tensor_parallel_option("Over how many GPUs of a host every weight is split, and plan for it"),
    click.option(
        "--refit",
        type=click.Choice(("residual", "update", "none")),
        help="Fit weights again, layer by layer, after truncation. residual: all weights, to the dense model's outputs "
        "and residual stream. update: second factors only (SVD-LLM). Default: residual for kfac, where the layers "
        "allow it.",
    ),
    click.option(
        "--shots",
        type=int,
        default=1,
        show_default=True,
        help="2: take the gradients again, from the model compressed to 0.8, and plan with them. Loses less. "
        "Calibration takes twice as long and needs a second copy of the weights.",
    ),
    click.option(
        "--seed",
        type=int,
        default=0,
        show_default=True,
        help="Which calibration windows to use; 0 takes them in even steps through the text.",
    ),
    bos_option(
        "Begin every calibration window with BOS, or none. Default: every one where the tokenizer puts it first."
    ),
)
_LIMITED = (
    click.option(
        "--budget",
        type=float,
        show_default="0.8, or 1 with --memory",
        help="Kept fraction of the targeted weights' parameters.",
    ),
    click.option("--memory", type=float, metavar="F", help="Kept fraction of the targeted weights' bytes."),
    latency_option(
        "Allowed fraction of the dense weights' latency, for every workload or (repeatable) for one. any: no "
        "limit. Default: no workload slower than dense, where the profile holds its latency."
    ),
    click.option(
        "--slack",
        type=float,
        metavar="F",
        help="Of the choices that lose at most this fraction more than the least, take the fastest. "
        "Default: 0.003, and 0 with a limit of latency.",
    ),
    click.option(
        "--kv-cache",
        type=float,
        metavar="F",
        help="Allowed fraction of the dense model's KV cache; needs --form latent or head_dim.",
    ),
    click.option(
        "--rule",
        default="loss",
        show_default=True,
        help="How the choice is made: loss (exact). To compare with: importance, or a peer's rule: uniform, fisher, "
        "zero-sum, sensitivity; also rounded, as in uniform:down8, zero-sum:nearest16, fisher:pad64.",
    ),
)
_recipe_option = click.option(
    "--recipe",
    "recipe_file",
    type=FILE,
    metavar="FILE",
    help="A JSON file (gac.Recipe) that holds all of these options, instead of them.",
)
tokenizer_option = click.option(
    "--tokenizer", metavar="NAME", help="A tokenizer's directory or hub id, if it is not the model's."
)


def recipe_options(limits: bool) -> Callable[[Command], Command]:
    """The options of every command that measures what a model's choices lose.

    The command gets a function ``asked``, from the model's name to ``recipe`` and ``tokenizer`` as ``gac.allocate`` and
    ``gac.frontier`` take them, which says what they will cost.

    Args:
        limits: whether the options that limit a choice are among them.
    """
    options = (*_LIMITED, *_MEASURED) if limits else _MEASURED

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(recipe_file: Path | None, tokenizer: str | None, step: int | None, **given: Any) -> Any:
            names = [name for name in given if name in Options.__annotations__ or name == "budget"]
            options = {name: given.pop(name) for name in names}
            if not options["forms"]:
                del options["forms"]
            if step is not None and not options["align"]:
                raise click.UsageError("--align-to goes without --no-align.", click.get_current_context())
            options |= {} if step is None else {"align": step}
            return command(asked=partial(_asked, recipe_file, tokenizer, options), **given)

        for option in reversed((*options, _recipe_option, tokenizer_option)):
            run = option(run)
        return run  # type: ignore[return-value]

    return decorate


def _asked(file: Path | None, tokenizer: str | None, options: dict[str, Any], model: str) -> dict[str, Any]:
    """From the file, or from the options; both together are refused."""
    if file is not None:
        refuse_given({*options, "step"}, "without --recipe, which says it too.")
    recipe = Recipe.of(**options) if file is None else Recipe.load(file)
    _say_cost(model, recipe)
    return {"recipe": recipe, "tokenizer": tokenizer_named(tokenizer)}


def tokenizer_named(name: str | None) -> Any:
    """What ``tokenizer_option`` names; None where it names nothing."""
    from gac.models.loading import load_tokenizer

    return load_tokenizer(name) if name else None


def _say_cost(model: str, recipe: Recipe) -> None:
    """Read what is cheap to read, so that a wrong argument fails now, and say what the rest will take.

    Raises:
        GacError: the model, its family, the text or the method is not usable, or not in so many shots.
    """
    from gac.compression.first_shot import FIRST_KEPT, check_shots
    from gac.core.io import home
    from gac.forms.curvature.registry import METHODS
    from gac.measurement.attended import held_out
    from gac.measurement.calibration import kept_on_disk, moment_bytes
    from gac.measurement.pairs import MOST
    from gac.measurement.runs import TOKENS
    from gac.measurement.texts import Texts
    from gac.models.families import family_of
    from gac.models.loading import load_config

    measure = recipe.measure
    text = Texts.named(measure.text)
    text.check()
    config = load_config(model)
    sites = family_of(config).sites(config)
    check_shots(measure.shots, METHODS.get(measure.method), recipe.rule, sites, config.model_type)
    own = [*METHODS.get(measure.method).forms, *recipe.space.forms]
    attended = METHODS.get(measure.method).two_sided and any(
        form.loss.uses_attention_curvature for form in map(form_named, own)
    )
    size = moment_bytes(sites, attended)
    folder = home() / "statistics"
    kept = f"and factors in {folder}" if kept_on_disk(sites, attended) else f"not kept on disk, factors in {folder}"
    note(
        f"{model}: {len(sites)} sites; calibration on {text.windows} windows of {text.length} tokens of {text.name}; "
        f"{size / 1e9:.2g} GB of statistics {kept}, used again where they are there"
    )
    if measure.shots == 2:
        times = "twice" if kept_on_disk(sites) else "three times"
        note(
            f"two shots: calibration takes {times} as long and twice the disk, and there has to be room "
            f"for a second copy of the weights, compressed to {FIRST_KEPT:g}"
        )
    weights = [weight for site in sites for weight in site.weights]
    for form in (form for form in map(form_named, recipe.space.forms) if form.loss.needs_forward_runs):
        dims = [form.full(weight) - form.min_dim for weight in weights if form.shortens(weight) == "in"]
        runs = sum(dims) + (0 if form.min_dim else comb(min(len(dims), MOST), 2))
        note(
            f"form {form.name}: the model is run {runs} times on up to {TOKENS} tokens, "
            "from the first layer that changes on, unless dense weights keep all limits"
        )
    held = len(held_out(text.windows, text.length)) if attended else 0
    asked = {
        one.name: one for form in map(form_named, own) for one in (form.base_form or form,) if one.loss.anchors and held
    }
    for form in asked.values():
        runs = (len(form.loss.anchors) + 1) * (
            sum(map(form.applies_to, weights)) + 1
        )  # each alone, and all together; of 16 bits
        note(
            f"form {form.name}: the model is run up to {runs} times on {held * text.length} tokens that are held out, "
            "from the layer that changes on"
        )
    if (head := recipe.space.head) != DEFAULT_SCHEME:
        note(f"head {head}: the model is run on up to {TOKENS} tokens, with embedding and head rounded and without")

"""The options that make a recipe, one row each, and the notes on its cost before the work begins."""

from collections.abc import Callable
from math import comb
from typing import Any, TypeVar

import click

from gac.cli.command import note
from gac.cli.options import (
    AT_LEAST_1,
    FILE,
    bos_option,
    decode_kernel_option,
    forms_option,
    latency_option,
    option,
    reject_options,
    several,
    switch,
    table_option,
    tensor_parallel_option,
    tokenizer_named,
    tokenizer_option,
    workloads_option,
)
from gac.forms import DEFAULT_FORMS, LATENCY_FORMS, form_named
from gac.plan.recipe import Recipe
from gac.schemes import DEFAULT_SCHEME

T = TypeVar("T", bound=Callable[..., Any])

STATISTICS_KEPT = "Progress is saved in GAC_HOME; rerun the command to resume."

_FORMS = f"{', '.join(DEFAULT_FORMS)}; with --latency below 1 and --method kfac {', '.join(LATENCY_FORMS)}"
_REFITS = click.Choice(("residual", "update", "none"))

# The argument of a row is a keyword of ``Recipe.of``. What is not on the command line is left to the recipe's defaults.
_LIMITS = {
    "budget": option(
        "--budget", "Kept fraction of the targeted weights' parameters.", float, show_default="0.8, or 1 with --memory"
    ),
    "memory": option("--memory", "Kept fraction of the targeted weights' bytes.", float, "F"),
    "latency": latency_option(
        "Allowed fraction of the dense weights' latency, for every workload or (repeatable) for one. any: no limit. "
        "Default: no workload slower than dense, if the profile has its latency."
    ),
    "slack": option(
        "--slack",
        "Of the choices whose loss is at most this fraction above the least, take the fastest. "
        "Default: 0.003, and 0 with a limit of latency.",
        float,
        "F",
    ),
    "kv_cache": option(
        "--kv-cache", "Allowed fraction of the dense model's KV cache; needs --form latent or head_dim.", float, "F"
    ),
    "rule": option(
        "--rule",
        "How the choice is made: loss (exact). For comparison: importance, or a peer's rule: uniform, fisher, "
        "zero-sum, sensitivity; also rounded, as in uniform:down8, zero-sum:nearest16, fisher:pad64.",
        show_default="loss",
    ),
}
_MEASURED = {
    "profile": table_option,
    "method": option(
        "--method", "Error metric: kfac, svd-llm, asvd[:ALPHA], svd, or palu[:HEADS].", show_default="kfac"
    ),
    "forms": forms_option("A form that a weight may take instead of dense.", (), _FORMS),
    "schemes": several(
        "--scheme schemes",
        "Allowed weight formats: bf16 (16 bits, as loaded), w8a16, w4a16, w3a16, w2a16 (weights only, scales for "
        "groups of N columns). Give bf16 too if weights may stay as they are.",
        None,
        "NAME[:N]",
        show_default=DEFAULT_SCHEME,
    ),
    "rotate": switch(
        "--rotate/--no-rotate",
        "Apply a Hadamard-style rotation first: the same function with fewer outliers, which loses less in few "
        "bits. Unties the LM head. Default: with a scheme of at most 4 bits, if that does not untie a head.",
    ),
    "head": option(
        "--head",
        "LM head and embedding format: bf16 (as loaded), or w8a16 (8 bits, a scale a row). Counted in model size and "
        "predicted loss, not in limits.",
        None,
        "NAME",
        show_default=DEFAULT_SCHEME,
    ),
    "workloads": workloads_option("Workload to predict latency for", (), "prefill:1x1024, decode:1@1024"),
    "calibration": several(
        "--calibration",
        "wiki-sample, wikitext2, c4 or a file, and N windows of L tokens (64x1024). Texts are weighted by their "
        "windows.",
        None,
        "TEXT[:NxL]",
        show_default="wiki-sample",
    ),
    "align": switch("--align/--no-align", "Keep to dims that run fast according to the profile.", show_default="align"),
    "step": option("--align-to step", "Of those dims, only multiples of N.", AT_LEAST_1, "N"),
    "fuse": switch(
        "--fuse/--no-fuse",
        "Run the first GEMMs of q/k/v, and of gate/up, as one, and plan for it: everywhere, or nowhere. Default: "
        "where it gives a better plan.",
    ),
    "decode_kernel": decode_kernel_option(
        "triton: decode one sequence with a Triton kernel (in CUDA graphs or compiled code), and plan for it. The "
        "profile has to hold those shapes."
    ),
    "tensor_parallel": tensor_parallel_option("GPUs of a host over which every weight is split"),
    "refit": option(
        "--refit",
        "Fit weights again after truncation, layer by layer. residual: all weights, to the dense model's outputs and "
        "residual stream. update: second factors only (SVD-LLM). Default: residual for kfac, if the layers allow.",
        _REFITS,
    ),
    "shots": option(
        "--shots",
        "2: take the gradients a second time, from the model compressed to 0.8. Lower loss; takes twice as long, and "
        "needs memory for a second model.",
        int,
        show_default="1",
    ),
    "seed": option("--seed", "Selects calibration windows; 0: in even steps through the text.", int, show_default="0"),
    "bos": bos_option(
        "Begin every calibration window with BOS, or none. Default: every one if the tokenizer puts it first."
    ),
}
_RECIPE = option("--recipe recipe_file", "A JSON file (gac.Recipe), instead of all of these options.", FILE, "FILE")


def recipe_options(limits: bool) -> Callable[[T], T]:
    """Add the options of a recipe, to be taken from the arguments by ``request``; with those that limit a choice."""
    rows = [*(_LIMITS.values() if limits else ()), *_MEASURED.values(), _RECIPE, tokenizer_option]

    def decorate(command: T) -> T:
        for row in reversed(rows):
            command = row(command)
        return command

    return decorate


def request(model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Take the options of a recipe from the arguments, and return ``recipe`` and ``tokenizer`` for ``gac.allocate``.

    Raises:
        click.UsageError: ``--recipe`` or ``--no-align`` is given with options that contradict it.
        GacError: the recipe is invalid, or as for ``preflight``.
    """
    file, tokenizer = arguments.pop("recipe_file"), arguments.pop("tokenizer")
    options = {name: arguments.pop(name) for name in (*_LIMITS, *_MEASURED) if name in arguments}
    if (step := options.pop("step")) is not None:
        if options["align"] is False:
            raise click.UsageError("--align-to goes without --no-align.", click.get_current_context())
        options["align"] = step
    if file is not None:
        reject_options({*options, "step"}, "without --recipe, which says it too.")
    given = {name: value for name, value in options.items() if value not in (None, ())}
    recipe = Recipe.of(**given) if file is None else Recipe.load(file)
    preflight(model, recipe)
    return {"recipe": recipe, "tokenizer": tokenizer_named(tokenizer)}


def preflight(model: str, recipe: Recipe) -> None:
    """Check what can be checked without weights, and note the cost of the rest.

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
    config, method = load_config(model), METHODS.get(measure.method)
    sites = family_of(config).sites(config)
    check_shots(measure.shots, method, recipe.rule, sites, config.model_type)
    forms = list(map(form_named, [*method.forms, *recipe.space.forms]))
    attended = method.two_sided and any(form.attended for form in forms)
    folder = home() / "statistics"
    kept = f"and factors in {folder}" if kept_on_disk(sites, attended) else f"not kept on disk, factors in {folder}"
    note(
        f"{model}: {len(sites)} sites; calibration on {text.windows} windows of {text.length} tokens of {text.name}; "
        f"{moment_bytes(sites, attended) / 1e9:.2g} GB of statistics {kept}, used again where they are there"
    )
    if measure.shots == 2:
        times = 2 if kept_on_disk(sites) else 3
        note(
            f"shots=2: {times}x calibration time, 2x disk, and memory for a second model, compressed to {FIRST_KEPT:g}"
        )
    weights = [weight for site in sites for weight in site.weights]
    for form in (form for form in map(form_named, recipe.space.forms) if form.runs):
        dims = [form.full(weight) - form.least for weight in weights if form.shortens(weight) == "in"]
        runs = sum(dims) + (0 if form.least else comb(min(len(dims), MOST), 2))
        note(
            f"form {form.name}: the model is run {runs} times on up to {TOKENS} tokens, "
            "from the first layer that changes on, unless dense weights keep all limits"
        )
    windows = len(held_out(text.windows, text.length)) if attended else 0
    bases = {base.name: base for base in (form.upon or form for form in forms) if base.anchors and windows}
    for form in bases.values():  # each weight by itself, and all of them; in 16 bits
        runs = (len(form.anchors) + 1) * (sum(map(form.takes, weights)) + 1)
        note(
            f"form {form.name}: the model is run up to {runs} times on {windows * text.length} tokens that are held "
            "out, from the layer that changes on"
        )
    if (head := recipe.space.head) != DEFAULT_SCHEME:
        note(f"head {head}: the model is run on up to {TOKENS} tokens, with embedding and head rounded and without")

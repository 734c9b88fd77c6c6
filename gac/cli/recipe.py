"""The options that make a recipe, one row each."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from gac.cli.options import (
    AT_LEAST_1,
    FILE,
    flag,
    forms_option,
    fraction_or_size,
    latency_option,
    option,
    several,
    switch,
    table_option,
    tokenizer_option,
    workloads_option,
)
from gac.forms import DEFAULT_FORMS, LATENCY_FORMS
from gac.plan.costs import BYTES, COSTS, KV_NUMBERS
from gac.plan.engines import ENGINES
from gac.schemes import DEFAULT_SCHEME, SCHEMES

T = TypeVar("T", bound=Callable[..., Any])

FIRST = ("budget", "memory", "latency", "schemes", "profile", "engine", "calibration", "workloads", "output")
"""The options that ``--help`` lists; ``--help-all`` lists the others too."""

STATISTICS_KEPT = "Progress is saved in GAC_HOME; rerun the command to resume."

# One row an option; its argument is a keyword of ``Recipe.of``, whose default holds without the option.
_LIMITS = (
    option(
        "--budget",
        "Kept parameters: a fraction of the targeted weights', or 6B (6000M) of the whole model.",
        fraction_or_size,
        "F|SIZE",
        show_default="0.8, or 1 with --memory",
    ),
    option("--memory", COSTS[BYTES].help, fraction_or_size, "F|SIZE"),
    option("--kv-cache", COSTS[KV_NUMBERS].help, float, "F"),
    latency_option(
        "Allowed fraction of the dense latency, for all workloads or (repeatable) for one. any: no limit. Default: 1 "
        "where it is known."
    ),
    option(
        "--slack",
        "Of the choices whose loss is at most this fraction above the least, take the fastest. "
        "Default: 0.003, and 0 with a limit of latency.",
        float,
        "F",
    ),
    option(
        "--rule",
        "Decision rule: loss (exact). For comparison: importance, or a peer's: uniform, fisher, zero-sum, sensitivity; "
        "also rounded, as in uniform:down8, zero-sum:nearest16, fisher:pad64.",
        show_default="loss",
    ),
)
_DEFAULT_FORMS = (
    f"{', '.join(DEFAULT_FORMS)}; with --latency below 1 and kfac also {', '.join(LATENCY_FORMS[len(DEFAULT_FORMS) :])}"
)
_ROWS = (
    table_option,
    option("--method", "Error metric: kfac, svd-llm, asvd[:ALPHA], svd, or palu[:HEADS].", show_default="kfac"),
    forms_option("A form that a weight may take instead of dense.", (), _DEFAULT_FORMS),
    several(
        "--scheme schemes",
        f"Allowed weight formats: {', '.join(SCHEMES.names)}. Give bf16 (as loaded) too if weights may stay as they "
        "are. :N: a scale for N columns.",
        metavar="NAME[:N]",
        show_default=DEFAULT_SCHEME,
    ),
    switch(
        "--rotate/--no-rotate",
        "Apply a Hadamard-style rotation first: fewer outliers, so less loss in few bits. Unties the LM head. Default: "
        "with a scheme of at most 4 bits, if that does not untie a head.",
    ),
    option(
        "--head",
        "LM head and embedding format: bf16 (as loaded), or w8a16 (8 bits, a scale a row). Counted in model size and "
        "predicted loss; of the limits only in a size such as 6GB.",
        metavar="NAME",
        show_default=DEFAULT_SCHEME,
    ),
    flag(
        "--same-count",
        "With --form experts: as many experts, of one width and scheme, in every layer; gac export then writes a stock "
        "checkpoint.",
    ),
    workloads_option("Workload to predict latency for", (), "prefill:1x1024, decode:1@1024"),
    several(
        "--calibration",
        "Calibration text: wiki-sample, news-sample, python-reference, wikitext2, c4, chat, code, a file, or self, "
        "which the model writes; N windows of L tokens.",
        metavar="TEXT[:NxL]",
        show_default="wiki-sample and self, 32x1024 each; on a CPU 14 and 2",
    ),
    option(
        "--balance",
        "Weights of several texts. mean: the same for each. worst: so that the text that loses most loses as little as "
        "can be found, in up to six choices. Default: by their windows.",
        click.Choice(("mean", "worst")),
    ),
    switch("--align/--no-align", "Keep to dims that run fast according to the profile.", show_default="align"),
    option("--align-to step", "Of those dims, only multiples of N.", AT_LEAST_1, "N"),
    switch(
        "--fuse/--no-fuse",
        "Run and plan the first GEMMs of q/k/v, and of gate/up, as one. Default: where it gives a better plan.",
    ),
    option(
        "--engine",
        f"Engine that will serve the model: {' or '.join(ENGINES)}. Default: vllm if the profile has this model's "
        "steps in it.",
        click.Choice([*ENGINES]),
        "NAME",
    ),
    option("--tensor-parallel", "GPUs of a host over which every weight is split.", AT_LEAST_1, "N", default=1),
    option(
        "--refit",
        "Fit weights again after truncation, layer by layer. residual: all weights, to the dense model's outputs and "
        "residual stream. update: second factors only (SVD-LLM). Default: residual for kfac, if the layers allow.",
        click.Choice(("residual", "update", "none")),
    ),
    option(
        "--shots",
        "2: take the gradients a second time, from the model compressed to 0.8. Lower loss; takes twice as long, and "
        "needs memory for a second model.",
        int,
        show_default="1",
    ),
    option("--seed", "Selects calibration windows; 0 takes them in even steps.", int, show_default="0"),
    switch(
        "--bos/--no-bos", "Begin every calibration window with BOS, or none. Default: if the tokenizer puts it first."
    ),
    option("--recipe recipe_file", "A JSON file (gac.Recipe), instead of all of these options.", FILE, "FILE"),
    tokenizer_option,
)


def recipe_options(limits: bool) -> Callable[[T], T]:
    """Add the options of a recipe (``gac.cli.model.request`` reads them), with those that limit a choice or without."""

    def decorate(command: T) -> T:
        for row in reversed((*_LIMITS, *_ROWS) if limits else _ROWS):
            command = row(command)
        return command

    return decorate

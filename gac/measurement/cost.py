"""The work that a measurement will take, in words, before it starts."""

from collections.abc import Iterator
from math import comb

from gac.core.io import home
from gac.forms import form_named
from gac.measurement.attended import held_out
from gac.measurement.calibration import FIRST_KEPT, kept_on_disk, moment_bytes
from gac.measurement.pairs import MOST
from gac.measurement.runs import TOKENS
from gac.measurement.texts import Texts
from gac.plan.recipe import ResolvedRecipe
from gac.schemes import DEFAULT_SCHEME


def expected_work(resolved: ResolvedRecipe, texts: Texts) -> Iterator[str]:
    """Yield a line for each part: statistics, shots, runs of the model."""
    recipe, sites = resolved.recipe, resolved.targeted
    weights = [weight for site in sites for weight in site.weights]
    forms = [form_named(name) for name in dict.fromkeys((*resolved.method.forms, *recipe.space.forms))]
    attended = resolved.method.two_sided and any(form.loss.uses_attention_curvature for form in forms)
    folder, stored = home() / "statistics", kept_on_disk(sites, attended)
    where = f"and factors in {folder}" if stored else f"not kept on disk, factors in {folder}"
    yield (
        f"{len(sites)} sites; calibration on {texts.windows} windows of {texts.length} tokens of {texts.name}; "
        f"{moment_bytes(sites, attended) / 1e9:.2g} GB of statistics {where}, used again where they are there"
    )
    if recipe.measure.shots == 2:
        times = "twice" if kept_on_disk(sites) else "three times"
        yield (
            f"two shots: calibration takes {times} as long and twice the disk, and needs memory for a second copy of "
            f"the weights, compressed to {FIRST_KEPT:g}"
        )
    for form in (form for form in map(form_named, recipe.space.forms) if form.loss.needs_forward_runs):
        dims = [form.full(weight) - form.min_dim for weight in weights if form.shortens(weight) == "in"]
        runs = sum(dims) + (0 if form.min_dim else comb(min(len(dims), MOST), 2))
        yield (
            f"form {form.name}: the model is run {runs} times on up to {TOKENS} tokens, from the first layer that "
            "changes on; other forms= (--form) leave that out"
        )
    windows = len(held_out(texts.windows, texts.length)) if attended else 0
    bases = {base.name: base for form in forms for base in (form.base_form or form,) if base.loss.anchors and windows}
    for form in bases.values():
        runs = (len(form.loss.anchors) + 1) * (sum(map(form.applies_to, weights)) + 1)
        yield (
            f"form {form.name}: the model is run up to {runs} times on {windows * texts.length} held-out tokens, from "
            "the layer that changes on"
        )
    if (head := recipe.space.head) != DEFAULT_SCHEME:
        yield f"head {head}: the model is run on up to {TOKENS} tokens, with embedding and LM head quantised and not"

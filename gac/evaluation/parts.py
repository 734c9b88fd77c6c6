"""Non-GEMM time by component (attention, MLP, heads, neurons)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gac.forms import DENSE, FORMS, Form, form_named
from gac.forms.planned_sites import as_planned
from gac.models.sites import Site, Weight
from gac.plan.plan import WeightChoice


@dataclass(frozen=True)
class Part:
    """A component that a form removes from attentions, or else MLPs."""

    form: Form
    attention: bool

    def is_output(self, weight: Weight) -> bool:
        return (weight.values if self.attention else weight.neurons) == "in"

    def share(self, choice: WeightChoice) -> float:
        form, dim = form_named(choice.form).shortening(choice.dim)
        return dim / form.full(choice.weight) if form.name == self.form.name else 1.0


PARTS: Mapping[str, Part] = {
    part: Part(form, attention=part in ("heads", "attentions")) for form in FORMS for part in form.removes
}


def shares(choices: Sequence[WeightChoice]) -> dict[str, float]:
    """The fraction of each component that the choices keep, from 0 to 1."""
    kept = {name: [part.share(each) for each in choices if part.is_output(each.weight)] for name, part in PARTS.items()}
    return {name: sum(values) / len(values) if values else 1.0 for name, values in kept.items()}


def without(sites: Sequence[Site], part: str | None = None) -> tuple[WeightChoice, ...]:
    """Dense choices without half of one component: half of each block's, or half of the blocks."""
    weights = [weight for site in sites for weight in site.weights]
    dense = {weight.name: _choice(DENSE, weight) for weight in weights}
    if part is None:
        return tuple(dense.values())
    form = PARTS[part].form
    planned = as_planned(sites, (form.name,), False)
    blocks = [each for each in planned if any(map(PARTS[part].is_output, each.weights)) and each.joint_weights(form)]
    for site in blocks[::2] if form.loss.needs_forward_runs else blocks:
        dense |= {weight.name: _choice(form, weight, 2) for weight in site.weights if form.applies_to(weight)}
    return tuple(dense.values())


def _choice(form: Form, weight: Weight, of: int = 1) -> WeightChoice:
    return WeightChoice(weight, form.name, form.full(weight) // of)

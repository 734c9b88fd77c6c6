"""What runs in a model beside the GEMMs, in parts that forms take away: neurons, heads, whole attentions and MLPs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gac.forms import DENSE, FORMS, Form, form_named
from gac.forms.planned_sites import as_planned
from gac.models.sites import Site, Weight
from gac.plan.plan import WeightChoice


@dataclass(frozen=True)
class Part:
    """What a form takes away, told by the weights that write from an attention (``values``) or an MLP (``neurons``)."""

    form: Form
    attention: bool

    def has(self, weight: Weight) -> bool:
        """Whether it is the weight that writes from such a block."""
        return (weight.values if self.attention else weight.neurons) == "in"

    def kept(self, choice: WeightChoice) -> float:
        """Of what the block has; 1 where the choice is of another form."""
        form, dim = form_named(choice.form).shortening(choice.dim)
        return dim / form.full(choice.weight) if form.name == self.form.name else 1.0


PARTS: Mapping[str, Part] = {
    part: Part(form, attention=part in ("heads", "attentions")) for form in FORMS for part in form.removes
}


def shares(choices: Sequence[WeightChoice]) -> dict[str, float]:
    """The fraction of each part that there is, between 0 and 1."""
    kept = {name: [part.kept(one) for one in choices if part.has(one.weight)] for name, part in PARTS.items()}
    return {name: sum(found) / len(found) if found else 1.0 for name, found in kept.items()}


def without(sites: Sequence[Site], part: str | None = None) -> tuple[WeightChoice, ...]:
    """Every weight dense but for one part, of which half is gone: half of each block's, or of the blocks.

    Args:
        part: None: nothing is gone.
    """
    weights = [weight for site in sites for weight in site.weights]
    dense = {weight.name: _choice(DENSE, weight) for weight in weights}
    if part is None:
        return tuple(dense.values())
    form = PARTS[part].form
    planned = as_planned(sites, (form.name,), False)
    blocks = [
        site for site in planned if any(PARTS[part].has(weight) for weight in site.weights) and site.joint_weights(form)
    ]
    for site in blocks[::2] if form.loss.needs_forward_runs else blocks:
        dense |= {weight.name: _choice(form, weight, 2) for weight in site.weights if form.applies_to(weight)}
    return tuple(dense.values())


def _choice(form: Form, weight: Weight, of: int = 1) -> WeightChoice:
    return WeightChoice(weight, form.name, form.full(weight) // of)

"""Forms of a weight, one folder each but for the dense one. Other rooms ask the form, never which form it is."""

from gac.core.errors import PlanError
from gac.core.registry import Registry, check_contract
from gac.forms.base import Form as Form
from gac.forms.base import Shorter as Shorter
from gac.forms.base import variants_of as variants_of
from gac.models.sites import Weight, check_weight

_EDITED = "Make it again; this file was edited."

FORMS: Registry[Form] = Registry(
    "form",
    {
        "dense": "gac.forms.base:Dense",
        "low_rank": "gac.forms.low_rank:LowRank",
        "narrow": "gac.forms.narrow:Narrow",
        "head_dim": "gac.forms.head_dim:HeadDim",
        "narrow_pair": "gac.forms.narrow_pair:NarrowPair",
        "latent": "gac.forms.latent:Latent",
        "kv_bits": "gac.forms.kv_bits:KVBits",
        "heads": "gac.forms.heads:HeadGroups",
        "skip": "gac.forms.skip:Skip",
        "experts": "gac.forms.experts:Experts",
    },
    lambda form: check_contract("form", form, (), Form),
    PlanError,
)
"""Every form by name; ``latent:N:int8`` has groups of N heads and 8 bits, ``narrow_pair:N`` an MLP of N neurons."""

DENSE = FORMS.get("dense")
"""The form of weights that stay as they are."""

DEFAULT_FORMS = ("low_rank", "narrow")
"""Forms that compete with the dense weight by default."""

LATENCY_FORMS = (*DEFAULT_FORMS, "skip")
"""Defaults where a latency below the dense model's is asked for: skipping whole blocks loses least there."""


form_named = FORMS.get
"""The form of a name; PlanError if there is none."""


def check_choice(weight: Weight, form: str, dim: int) -> None:
    check_weight(weight)
    known = form_named(form)
    if not known.applies_to(weight):
        raise PlanError(f"weight {weight.name} has the form {form}", "a form that it can take", _EDITED)
    multiple = known.multiple(weight)
    if not known.least(weight) <= dim <= known.full(weight) or dim % multiple:
        expected = f"a dim from {known.least(weight)} to {known.full(weight)}"
        expected += f" that is a multiple of {multiple}" if multiple > 1 else ""
        raise PlanError(f"weight {weight.name} has {form} dim {dim}", expected, _EDITED)

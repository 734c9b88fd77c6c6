"""The sites of a model as a plan decides on them: which are joined, and what runs as one GEMM."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal

from gac.core.errors import PlanError
from gac.forms import FORMS, Form, Shorter, form_named
from gac.models.sites import Site

Fusing = bool | Literal["auto"]
"""Whether first GEMMs of one input run as one: everywhere, nowhere, or where that is chosen."""


def run_together(sites: Sequence[Site], either: bool = False) -> tuple[Site, ...]:
    """The sites as they are where weights that read the same input run their first GEMMs as one.

    Neighbouring sites whose weights read the same input become one site, so that their dims are chosen together.

    Args:
        either: whether the weights of each such site may run by themselves as well.
    """
    found = []
    for _, group in groupby(sites, key=lambda site: site.weights[0].reads or site.name):
        members = list(group)
        weights = tuple(weight for site in members for weight in site.weights)
        fused = tuple(at for at, weight in enumerate(weights) if weight.reads is not None)
        assert fused == tuple(range(len(fused))), f"{members[0].name}: weights that share an input come first"
        site = members[0]
        if len(members) > 1:
            kind = "+".join(member.kind for member in members)
            site = Site(f"{weights[0].reads}.{kind}", site.layer, kind, weights)
        found.append(replace(site, fused=fused, either=either and len(fused) > 1))
    return tuple(found)


def as_planned(sites: Sequence[Site], forms: Sequence[str], fused: Fusing | None) -> tuple[Site, ...]:
    """The family's sites as a plan decides on them.

    Neighbours that one of the forms shortens on sides that meet (v_proj and o_proj by ``head_dim``, a whole attention
    by ``heads``) become one site, and where it is ``fused`` (or ``auto``: may be) so do those that read the same input.
    """
    for form in map(form_named, forms):
        sites = _joined(sites, form)
    return run_together(sites, either=fused == "auto") if fused else tuple(sites)


def _joined(sites: Sequence[Site], form: Form) -> list[Site]:
    found: list[Site] = []
    for site in sites:
        last = found[-1] if found else None
        if last and form.shortens(last.weights[-1]) == "out" and form.shortens(site.weights[0]):
            kind = f"{last.kind}+{site.kind}"
            found[-1] = Site(f"{last.name}+{site.kind}", site.layer, kind, last.weights + site.weights)
        else:
            found.append(site)
    return found


def check_forms_fit(sites: Sequence[Site], forms: Sequence[str], model_type: str) -> None:
    """Refuse a form that no weight of the model can take, or that lies inside one which is not there.

    Args:
        sites: the family's.
        model_type: what the error calls the model.

    Raises:
        PlanError: there is such a form, or a form is unknown.
    """
    for form in map(form_named, forms):
        if not _fits(sites, form):
            if form.pieces and any(weight.groups == 1 for site in sites for weight in site.weights):
                given = f"form {form.name} for a {model_type} model with one KV head"
                raise PlanError(given, "two KV heads or more: one is always kept", "Leave it out.")
            raise PlanError(
                f"form {form.name}, which fits no weight of a {model_type} model",
                f"one of {', '.join(form.name for form in FORMS if _fits(sites, form))}",
                "Leave it out.",
            )
        if form.inside and form.inside not in forms:
            expected = f"{form.inside} among the forms, inside which it lies"
            raise PlanError(f"form {form.name} without {form.inside}", expected, f"Add the form {form.inside}.")


def _fits(sites: Sequence[Site], form: Form) -> bool:
    """Forms that shorten a side need another weight that meets it there; the others take any weight."""
    if not isinstance(form, Shorter):
        return any(form.takes(weight) for site in sites for weight in site.weights)
    return any(site.taken_by(form) for site in as_planned(sites, [form.name], fused=False))

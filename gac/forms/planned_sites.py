"""The sites of a model as a plan decides on them: joined where a form spans several, and fused."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Literal

from gac.core.errors import PlanError
from gac.forms import DEFAULT_FORMS, FORMS, LATENCY_FORMS, Form, Shorter, form_named
from gac.models.families import family_of
from gac.models.sites import Site

Fusing = bool | Literal["auto"]
"""First GEMMs of one input are fused: everywhere, nowhere, or where that is chosen."""


def targeted_sites(config: Any, forms: Sequence[str]) -> tuple[Site, ...]:
    """The sites of the family of a config: with routed experts only where one of the forms takes experts."""
    return family_of(config).sites(config, routed=any(form_named(name).loss.uses_routed_tokens for name in forms))


def fuse_sites(sites: Sequence[Site], optional: bool = False) -> tuple[Site, ...]:
    """The sites where weights with the same input run their first GEMMs as one; ``optional``: or one by one.

    Neighbouring sites whose weights have the same input become one site, so that their dims are chosen together.
    """
    grouped = []
    for _, group in groupby(sites, key=lambda site: site.weights[0].input_group or site.name):
        members = list(group)
        weights = tuple(weight for site in members for weight in site.weights)
        fused = tuple(index for index, weight in enumerate(weights) if weight.input_group is not None)
        assert fused == tuple(range(len(fused))), f"{members[0].name}: weights that share an input come first"
        site = members[0]
        if len(members) > 1:
            kind = "+".join(member.kind for member in members)
            site = Site(f"{weights[0].input_group}.{kind}", site.layer, kind, weights)
        grouped.append(replace(site, fused=fused, fusion_optional=optional and len(fused) > 1))
    return tuple(grouped)


def as_planned(sites: Sequence[Site], forms: Sequence[str], fused: Fusing | None) -> tuple[Site, ...]:
    """The family's sites as a plan decides on them.

    Neighbours that one of the forms shortens on sides that meet (v_proj and o_proj by ``head_dim``, a whole attention
    by ``heads``) become one site, and so do those with the same input where they are ``fused``, or may be (``auto``).
    """
    for form in map(form_named, forms):
        sites = _joined(sites, form)
    return fuse_sites(sites, optional=fused == "auto") if fused else tuple(sites)


def _joined(sites: Sequence[Site], form: Form) -> list[Site]:
    joined: list[Site] = []
    for site in sites:
        last = joined[-1] if joined else None
        if last and form.shortens(last.weights[-1]) == "out" and form.shortens(site.weights[0]):
            kind = f"{last.kind}+{site.kind}"
            joined[-1] = Site(f"{last.name}+{site.kind}", site.layer, kind, last.weights + site.weights)
        else:
            joined.append(site)
    return joined


def without_misfits(sites: Sequence[Site], forms: tuple[str, ...]) -> tuple[str, ...]:
    """The default forms that fit a weight of the model (some mixtures of experts have no MLP); others as they are."""
    if forms not in (DEFAULT_FORMS, LATENCY_FORMS):
        return forms
    return tuple(name for name in forms if _fits(sites, form_named(name)))


def check_forms_fit(sites: Sequence[Site], forms: Sequence[str], model_type: str) -> None:
    """Refuse a form that no weight of the model can take, or whose parent form is missing."""
    for form in map(form_named, forms):
        if not _fits(sites, form):
            if form.dim_counts_units and any(weight.groups == 1 for site in sites for weight in site.weights):
                problem = f"form {form.name} for a {model_type} model with one KV head"
                raise PlanError(problem, "two KV heads or more: one is always kept", "Leave it out.")
            raise PlanError(
                f"form {form.name}, which fits no weight of a {model_type} model",
                f"one of {', '.join(form.name for form in FORMS if _fits(sites, form))}",
                "Leave it out.",
            )
        if form.parent_form_name and form.parent_form_name not in forms:
            expected = f"{form.parent_form_name} among the forms, which it lies inside"
            raise PlanError(
                f"form {form.name} without {form.parent_form_name}", expected, f"Add the form {form.parent_form_name}."
            )


def _fits(sites: Sequence[Site], form: Form) -> bool:
    if not isinstance(form, Shorter):
        return any(form.applies_to(weight) for site in sites for weight in site.weights)
    # A form that shortens a side needs another weight that meets it there.
    return any(site.joint_weights(form) for site in as_planned(sites, [form.name], fused=False))

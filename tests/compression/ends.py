"""Models of which only embedding and head are rounded."""

from dataclasses import replace
from typing import Any

from gac.checkpoint.planned import attach_plan
from gac.measurement.embeddings import check_embeddings, embedding_shapes, quantised_embeddings, replace_embeddings
from gac.plan.evidence import RoundedHead
from gac.plan.plan import Plan
from gac.schemes import scheme_named
from tests.compression.compressed import MakePlan


def with_rounded_ends(model: Any, make_plan: MakePlan) -> Any:
    """The model with nothing else rounded, and the plan that says so."""
    check_embeddings(model)
    head = RoundedHead("w8a16", embedding_shapes(model), 0.25)
    plan = make_plan(model.config, {})
    ends = {id(weight) for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)}
    assert len(ends) == len(head.shapes)
    plan = replace(
        plan,
        recipe=with_recipe_head(plan),
        measured=replace(plan.measured, head=head, params=model.num_parameters(), family=model.config.model_type),
        prediction=replace(plan.prediction, head=0.25),
    )
    replace_embeddings(model, quantised_embeddings(model, scheme_named("w8a16")))
    return attach_plan(model, plan).eval()


def with_recipe_head(plan: Plan) -> Any:
    return replace(plan.recipe, space=replace(plan.recipe.space, head="w8a16"))

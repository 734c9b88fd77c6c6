"""Results as JSON documents for machines."""

import json
from typing import Any

from gac.files import to_json
from gac.plan import Plan


def plan_document(plan: Plan) -> dict[str, Any]:
    """A plan without its sites, and with the fractions and counts that follow from them."""
    document: dict[str, Any] = json.loads(to_json(plan))
    del document["sites"]
    document["budget"] |= {"kept": plan.budget.kept, "kept_of_model": plan.budget.kept_of_model}
    return document | {"alignment": plan.alignment, "aligned_fraction": plan.aligned_fraction}

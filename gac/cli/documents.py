"""The JSON documents of plans and frontiers: without their sites, and with the numbers that follow from them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gac
from gac.cli.options import named

if TYPE_CHECKING:
    from gac.allocation.frontier import Frontier
    from gac.plan.plan import Plan
    from gac.tokens.plan import TokenPlan


def named_plans(files: Sequence[Path]) -> dict[str, "Plan"]:
    """Load plans of weights, by their files' names."""
    return {name: gac.Plan.load(file) for name, file in named(files).items()}


def plan_document(plan: "Plan") -> dict[str, Any]:
    document = _plain(plan)
    del document["sites"]
    document |= {"kept": plan.budget.kept, "kept_of_model": plan.kept_of_model}
    for name, (used, total) in {"bytes": plan.bytes, "model_bytes": plan.model_bytes}.items():
        document[name] = {"used": used, "total": total}
    document |= dict(zip(("bits", "model_bits"), plan.bits, strict=True))
    return document | {"alignment": plan.alignment, "aligned_fraction": plan.aligned_fraction}


def tokens_document(plan: "TokenPlan") -> dict[str, Any]:
    sizes = {length: plan.cache_bytes(length) for length in plan.contexts}
    cache = {str(length): {"used": used, "total": total} for length, (used, total) in sizes.items()}
    return _plain(plan) | {"used": plan.used, "total": plan.total, "loss": plan.loss, "cache_bytes": cache}


def frontier_document(frontier: "Frontier") -> dict[str, Any]:
    from gac.plan.costs import COSTS

    document = _plain(frontier)
    del document["sites"]
    for entry, point in zip(document["points"], frontier.points, strict=True):
        del entry["choice"]
        entry["kept"] = entry["params"] / frontier.dense_params
        entry |= {"bits": frontier.bits(point)} | {name: frontier.amount(point, name) for name in COSTS}
    sizes = {name: frontier.dense_amount(name) for name in COSTS}
    dense = sizes | {"perplexity": frontier.dense_perplexity, "latency_ns": frontier.dense_ns}
    return document | {"dense": dense}


def _plain(record: Any) -> dict[str, Any]:
    from gac.core.io import to_json

    document: dict[str, Any] = json.loads(to_json(record))
    return document

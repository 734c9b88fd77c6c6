"""Plans and frontiers for pages, decided on small problems."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from transformers import LlamaConfig

from gac.allocation.decide import decide
from gac.allocation.frontier import Frontier, frontier
from gac.allocation.problem import Problem
from gac.allocation.rules import RULES
from gac.forms import form_named
from gac.plan.plan import Plan, SiteChoice
from gac.plan.recipe import Recipe
from gac.schemes import scheme_named
from tests.allocation.small_problems import PREFILL, asking, problem
from tests.changed import with_measured

LOSSES = [[8, 4, 2, 1, 0.5], [6, 3, 1.5, 0.75, 0.375]]
SLOPE = [10, 20, 30, 40, 50, 60]
LARGE = LlamaConfig(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
)
"""Llama-3-70B's shapes: 560 weights."""


def decided(
    budget: float = 0.667, workloads: Sequence[str] = (PREFILL,), latency: Mapping[str, float] = MappingProxyType({})
) -> Plan:
    """Two sites of 144 parameters, ranks of 24 each; 192 parameters are allowed."""
    return decide(asking(problem(LOSSES, SLOPE, workloads), budget, latency=latency)).plan


def rounding(**options: Any) -> Problem:
    """The same two sites of 288 bytes, whose numbers may have 4 bits, which costs a dense weight 0.25 nats."""
    of, plain = problem(LOSSES, SLOPE, [PREFILL]), {"align": False, "refit": "none", "latency": "any", "slack": 0}
    plain |= {"schemes": ["bf16", "w4a16"], "forms": ["low_rank"], "workloads": [PREFILL]}
    recipe = Recipe.of(**plain | options)
    weights = [weight for site in of.sites for weight in site.weights]
    price = {weight.name: np.array(0.25) for weight in weights}
    forms = [form_named("dense"), form_named("low_rank")]
    return replace(of, curves=of.curves.with_scheme(scheme_named("w4a16"), weights, forms, price), recipe=recipe)


def rounded(memory: float = 0.5) -> Plan:
    return decide(rounding(memory=memory)).plan


def by_rule() -> Plan:
    return RULES.get("uniform").decide(asking(problem(LOSSES, SLOPE, [PREFILL]), 0.5, rule="uniform")).plan


def whole_range(workloads: Sequence[str] = (PREFILL,)) -> Frontier:
    """7 points, of which the 5 that lose more than ln 3 are not shown."""
    return frontier(problem(LOSSES, SLOPE, workloads), points=7)


def renamed(plan: Plan, name: str) -> Plan:
    """The same plan, of a model and of weights of that name."""
    return replace(with_measured(plan, model=name), sites=tuple(_renamed(site, name) for site in plan.sites))


def _renamed(site: SiteChoice, name: str) -> SiteChoice:
    named = [replace(choice.weight, name=f"{site.site}.{name}") for choice in site.weights]
    weights = tuple(replace(choice, weight=weight) for choice, weight in zip(site.weights, named, strict=True))
    return replace(site, weights=weights, kind=name)

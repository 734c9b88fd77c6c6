"""Why dims collapse: rules with their sources, and what the recorded kernels tell."""

from gac.profiling.mechanisms.causes import Cause, cause_of, causes_of
from gac.profiling.mechanisms.edges import edge_causes
from gac.profiling.mechanisms.explain import explain
from gac.profiling.mechanisms.explanation import Collapse, Cost, Explanation, Finding, Ran
from gac.profiling.mechanisms.kernels import Kernel, describe
from gac.profiling.mechanisms.rules import RULES, Published, Rule, Setting, rule_named, rules_for
from gac.profiling.mechanisms.sources import Source

__all__ = [
    "RULES",
    "Cause",
    "Collapse",
    "Cost",
    "Explanation",
    "Finding",
    "Kernel",
    "Published",
    "Ran",
    "Rule",
    "Setting",
    "Source",
    "cause_of",
    "causes_of",
    "describe",
    "edge_causes",
    "explain",
    "rule_named",
    "rules_for",
]

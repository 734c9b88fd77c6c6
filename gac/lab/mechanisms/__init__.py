"""Why dims collapse: rules with their sources, and what the recorded kernels show."""

from gac.lab.mechanisms.causes import Cause, cause_of, causes_of
from gac.lab.mechanisms.edges import edge_causes
from gac.lab.mechanisms.explain import explain
from gac.lab.mechanisms.explanation import Collapse, Cost, Explanation, Finding, Ran
from gac.lab.mechanisms.rule import Source
from gac.lab.mechanisms.rules import RULES, Published, Rule, Setting, rule_named, rules_for

__all__ = [
    "RULES",
    "Cause",
    "Collapse",
    "Cost",
    "Explanation",
    "Finding",
    "Published",
    "Ran",
    "Rule",
    "Setting",
    "Source",
    "cause_of",
    "causes_of",
    "edge_causes",
    "explain",
    "rule_named",
    "rules_for",
]

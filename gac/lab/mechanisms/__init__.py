"""Why dims collapse: rules with their sources, and what the recorded kernels show."""

from gac.lab.mechanisms.axes import Setting
from gac.lab.mechanisms.causes import cause_of, causes_of, edge_causes
from gac.lab.mechanisms.explain import explain
from gac.lab.mechanisms.explanation import Cause, Collapse, Cost, Explanation, Finding
from gac.lab.mechanisms.rules import RULES, Published, Rule, Source, rules_for
from gac.lab.mechanisms.runs import Run

__all__ = [
    "RULES",
    "Cause",
    "Collapse",
    "Cost",
    "Explanation",
    "Finding",
    "Published",
    "Rule",
    "Run",
    "Setting",
    "Source",
    "cause_of",
    "causes_of",
    "edge_causes",
    "explain",
    "rules_for",
]

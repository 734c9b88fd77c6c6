"""Why dims collapse: rules with their sources, and what the recorded kernels show."""

from gac.lab.mechanisms.causes import causes_of, edge_causes
from gac.lab.mechanisms.explain import explain
from gac.lab.mechanisms.explanation import Cause, Collapse, Cost, Explanation, Finding
from gac.lab.mechanisms.runs import Run

__all__ = ["Cause", "Collapse", "Cost", "Explanation", "Finding", "Run", "causes_of", "edge_causes", "explain"]

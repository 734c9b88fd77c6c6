"""Why dims collapse: rules with their sources, and the kernels that were recorded."""

from gac.lab.mechanisms.causes import Cause, causes_of, edge_causes
from gac.lab.mechanisms.explain import Collapse, Cost, Explanation, Finding, explain
from gac.lab.mechanisms.launches import Run

__all__ = ["Cause", "Collapse", "Cost", "Explanation", "Finding", "Run", "causes_of", "edge_causes", "explain"]

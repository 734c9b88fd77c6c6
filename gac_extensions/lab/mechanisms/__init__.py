"""Why dims collapse: rules with their sources, and the kernels that were recorded."""

from gac_extensions.lab.mechanisms.causes import Cause, Run, causes_of, edge_causes
from gac_extensions.lab.mechanisms.explain import Collapse, Cost, Explanation, Finding, explain

__all__ = ["Cause", "Collapse", "Cost", "Explanation", "Finding", "Run", "causes_of", "edge_causes", "explain"]

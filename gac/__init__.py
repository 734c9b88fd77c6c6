"""GAC: GPU-aligned compression of large language models.

Importing this package loads neither torch nor transformers; each name below is fetched on first use. transformers'
``from_pretrained`` opens compressed checkpoints from then on.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gac.checkpoint.registration import register_with_transformers
from gac.version import __version__

if TYPE_CHECKING:
    from gac.allocation.frontier import Frontier
    from gac.allocation.knapsack import knapsack
    from gac.api import allocate, compress, frontier
    from gac.checkpoint.export import export
    from gac.checkpoint.load import load
    from gac.checkpoint.save import save
    from gac.errors import GacError
    from gac.evaluation.divergence import divergence
    from gac.evaluation.evaluate import evaluate
    from gac.evaluation.perplexity import perplexity
    from gac.evaluation.results import Divergence, Evaluation, Perplexity
    from gac.plan import Plan
    from gac.profiling.table import Profile
    from gac.quantizer import GacConfig
    from gac.recipe import Recipe
    from gac.repairs.contract import ShapeContract
    from gac.repairs.run import repair
    from gac.reporting.report.render import report
    from gac.sensitivity.documents import Documents

_HOMES = {
    "allocate": "gac.api",
    "compress": "gac.api",
    "export": "gac.checkpoint.export",
    "frontier": "gac.api",
    "repair": "gac.repairs.run",
    "save": "gac.checkpoint.save",
    "load": "gac.checkpoint.load",
    "perplexity": "gac.evaluation.perplexity",
    "report": "gac.reporting.report.render",
    "divergence": "gac.evaluation.divergence",
    "evaluate": "gac.evaluation.evaluate",
    "knapsack": "gac.allocation.knapsack",
    "Divergence": "gac.evaluation.results",
    "Frontier": "gac.allocation.frontier",
    "GacConfig": "gac.quantizer",
    "Documents": "gac.sensitivity.documents",
    "Evaluation": "gac.evaluation.results",
    "GacError": "gac.errors",
    "Perplexity": "gac.evaluation.results",
    "Plan": "gac.plan",
    "Profile": "gac.profiling.table",
    "Recipe": "gac.recipe",
    "ShapeContract": "gac.repairs.contract",
}

__all__ = [
    "Divergence",
    "Documents",
    "Evaluation",
    "Frontier",
    "GacConfig",
    "GacError",
    "Perplexity",
    "Plan",
    "Profile",
    "Recipe",
    "ShapeContract",
    "__version__",
    "allocate",
    "compress",
    "divergence",
    "evaluate",
    "export",
    "frontier",
    "knapsack",
    "load",
    "perplexity",
    "repair",
    "report",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gac' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


register_with_transformers()

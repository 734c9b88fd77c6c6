"""GAC: GPU-aligned compression of large language models.

Importing this package loads neither torch nor transformers; each name below is fetched on first use. transformers'
``from_pretrained`` opens compressed checkpoints from then on.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gac.checkpoint.classes import register_with_transformers
from gac.version import __distribution__ as __distribution__
from gac.version import __version__

if TYPE_CHECKING:
    from gac.allocation.frontier import Frontier as Frontier
    from gac.allocation.knapsack import knapsack as knapsack
    from gac.api import allocate as allocate
    from gac.api import compress as compress
    from gac.api import frontier as frontier
    from gac.checkpoint.export import export as export
    from gac.checkpoint.load import load as load
    from gac.checkpoint.save import save as save
    from gac.errors import GacError as GacError
    from gac.evaluation.evaluate import evaluate as evaluate
    from gac.evaluation.perplexity import divergence as divergence
    from gac.evaluation.perplexity import perplexity as perplexity
    from gac.evaluation.results import Divergence as Divergence
    from gac.evaluation.results import Evaluation as Evaluation
    from gac.evaluation.results import Perplexity as Perplexity
    from gac.plan import Plan as Plan
    from gac.profiling.table import Profile as Profile
    from gac.quantizer import GacConfig as GacConfig
    from gac.recipe import Recipe as Recipe
    from gac.repairs.contract import ShapeContract as ShapeContract
    from gac.repairs.run import repair as repair
    from gac.reporting.report.render import report as report
    from gac.sensitivity.documents import Documents as Documents

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
    "divergence": "gac.evaluation.perplexity",
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

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gac' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


register_with_transformers()

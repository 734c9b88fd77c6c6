"""GAC: GPU-aligned compression of large language models.

Importing this package loads neither torch nor transformers; each name below is fetched on first use. transformers'
``from_pretrained`` opens compressed checkpoints from then on.
"""

from typing import TYPE_CHECKING

from gac.checkpoint.classes import register_with_transformers
from gac.core.version import __distribution__ as __distribution__
from gac.core.version import __version__ as __version__

if TYPE_CHECKING:
    from gac import plots as plots
    from gac.allocation.frontier_record import Frontier as Frontier
    from gac.allocation.knapsack import Group as Group
    from gac.allocation.knapsack import Solution as Solution
    from gac.allocation.knapsack import knapsack as knapsack
    from gac.api import allocate as allocate
    from gac.api import compress as compress
    from gac.api import frontier as frontier
    from gac.api import heal as heal
    from gac.checkpoint.export import export as export
    from gac.checkpoint.load import load as load
    from gac.checkpoint.save import save as save
    from gac.checkpoint.verify import Verified as Verified
    from gac.checkpoint.verify import verify as verify
    from gac.core.errors import GacError as GacError
    from gac.evaluation.evaluate import evaluate as evaluate
    from gac.evaluation.perplexity import divergence as divergence
    from gac.evaluation.perplexity import perplexity as perplexity
    from gac.evaluation.results import Divergence as Divergence
    from gac.evaluation.results import Evaluation as Evaluation
    from gac.evaluation.results import Perplexity as Perplexity
    from gac.measurement.documents import Documents as Documents
    from gac.plan.plan import Plan as Plan
    from gac.plan.recipe import Recipe as Recipe
    from gac.profiling.table import Profile as Profile
    from gac.quantizer import GacConfig as GacConfig
    from gac_extensions.gguf.write import GgufFile as GgufFile
    from gac_extensions.gguf.write import export_gguf as export_gguf
    from gac_extensions.lab.cliffs import find_cliffs as find_cliffs
    from gac_extensions.lab.figures import published_heads as published_heads
    from gac_extensions.lab.mechanisms.explain import explain as explain
    from gac_extensions.repairs.contract import ShapeContract as ShapeContract
    from gac_extensions.repairs.run import repair as repair
    from gac_extensions.tokens.allocate import allocate_tokens as allocate_tokens
    from gac_extensions.tokens.allocate import press as press
    from gac_extensions.tokens.page import report as report
    from gac_extensions.tokens.plan import TokenPlan as TokenPlan
else:
    from importlib import import_module

    _NAMES = {
        "gac.allocation.frontier_record": "Frontier",
        "gac.allocation.knapsack": "Group Solution knapsack",
        "gac.api": "allocate compress frontier heal",
        "gac.checkpoint.export": "export",
        "gac_extensions.gguf.write": "GgufFile export_gguf",
        "gac.checkpoint.load": "load",
        "gac.checkpoint.save": "save",
        "gac.checkpoint.verify": "Verified verify",
        "gac.core.errors": "GacError",
        "gac.evaluation.evaluate": "evaluate",
        "gac.evaluation.perplexity": "divergence perplexity",
        "gac.evaluation.results": "Divergence Evaluation Perplexity",
        "gac_extensions.lab.figures": "published_heads",
        "gac_extensions.lab.mechanisms.explain": "explain",
        "gac.measurement.documents": "Documents",
        "gac.plan.plan": "Plan",
        "gac.plan.recipe": "Recipe",
        "gac_extensions.lab.cliffs": "find_cliffs",
        "gac.profiling.table": "Profile",
        "gac.quantizer": "GacConfig",
        "gac_extensions.repairs.contract": "ShapeContract",
        "gac_extensions.repairs.run": "repair",
        "gac_extensions.tokens.allocate": "allocate_tokens press",
        "gac_extensions.tokens.page": "report",
        "gac_extensions.tokens.plan": "TokenPlan",
    }
    _HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
    __all__ = ["__version__", "plots", *_HOMES]

    def __getattr__(name):
        if name == "plots":
            return import_module("gac.plots")
        if name not in _HOMES:
            raise AttributeError(f"module 'gac' has no attribute {name!r}; it has {', '.join(__all__)}")
        return getattr(import_module(_HOMES[name]), name)

    def __dir__():
        return sorted(__all__)


register_with_transformers()

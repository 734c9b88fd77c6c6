"""Engines that serve models: the forms and schemes that each runs at full speed, and the kernels that it has."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from gac.core.errors import PlanError
from gac.core.operations import Operation
from gac.core.workloads import Workload
from gac.models.attentions import heads_of

STEPS = ("engine_step", "served_step")
"""Operators of whole steps of the dense model in an engine: by its own class, and by GAC's plugin."""


@dataclass(frozen=True)
class Engine:
    """An engine for which plans are made.

    Attributes:
        forms, schemes: what it runs at full speed beside dense weights; None: all.
        shares: weights that read the same input always share a GEMM.
        few_rows: up to so many rows its linear layers run in the kernels of ``gac.runtime.kernels.few_rows``.
    """

    name: str
    forms: tuple[str, ...] | None = None
    schemes: tuple[str, ...] | None = None
    shares: bool = False
    few_rows: int = 0

    def operation(self, operation: Operation) -> Operation:
        """Return the operation as the engine runs it: a GEMM of few rows by the name of its own kernels."""
        served = operation.operator in ("linear", "low_rank") and operation.axes["m"] <= self.few_rows
        return replace(operation, operator=f"served_{operation.operator}") if served else operation

    def check(self, forms: tuple[str, ...], schemes: tuple[str, ...]) -> None:
        """Refuse a form or scheme that the engine does not run at full speed, by a PlanError that names it."""
        for kind, names, runs in (("form", forms, self.forms), ("scheme", schemes, self.schemes)):
            if runs is not None and (others := [name for name in names if name.partition(":")[0] not in runs]):
                problem, expected = f"{kind} {others[0]} for engine {self.name}", f"{kind}s {', '.join(runs)}"
                raise PlanError(problem, expected, f"Leave it out, or plan for engine {TRANSFORMERS.name}.")

    def runs(self, forms: tuple[str, ...], schemes: tuple[str, ...]) -> bool:
        """Return whether ``check`` passes."""
        try:
            self.check(forms, schemes)
        except PlanError:
            return False
        return True


TRANSFORMERS = Engine("transformers")
VLLM = Engine("vllm", ("low_rank", "narrow", "narrow_pair", "skip"), ("bf16",), shares=True, few_rows=64)
ENGINES: Mapping[str, Engine] = MappingProxyType({engine.name: engine for engine in (TRANSFORMERS, VLLM)})


@dataclass(frozen=True)
class Step:
    """Times of a whole step of a dense model, ns: in the engine's own class, and served by GAC's plugin."""

    dense_ns: int
    served_ns: int


def steps_of(config: Any, workload: Workload) -> tuple[Operation, ...]:
    """Return the whole steps of a dense model, one of each of ``STEPS``: the operations that a table has of an engine.

    Args:
        config: a transformers config of a text model, or its shapes.

    Returns:
        Two operations; none where the config does not name its sizes as Llama's does.
    """
    if getattr(config, "intermediate_size", None) is None:
        return ()
    heads = heads_of(config)
    axes = {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "neurons": config.intermediate_size,
        "h": heads.queries,
        "kv": heads.cached,
        "d": heads.length,
        "vocabulary": config.vocab_size,
        "b": workload.batch,
        "s": workload.rows // workload.batch,
        "t": workload.tokens,
    }
    return tuple(Operation(name, tuple(axes.items())) for name in STEPS)

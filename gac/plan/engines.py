"""Engines that serve models: what each runs at full speed, and the kernels that it has."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from gac.core.operations import EXPERTS, Operation
from gac.core.workloads import Workload
from gac.forms import form_named
from gac.models.attentions import heads_of
from gac.models.families import family_of
from gac.models.shapes import Shapes
from gac.models.sites import Site, Weight
from gac.runtime.contract import FEW_ROWS, SERVED_EXPERTS
from gac.runtime.limits import no_kernel
from gac.schemes import DEFAULT_SCHEME, Scheme, scheme_named, scheme_timed_as

STEPS = ("engine_step", "served_step", "paired_step")
"""Operators of whole steps of a dense model in an engine: by its own class, by GAC's plugin, and there with every
weight of attentions and MLPs as a low-rank pair."""

MIXTURE_STEPS = tuple(f"{name}_of_experts" for name in STEPS)
"""The same of a mixture whose layers all have routed experts alone, with their number and those of a token."""

PAIR = form_named("low_rank")
"""The form of those pairs."""


@dataclass(frozen=True)
class Engine:
    """An engine for which plans are made.

    Attributes:
        plugin: plans are served by GAC's plugin, which runs forms that are ``served``, and schemes with kernels.
        shares: weights that read the same input always share a GEMM.
        few_rows: up to so many rows its linear layers of 16 bits run in ``gac.runtime.kernels.few_rows``.
    """

    name: str
    plugin: bool = False
    shares: bool = False
    few_rows: int = 0

    def operation(self, operation: Operation, dtype: str) -> Operation:
        """Return the operation as the engine runs it: routed experts and GEMMs of few rows in kernels of its own."""
        is_wide = dtype in ("bf16", "fp16") and operation.operator in ("linear", "low_rank")
        served = (is_wide and operation.axes["m"] <= self.few_rows) or (self.plugin and operation.operator == EXPERTS)
        return replace(operation, operator=f"served_{operation.operator}") if served else operation

    def has_kernels(self, operation: Operation, dtype: str) -> bool:
        """Return whether the plugin's kernels read the matrices of a GEMM, in a dtype of latency tables.

        Routed experts in a scheme have a kernel in the plugin alone.
        """
        scheme, sizes = scheme_timed_as(dtype), operation.axes
        if scheme is not None and operation.operator == EXPERTS:
            return self.plugin and self.runs_experts(scheme)
        if scheme is None or not self.plugin or "n" not in sizes:
            return True
        rank = sizes.get("r")
        matrices = [(sizes["n"], sizes["k"])] if rank is None else [(rank, sizes["k"]), (sizes["n"], rank)]
        return not any(scheme.kernel_unsupported_reason(*matrix) for matrix in matrices)

    def runs_experts(self, scheme: Scheme) -> bool:
        """Return whether the engine runs routed experts in a scheme: the plugin's kernel reads few of them."""
        stored = scheme.storage is not None and scheme.storage.storage in SERVED_EXPERTS
        return not self.plugin or stored or not scheme.lossy

    def unserved(self, forms: Sequence[str], schemes: Sequence[str]) -> str | None:
        """Return the first form or scheme that the engine does not run at full speed; None where it runs all.

        Forms that take routed experts need one scheme that experts run in; other weights may have any of the schemes.
        """
        if not self.plugin:
            return None
        slow = [f"form {name}" for name in forms if not form_named(name).served]
        without = [name for name in schemes if name != DEFAULT_SCHEME and not _has_kernel(name)]
        taking = [name for name in forms if form_named(name).loss.uses_routed_tokens]
        runs = bool(taking) and any(self.runs_experts(scheme_named(name)) for name in schemes)
        both = [f"form {form} in scheme {scheme}" for form in taking for scheme in schemes if not runs]
        return next(iter([*slow, *(f"scheme {name}" for name in without), *both]), None)


def _has_kernel(scheme: str) -> bool:
    storage = scheme_named(scheme).storage
    return storage is not None and storage.limit is not no_kernel


TRANSFORMERS = Engine("transformers")
VLLM = Engine("vllm", plugin=True, shares=True, few_rows=FEW_ROWS)
ENGINES: Mapping[str, Engine] = MappingProxyType({engine.name: engine for engine in (TRANSFORMERS, VLLM)})


@dataclass(frozen=True)
class Step:
    """A whole step of a dense model.

    Attributes:
        dense_ns: in the engine's own class.
        served_ns: by GAC's plugin.
        scale: time that a GEMM takes within a step, over that alone. Clocks sink under load, activations shrink along
            with MLPs, and little is gained where a step waits for its launches.
        launch_ns: what one more GEMM costs a step beside its own time. Most where a step waits for its launches.
        in_schemes: likewise ``scale``, of GEMMs in a scheme, by its name: what else differs in such a step is in it.
    """

    dense_ns: int
    served_ns: int
    scale: Fraction = Fraction(1)
    launch_ns: int = 0
    in_schemes: Mapping[str, Fraction] = field(default_factory=dict)

    def scale_in(self, scheme: str) -> Fraction:
        return self.in_schemes.get(scheme, self.scale)


def steps_of(config: Any, workload: Workload) -> tuple[Operation, ...]:
    """Return the whole steps of a dense model: the operations that a table has of an engine.

    Args:
        config: a transformers config of a text model, or its shapes.

    Returns:
        Four operations: ``engine_step``, ``served_step``, that with MLPs or experts of half the width, and
        ``paired_step``. None where the config does not name its sizes as Llama's does, or layers are not alike.
    """
    family = family_of(config)
    names = MIXTURE_STEPS if family.experts else STEPS
    if getattr(config, "intermediate_size", None) is None or not (family.is_plain or family.is_plain_mixture(config)):
        return ()
    engine, served, paired = (_step(name, config, workload) for name in names)
    return engine, served, _step(served.operator, with_half_mlps(config), workload), paired


def sites_in(scheme: Scheme, config: Any) -> list[Site]:
    """Return the sites of a model with the weights that its ``served_step`` in a scheme has in it: no routers."""
    sites = family_of(config).sites(config, routed=VLLM.runs_experts(scheme))
    return [replace(site, weights=tuple(filter(scheme.applies_to, site.weights))) for site in sites]


def paired_rank(weight: Weight) -> int:
    """Return a weight's rank in ``paired_step``: half of that at which a pair is as large, a multiple of 8 from 8."""
    return max(8, weight.params // PAIR.params(weight, 2) // 8 * 8)


def with_half_mlps(config: Any) -> Any:
    """Return a copy of a config, or of shapes, with MLPs, or routed experts, of half the width."""
    experts = family_of(config).experts
    key = experts.width if experts else "intermediate_size"
    neurons = getattr(config, key) // 2
    if isinstance(config, Shapes):
        return replace(config, **{key: neurons})
    halved = copy.copy(config)  # whose class may not declare all that a config says
    setattr(halved, key, neurons)
    return halved


def _step(name: str, config: Any, workload: Workload) -> Operation:
    heads, experts = heads_of(config), family_of(config).experts
    axes = {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "neurons": getattr(config, experts.width) if experts else config.intermediate_size,
        "h": heads.queries,
        "kv": heads.cached,
        "d": heads.length,
        "vocabulary": config.vocab_size,
        "b": workload.batch,
        "s": workload.rows // workload.batch,
        "t": workload.tokens,
    }
    if experts:
        axes |= {"experts": getattr(config, experts.count), "top_k": getattr(config, experts.active)}
    return Operation(name, tuple(axes.items()))

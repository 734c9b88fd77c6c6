"""Contents of a latency table in the words of plans: models, schemes, rows, and whole steps in an engine."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from gac.core.workloads import Workload
from gac.models.families import family_of
from gac.models.shapes import SHAPES
from gac.plan.engines import MIXTURE_STEPS, STEPS, steps_of
from gac.profiling.table import Profile
from gac.schemes import scheme_timed_as

_GEMMS = ("linear", "served_linear")
Shape = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class ModelRows:
    """A known model, all of whose dense weights were measured in a scheme: with so many rows of input, sorted."""

    model: str
    scheme: str
    rows: tuple[int, ...]


@dataclass(frozen=True)
class ModelSteps:
    """A model whose whole steps were measured in an engine, in a scheme, for these workloads."""

    model: str
    scheme: str
    workloads: tuple[str, ...]


def known_models(profile: Profile) -> tuple[ModelRows, ...]:
    """List the models of ``gac.models.shapes`` that a table has, by scheme.

    Counted are GEMMs of single weights that were measured; in few rows also by the kernels of GAC's plugin.
    """
    gemms, known = _gemms(profile), []
    for name, shapes in SHAPES.items():
        weights = (weight for site in family_of(shapes).sites(shapes) for weight in site.weights)
        sizes = {(weight.in_features, weight.out_features) for weight in weights}
        for dtype, rows_of in sorted(gemms.items()):
            if rows := set.intersection(*(rows_of.get(size, set()) for size in sizes)):
                known.append(ModelRows(name, _scheme(dtype), tuple(sorted(rows))))
    return tuple(known)


def known_steps(profile: Profile) -> tuple[ModelSteps, ...]:
    """List the models whose whole steps a table has: the engine's own in 16 bits, in other schemes the plugin's."""
    steps, kinds = defaultdict[tuple[str, str], list[str]](list), profile.measurements.kinds
    for engine_step, served_step, _ in (STEPS, MIXTURE_STEPS):
        in_engine = {kind.dtype for kind in kinds if kind.operator == engine_step}
        dense = {shape for dtype in in_engine for shape in _shapes(profile, engine_step, dtype)}
        for dtype in dict.fromkeys(kind.dtype for kind in kinds):
            for shape in _shapes(profile, engine_step if dtype in in_engine else served_step, dtype):
                if shape in dense:
                    axes = dict(shape)
                    workload = Workload("decode" if axes["s"] == 1 else "prefill", axes["b"], axes["t"])
                    steps[_model(shape, workload), _scheme(dtype)].append(str(workload))
    return tuple(ModelSteps(*key, tuple(workloads)) for key, workloads in sorted(steps.items()))


def _model(shape: Shape, workload: Workload) -> str:
    for name, shapes in SHAPES.items():
        if any(step.shape == shape for step in steps_of(shapes, workload)):
            return name
    axes = dict(shape)
    experts = f", {axes['experts']} experts" if "experts" in axes else ""
    return f"{axes['layers']} layers of {axes['hidden']}{experts}"


def _scheme(dtype: str) -> str:
    scheme = scheme_timed_as(dtype)
    return dtype if scheme is None else scheme.name


def _gemms(profile: Profile) -> dict[str, dict[tuple[int, int], set[int]]]:
    """Rows of input by dtype and by the sizes ``(k, n)`` of the weight."""
    gemms: dict[str, dict[tuple[int, int], set[int]]] = {}
    for kind in profile.measurements.kinds:
        if kind.operator in _GEMMS:
            of_dtype = gemms.setdefault(kind.dtype, defaultdict(set))
            for shape in _shapes(profile, kind.operator, kind.dtype):
                axes = dict(shape)
                of_dtype[axes["k"], axes["n"]].add(axes["m"])
    return gemms


def _shapes(profile: Profile, operator: str, dtype: str) -> Iterator[Shape]:
    """Yield the shapes that have a number, with operands in memory; sorted."""
    rows = profile.measurements
    for number, kind in enumerate(rows.kinds):
        if kind[:3] == (operator, dtype, "cold"):
            sizes = rows.sizes[(rows.kind == number) & (rows.counts > 0), : len(kind.axes)]
            for row in sorted(sizes.tolist()):
                yield tuple(zip(kind.axes, row, strict=True))

"""How far latencies are off that no table has and a model of the GPU gives, on shapes that it was not fitted to.

    python tests/benchmarks/modelled.py --output modelled.json

Of each shipped table, one model's shapes at a time are left out: all that ``gac profile --model NAME --fuse`` measures
for it, whichever other models share them, and where the table has weights in schemes (``--scheme``) in all of those
too. A model of the GPU is fitted to the rest and gives their latencies. ``--tables`` names other tables. What was
measured of Gemma-3-270M on an H200, in a table of its own, is given by the model of the shipped H200 table. Then that
table's plans of Gemma-3-270M are timed with the measured one. It needs no GPU, and takes about two minutes.

    python tests/benchmarks/modelled.py --tables nvidia-h200 nvidia-h200-vllm --known --output known.json

``--known`` says instead how much of published models (``tests/data/configs``) each table knows: the share of the
parameters in weights whose latency is known, dense, and at all dims of the default forms that plans may choose.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig

from gac.allocation.dims import allowed_dims, full_dim
from gac.allocation.latencies import MODELLED, UNKNOWN, Latencies, Timing, unnamed
from gac.core.arrays import Bools, Floats, Ints
from gac.core.errors import BudgetError
from gac.core.workloads import Workload
from gac.forms import DEFAULT_FORMS, DENSE, form_named
from gac.forms.planned_sites import fuse_sites
from gac.models.families import family_of
from gac.models.shapes import SHAPES, Shapes
from gac.models.sites import Site, Weight
from gac.plan.engines import TRANSFORMERS, VLLM, Engine
from gac.plan.plan import Plan
from gac.profiling.contents import known_models
from gac.profiling.modelled.model import GpuModel
from gac.profiling.modelled.roofline import Gpu
from gac.profiling.records import Measurement, Point
from gac.profiling.rows import Rows
from gac.profiling.sweeps.coverage import WORKLOADS, fused_points, model_points
from gac.profiling.table import Profile
from gac.schemes import DEFAULT_SCHEME, Scheme, scheme_named, scheme_timed_as
from gac_extensions.lab.shapes.models import planner_of_shapes
from tests.benchmarks.harness import markdown, options, write

TABLES = ("nvidia-h100-80gb-hbm3", "nvidia-h200")
GEMMA = Path(__file__).parent / "results" / "gemma3-270m-h200.jsonl"
GEMMA_SHAPES = Shapes("gemma3_text", 640, 2048, 18, 4, 1, 256, 262_144)
BUDGETS = (0.9, 0.8, 0.7, 0.6)
CONFIGS = Path(__file__).parents[1] / "data" / "configs"
PUBLISHED = (
    *("qwen3-0.6b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "ministral-8b-2410", "ministral-3-8b"),
    *("gemma-3-4b", "gemma-3-12b", "llama-3.2-1b", "llama-3.2-3b", "smollm3-3b", "phi-4"),
)
LIKE = "like qwen3.5-27b"
HYBRID = {  # layers, outputs and inputs of the weights of Qwen3.5-27B outside of its MLPs
    "q_proj": (16, 12_288, 5120),
    "k_proj": (16, 1024, 5120),
    "v_proj": (16, 1024, 5120),
    "o_proj": (16, 5120, 6144),
    "in_proj_qkv": (48, 10_240, 5120),
    "in_proj_z": (48, 6144, 5120),
    "in_proj_b": (48, 48, 5120),
    "in_proj_a": (48, 48, 5120),
    "out_proj": (48, 5120, 6144),
}
COLUMNS = ("table", "left out", "operator", "dtype", "rows", "shapes", "unknown", "median", "95th percentile")


def model_without(profile: Profile, left_out: Ints) -> GpuModel:
    """The model of a GPU fitted to all rows of its table but these."""
    rows = profile.measurements
    counts = rows.counts.copy()
    counts[left_out] = 0
    kept = np.repeat(counts > 0, rows.counts)
    fewer = replace(rows, passes=rows.passes[kept], starts=np.concatenate([[0], np.cumsum(counts)]))
    return GpuModel(fewer, Gpu(profile.header.sm_count, profile.header.l2_bytes))


def rows_of(table: Rows, points: Iterable[Point]) -> Ints:
    """The numbers of the rows of these points."""
    wanted = set(map(named, points))
    return np.array([row for row, one in enumerate(table) if named(one) in wanted], dtype=np.int64)


def schemes_of(table: Rows) -> tuple[str, ...]:
    """The schemes in whose storage the table has weights."""
    found = (scheme_timed_as(kind.dtype) for kind in table.kinds)
    return tuple(dict.fromkeys(scheme.name for scheme in found if scheme is not None))


def named(one: Point | Measurement) -> tuple[Any, ...]:
    """What a point is told apart by."""
    operator, shape = (
        (one.operation.operator, one.operation.axes) if isinstance(one, Point) else (one.operator, one.shape)
    )
    return operator, one.dtype, one.cache, tuple(shape.values())


def errors(model: GpuModel, table: Rows, which: Ints) -> dict[tuple[str, str, int], Floats]:
    """Relative errors of a model at these rows of a table, by operator, dtype and rows of the input; NaN: unknown."""
    grouped: dict[tuple[Any, int], list[int]] = defaultdict(list)
    for row in which.tolist():
        kind = table.kinds[int(table.kind[row])]
        grouped[kind, int(table.sizes[row, kind.axes.index("m")])].append(row)
    found = {}
    for (kind, m), ours in grouped.items():
        modelled = model.latency(kind.operator, kind.dtype, kind.axes, table.sizes[ours, : len(kind.axes)])
        found[kind.operator, kind.dtype, m] = modelled / table.median_ns[ours] - 1
    return found


def told(table: str, left_out: str, by_kind: dict[tuple[str, str, int], Floats]) -> list[dict[str, Any]]:
    """Figures of each operator and dtype: of each number of rows, and of all. Where dtypes are several of each, too."""
    kinds: dict[tuple[str, str, str], list[Floats]] = defaultdict(list)
    several = len({dtype for _, dtype, _ in by_kind}) > 1
    for (operator, dtype, rows), off in by_kind.items():
        kinds[operator, dtype, str(rows)].append(off)
        kinds[operator, dtype, "all"].append(off)
        if several:
            kinds["all", dtype, "all"].append(off)
    return [
        {"table": table, "left_out": left_out, "operator": operator, "dtype": dtype, "rows": rows}
        | figures(np.concatenate(off))
        for (operator, dtype, rows), off in sorted(kinds.items())
    ]


def figures(off: Floats) -> dict[str, Any]:
    """Of relative errors, NaN where a latency is unknown; ``bias`` is the median with its sign."""
    known = off[np.isfinite(off)]
    if not len(known):
        return {"shapes": len(off), "unknown": len(off), "median": None, "p95": None, "bias": None}
    size = np.abs(known)
    return {
        "shapes": len(off),
        "unknown": len(off) - len(known),
        "median": float(np.median(size)),
        "p95": float(np.quantile(size, 0.95)),
        "bias": float(np.median(known)),
    }


def engine_of(table: Rows) -> Engine:
    return VLLM if any(kind.operator.startswith("served_") for kind in table.kinds) else TRANSFORMERS


def workloads_of(profile: Profile) -> tuple[Workload, ...]:
    """Workloads with as many rows of input as a table has of some model."""
    counts = sorted({count for model in known_models(profile) for count in model.rows})
    return tuple(Workload.parse(f"decode:{m}@1024" if m < 1024 else f"prefill:{m // 1024}x1024") for m in counts)


def model_left_out(profile: Profile, model: str) -> list[dict[str, Any]]:
    """One model's shapes of a table, in 16 bits and in every scheme that the table has."""
    table, workloads = profile.measurements, workloads_of(profile)
    points = (*model_points(model, workloads, schemes=schemes_of(table)), *fused_points(model, workloads))
    engine = engine_of(table)
    which = rows_of(table, (replace(p, operation=engine.operation(p.operation, p.dtype)) for p in points))
    return told(profile.path.stem, model, errors(model_without(profile, which), table, which))


def octaves_left_out(profile: Profile) -> list[dict[str, Any]]:
    """What a plan states: octaves of sizes left out in turn; here of every operator, dtype and number of rows."""
    model, found = profile.model, []
    table = model.measurements
    asked = {
        (kind.dtype, rows)
        for number, kind in enumerate(table.kinds)
        if "m" in kind.axes
        for rows in np.unique(table.sizes[table.kind == number, kind.axes.index("m")]).tolist()
    }
    for dtype, rows in sorted(asked):
        for operator, off in model.errors(rows, dtype).items():
            told = {"shapes": len(off), "median": float(np.median(off)), "p95": float(np.quantile(off, 0.95))}
            found.append({"table": profile.path.stem, "operator": operator, "dtype": dtype, "rows": rows} | told)
    return found


def gemma() -> list[dict[str, Any]]:
    """Gemma-3-270M as measured on an H200, of what the shipped table lacks."""
    shipped, measured = Profile.load(TABLES[1]), Profile.load(GEMMA).measurements
    known = set(map(named, shipped.measurements))
    lacking = [row for row, one in enumerate(measured) if named(one) not in known]
    return told(TABLES[1], "gemma-3-270m (measured apart)", errors(shipped.model, measured, np.array(lacking)))


def plans() -> list[dict[str, Any]]:
    """Plans of Gemma-3-270M made from the shipped H200 table: their time by that, and as its own table has it."""
    planner, measured, found = planner_of_shapes(GEMMA_SHAPES, WORKLOADS, TABLES[1]), Profile.load(GEMMA), []
    for budget in BUDGETS:
        for latency in ({}, {str(one): 1.0 for one in WORKLOADS}):
            try:
                plan = planner.plan(budget, latency=latency)
            except BudgetError as refused:
                found.append({"budget": budget, "latency": latency, "refused": str(refused)})
                continue
            for at, one in enumerate(plan.workloads):
                took, dense = (summed(plan, measured, at, whole) for whole in (False, True))
                assert one.plan_ns is not None
                assert one.dense_ns is not None
                found.append(
                    {"budget": budget, "latency": latency, "workload": one.workload, "modelled": one.modelled}
                    | {"plan": one.plan_ns / took - 1, "dense": one.dense_ns / dense - 1}
                    | {"kept": one.plan_ns / one.dense_ns, "kept_as_measured": took / dense}
                )
    return found


def summed(plan: Plan, profile: Profile, workload: int, dense: bool) -> int:
    """What the plan's weights take in another table, measured or interpolated; or the dense ones."""
    timing, total = Timing(profile, WORKLOADS), 0
    for weight in plan.weights:
        form = form_named("dense" if dense else weight.form)
        dim = form.full(weight.weight) if dense else weight.dim
        ns, _ = timing.of_weight(form, weight.weight, np.array([dim]))
        assert ns[0, workload] != UNKNOWN
        total += int(ns[0, workload])
    return total


# --- how much of published models a table knows ---------------------------------------------------------------------


def sites_of(name: str) -> tuple[Site, ...]:
    if name != LIKE:
        config = AutoConfig.from_pretrained(CONFIGS / f"{name}.json")
        return family_of(config).sites(config)
    weights = (Weight(f"{layer}.{key}", *size) for key, (count, *size) in HYBRID.items() for layer in range(count))
    mlps = cycle(site for site in sites_of("qwen3-14b") if site.kind == "mlp")
    return (*(Site(weight.name, 0, weight.name, (weight,)) for weight in weights), *islice(mlps, 64))


def latencies_of(site: Site, scheme: Scheme, timing: Timing) -> Iterator[tuple[list[int], bool, Latencies]]:
    """Latencies that plans look up: of which weights, by their positions, true where they are dense, and at which dims.

    Of default forms these are all dims that a plan allows, of a GEMM that weights share all widths in steps of 32.
    """
    for position, weight in enumerate(site.weights):
        look_up = timing.after_fused if position in site.fused else timing.of_weight
        yield [position], True, look_up(DENSE, weight, full_dim(weight), scheme)
        for form in (form for form in map(form_named, DEFAULT_FORMS) if form.applies_to(weight)):
            dims = allowed_dims(form.max_useful_dim(weight), site, form, scheme, [position], True, timing)
            yield [position], False, look_up(form, weight, dims, scheme)
    if fused := list(site.fused):
        widest = sum(site.weights[position].out_features for position in fused)
        for dense, widths in ((True, np.array([widest])), (False, np.arange(32, widest, 32))):
            every = np.repeat(widths[:, None], len(timing.workloads), axis=1)
            yield fused, dense, timing.of_shared(site.weights[fused[0]], every, scheme)


def known_params(site: Site, scheme: Scheme, timing: Timing) -> Ints:
    """Parameters in weights whose latency is known dense, in all forms too, and modelled dense; ``(3, workloads)``."""
    marks: Bools = np.ones((3, len(site.weights), len(timing.workloads)), dtype=np.bool_)
    known, in_forms, looked_up = marks
    for layout in site.fused_and_unfused:
        for positions, dense, (ns, source) in latencies_of(layout, scheme, timing):
            in_forms[positions] &= (ns != UNKNOWN).all(axis=0)
            if dense:
                known[positions] &= (ns != UNKNOWN).all(axis=0)
                looked_up[positions] &= (source != MODELLED).all(axis=0)
    modelled = known & ~looked_up
    return np.array([weight.params for weight in site.weights]) @ np.stack([known, in_forms, modelled])


def known_shares(profile: Profile, name: str) -> Iterator[dict[str, Any]]:
    """Those as shares of the parameters of a model, by scheme and workload."""
    table, workloads = profile.measurements, workloads_of(profile)
    timing = Timing(profile, workloads, engine=engine_of(table))
    sites = fuse_sites(sites_of(name), optional=not timing.engine.shares)
    distinct = Counter(tuple(map(unnamed, site.weights)) for site in sites)
    of_weights = {tuple(map(unnamed, site.weights)): site for site in sites}
    params = sum(site.params for site in sites)
    for scheme in map(scheme_named, (DEFAULT_SCHEME, *schemes_of(table))):
        counted = sum(known_params(of_weights[key], scheme, timing) * count for key, count in distinct.items())
        for workload, shares in zip(workloads, (counted / params).T.tolist(), strict=True):
            about = {"table": profile.path.stem, "model": name, "scheme": scheme.name, "workload": str(workload)}
            yield about | dict(zip(("dense", "forms", "modelled"), shares, strict=True))


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def main() -> None:
    parser = options(__doc__, "--output")
    parser.add_argument("--tables", nargs="*", default=TABLES, help="names or paths; by default the shipped ones")
    parser.add_argument("--known", action="store_true", help="say how much of published models the tables know")
    asked = parser.parse_args()
    tables = [Profile.load(name) for name in asked.tables]
    if asked.known:
        known = [row for table in tables for name in (*PUBLISHED, LIKE) for row in known_shares(table, name)]
        cells = [[percent(cell) if isinstance(cell, float) else cell for cell in row.values()] for row in known]
        print(markdown(tuple(known[0]), cells))
        return write(asked.output, known=known)
    left_out = [row for table in tables for model in SHAPES for row in model_left_out(table, model)] + gemma()
    shown = [
        [str(row[name]) for name in ("table", "left_out", "operator", "dtype", "rows", "shapes", "unknown")]
        + [percent(row[name]) for name in ("median", "p95")]
        for row in left_out
    ]
    print(markdown(COLUMNS, shown))
    own, planned = [row for table in tables for row in octaves_left_out(table)], plans()
    return write(asked.output, left_out=left_out, octaves=own, plans=planned)


if __name__ == "__main__":
    main()

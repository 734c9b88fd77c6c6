"""Sentences about what beats a plan: the dense model, or a point of the frontier."""

from collections.abc import Iterator
from math import exp, log

from gac.allocation.frontier import Frontier, FrontierPoint
from gac.core.words import megabytes, nats
from gac.plan.plan import Plan
from gac_extensions.report.measured import mean_ratio
from gac_extensions.report.sources import Sources

_LESS = 0.99  # of the plan's loss: a point that loses little less is no better


def verdicts(sources: Sources) -> tuple[str, ...]:
    """Sentences for the top of the page; none where nothing is better than the plan."""
    return (*_slower_than_dense(sources), *_worse_than_frontier(sources))


def _slower_than_dense(sources: Sources) -> Iterator[str]:
    plan, measured = sources.plan, sources.measured
    loss, source = (log(mean_ratio(measured)), "measured") if measured else (plan.prediction.loss, "predicted")
    known = [(timed.workload, timed.plan_ns, timed.dense_ns) for timed in plan.workloads]
    slower = {name: ours / dense for name, ours, dense in known if ours and dense and round(ours / dense, 3) > 1}
    if not slower or loss <= 0:
        return
    (size, dense_size), (cached, cached_dense) = plan.model_bytes, plan.kv_numbers
    saved = [f"{megabytes(size)} instead of {megabytes(dense_size)} for the model"] if size < dense_size else []
    saved += [f"{cached / cached_dense:.3f} of the KV cache"] if cached < cached_dense else []
    ratios = " and ".join(f"{ratio:.3f}" for ratio in slower.values())
    yield (
        f"The dense model is faster at {' and '.join(slower)}, and loses nothing: the plan takes {ratios} times as "
        f"long, and its perplexity is {exp(loss):.3f} times as high ({source}). "
        f"It saves {'memory alone there: ' if saved else 'no memory either'}{', '.join(saved)}."
    )


def _worse_than_frontier(sources: Sources) -> Iterator[str]:
    plan, frontier = sources.plan, sources.frontier
    if frontier is None or not _same_scale(plan, frontier):
        return
    loss, size = plan.prediction.loss, plan.bytes[0]

    def rank(point: FrontierPoint) -> tuple[bool, float]:  # the least loss that is no larger, else the smallest
        weights = frontier.bytes(point)
        return (True, weights) if weights > size else (False, point.loss)

    better = [point for point in frontier.points if 0 < point.loss < _LESS * loss and _no_slower(plan, frontier, point)]
    if not better:
        return
    point = min(better, key=rank)
    weights = frontier.bytes(point)
    where = " where memory does not decide" if weights > size else ""
    yield (
        f"The frontier has a better choice{where}, at {point.asked:.4g} of the {frontier.limit_label}: no slower, "
        f"{nats(point.loss)} instead of {nats(loss)} nats a token lost, {megabytes(weights)} instead of "
        f"{megabytes(size)} of targeted weights."
    )


def _same_scale(plan: Plan, frontier: Frontier) -> bool:
    """Compare what predicted losses and latencies depend on, beside the choices."""
    ours, theirs = (
        (
            record.measured.profile.digest,
            record.recipe.measure.shots,
            record.recipe.deployment.engine,
            record.recipe.deployment.tensor_parallel,
        )
        for record in (plan, frontier)
    )
    return ours == theirs


def _no_slower(plan: Plan, frontier: Frontier, point: FrontierPoint) -> bool:
    theirs = dict(zip(frontier.workloads, point.latency_ns, strict=True))
    pairs = [(timed.plan_ns, theirs.get(timed.workload)) for timed in plan.workloads]
    known = [(ours, ns) for ours, ns in pairs if ours is not None and ns is not None]
    return bool(known) and all(ns <= ours for ours, ns in known)

"""The benchmark: contestants built, timed in groups that all hold the dense model, and set beside their prediction."""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from gac.evaluation.contestants import DENSE, FUSED, Contestant
from gac.evaluation.latency import Spread, Timer, interleaved
from gac.evaluation.variants import hollow, variant
from gac.sites import Site, Workload, run_together

GROUP = 3


@dataclass(frozen=True)
class Reference:
    """What predictions of a workload rest on, all of it measured in one run.

    Attributes:
        dense: the dense model, with the same fusing as what is predicted.
        table_ns: what the latency table sums up to for it.
        rest: the model without the GEMMs of its targeted weights.
        rest_half: the same with half the neurons of every MLP.
    """

    dense: Spread
    table_ns: int
    rest: Spread
    rest_half: Spread

    @property
    def scale(self) -> float:
        """What the GEMMs take in the whole model, over what they take by themselves in the table."""
        return (self.dense.median_ns - self.rest.median_ns) / self.table_ns

    def predict(self, table_ns: int, neurons: float) -> float:
        """ns of a model end to end: its GEMMs' sum, scaled as the dense model's, and the rest at its neurons."""
        slope = 2 * (self.rest.median_ns - self.rest_half.median_ns)
        return self.scale * table_ns + self.rest.median_ns - slope * (1 - neurons)

    def predict_by_sum(self, table_ns: int) -> float:
        """The plainer one: the table's sum, and what the dense model takes beyond its own."""
        return table_ns + self.dense.median_ns - self.table_ns


@dataclass(frozen=True)
class Result:
    """One contestant at one workload.

    Attributes:
        params: of the targeted weights.
        loss: predicted, nats a token.
        latency: measured.
        dense, dense_fused: of the dense model, in the same rounds.
        memory_bytes: weights, KV cache and the most that a run allocates.
        predicted_ns, sum_ns: ``Reference.predict`` and ``predict_by_sum``; None where the table lacks a shape.
    """

    name: str
    workload: str
    params: int
    loss: float
    latency: Spread
    dense: Spread
    dense_fused: Spread
    tokens_per_second: float
    memory_bytes: int
    predicted_ns: float | None
    sum_ns: float | None
    scale: float | None
    rest_ns: float

    @property
    def speedup(self) -> float:
        """Over the dense model with fused weights."""
        return self.dense_fused.median_ns / self.latency.median_ns

    @property
    def error(self) -> float | None:
        """Of the prediction, over what is measured."""
        return None if self.predicted_ns is None else self.predicted_ns / self.latency.median_ns - 1


@dataclass(frozen=True, eq=False)
class Bench:
    """A dense model, and how to time what is made of it.

    Attributes:
        model: on the device where it is timed.
        sites: as its family gives them.
        dense, fused: the dense contestants.
    """

    model: PreTrainedModel
    sites: Sequence[Site]
    dense: Contestant
    fused: Contestant
    timer: Timer[Any]

    def run(self, contestants: Sequence[Contestant], workload: Workload) -> Iterator[Result]:
        """Time the dense models, and beside them the contestants, three at a time."""
        for start in range(0, max(len(contestants), 1), GROUP):
            results = self._group(contestants[start : start + GROUP], workload)
            _free()
            yield from results[0 if start == 0 else 2 :]

    def _group(self, group: Sequence[Contestant], workload: Workload) -> list[Result]:
        timed = [self.dense, self.fused, *group]
        held = [self.timer.hold(self._built(one), workload, one.compiled) for one in timed]
        memory = [taken for _, taken in held]
        held += [self.timer.hold(hollow(self.model, self.sites, share), workload, False) for share in (1.0, 0.5)]
        samples = interleaved(lambda order: self.timer.round([held[at][0] for at in order]), len(held))
        spreads = [Spread.of(column) for column in samples.T]
        return [self._result(one, workload, spreads, at, memory[at]) for at, one in enumerate(timed)]

    def _built(self, one: Contestant) -> PreTrainedModel:
        return variant(self.model, one.choices, run_together(self.sites) if one.fused else ())

    def _result(self, one: Contestant, workload: Workload, spreads: Sequence[Spread], at: int, memory: int) -> Result:
        dense, dense_fused, rest, rest_half = spreads[0], spreads[1], spreads[-2], spreads[-1]
        own = self.fused if one.fused else self.dense
        table, ours = own.table_ns.get(str(workload)), one.table_ns.get(str(workload))
        reference = Reference(dense_fused if one.fused else dense, table, rest, rest_half) if table else None
        known = reference is not None and ours is not None and not one.compiled
        tokens = workload.rows
        return Result(
            one.name,
            str(workload),
            one.params,
            one.loss,
            spreads[at],
            dense,
            dense_fused,
            1e9 * tokens / spreads[at].median_ns,
            memory,
            reference.predict(ours, one.neurons) if known else None,  # type: ignore[union-attr, arg-type]
            reference.predict_by_sum(ours) if known else None,  # type: ignore[union-attr, arg-type]
            reference.scale if reference else None,
            rest.median_ns,
        )


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


__all__ = ["DENSE", "FUSED", "GROUP", "Bench", "Reference", "Result"]

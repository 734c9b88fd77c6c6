"""The benchmark: versions built, timed in groups that all hold the dense model, and set beside their prediction."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from gac.allocation.attention_latencies import counted
from gac.allocation.latencies import Timing
from gac.compression.ends import rounded_ends
from gac.core.workloads import Workload
from gac.evaluation.latency import Entry, Spread, Timed, Timer, time_in_turns
from gac.evaluation.parts import PARTS, shares, without
from gac.evaluation.shapes import variant, weight_bytes, without_gemms
from gac.evaluation.split import SplitShapes
from gac.evaluation.versions import Version
from gac.forms import form_named
from gac.forms.planned_sites import fuse_sites
from gac.models.sites import Site
from gac.plan.evidence import RoundedHead
from gac.plan.plan import WeightChoice
from gac.profiling.timing.sampling import BATCH
from gac.schemes import scheme_named

_USABLE = 0.92
_WORKSPACE = 4 * 10**9


@dataclass(frozen=True)
class Reference:
    """What predictions of a workload rest on, all of it measured in one run.

    Attributes:
        dense: the dense model, with the same fusing as what is predicted.
        table_ns: what the latency table sums up to for its GEMMs.
        rest: the model without the GEMMs of its targeted weights.
        less: the same with less of a part, by its name in ``gac.evaluation.parts.PARTS``, and how much there is of it.
    """

    dense: Spread
    table_ns: int
    rest: Spread
    less: Mapping[str, tuple[float, Spread]]

    def predict(self, table_ns: int, shares: Mapping[str, float]) -> float:
        """ns of a model end to end: its GEMMs' sum, scaled as the dense model's, and the rest with what it has of it.

        Args:
            shares: of every part; one that was not measured counts in full.
        """
        rest = self.rest.median_ns
        scale = (self.dense.median_ns - rest) / self.table_ns
        gone = ((1 - shares[part]) * (rest - less.median_ns) / (1 - share) for part, (share, less) in self.less.items())
        return scale * table_ns + rest - sum(gone)

    def predict_by_sum(self, table_ns: int) -> float:
        """The plainer one: the table's sum, and what the dense model takes beyond its own."""
        return table_ns + self.dense.median_ns - self.table_ns


@dataclass(frozen=True)
class Result:
    """One version at one workload.

    Attributes:
        params: of the targeted weights.
        loss: predicted, nats a token.
        timed: what was measured.
        dense, dense_fused: of the dense model, in the same rounds.
        rest: of the model without the GEMMs of its targeted weights, likewise.
        planned_bytes: what the dense model takes, with the plan's weights and cache in place of its own.
        predicted_ns, sum_ns: ``Reference.predict`` and ``predict_by_sum``; None where the table lacks a shape.
    """

    params: int
    loss: float
    timed: Timed
    dense: Spread
    dense_fused: Spread
    rest: Spread
    planned_bytes: int
    predicted_ns: float | None = None
    sum_ns: float | None = None

    @property
    def memory_error(self) -> float:
        """Of the plan's bytes, over what is measured."""
        return self.planned_bytes / self.timed.memory_bytes - 1

    @property
    def speedup(self) -> float:
        """Over the dense model with fused weights."""
        return self.dense_fused.median_ns / self.timed.latency.median_ns

    @property
    def error(self) -> float | None:
        """Of the prediction, over what is measured."""
        return None if self.predicted_ns is None else self.predicted_ns / self.timed.latency.median_ns - 1


@dataclass(frozen=True, eq=False)
class Bench:
    """A dense model, and how to time what is made of it.

    Attributes:
        model: on the device where it is timed.
        sites: as its family gives them.
        timing: what the versions' sums are made of.
        dense_versions: as ``Planner.dense_versions`` gives them.
        memory_bytes: of the device, which says how many versions are timed at once; None: as many as may be.
        split: what makes this process's part of each version, where they are split; ``model`` is the dense one's then.
    """

    model: PreTrainedModel
    sites: Sequence[Site]
    timing: Timing
    dense_versions: tuple[Version, Version, Version]
    timer: Timer[Any]
    memory_bytes: int | None = None
    split: SplitShapes | None = None
    _rounded: dict[str, Mapping[str, nn.Module]] = field(default_factory=dict, init=False, repr=False)

    def run(self, versions: Sequence[Version], workload: Workload) -> Iterator[Result]:
        """Time the dense models, and beside them the versions, as many at once as there is room for."""
        sizes = [one.bytes // self._gpus for one in versions]
        parts = _parts_gone(versions)
        dense, heads = len(self.dense_versions), len(_heads(versions))
        beside = dense + heads + len(parts)  # the dense models, and those without GEMMs
        for first, group in enumerate(in_groups(versions, sizes, self._room(workload), BATCH - beside)):
            results = self._group(group, workload, parts)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            yield from results[dense if first else 0 :]

    def _room(self, workload: Workload) -> float:
        """Bytes for versions: what the dense model, its fused copy, the KV cache and workspaces leave."""
        if self.memory_bytes is None:
            return inf
        weights = [weight for site in self.sites for weight in site.weights]
        copied = sum(weight.params for weight in weights if weight.input_group is not None)
        cached = sum(weight.cached_numbers for weight in weights) * workload.batch * workload.tokens
        taken = weight_bytes(self.model) + (copied + cached) * self.model.dtype.itemsize // self._gpus
        return _USABLE * self.memory_bytes - taken - _WORKSPACE

    @property
    def _gpus(self) -> int:
        """Over which each version is split."""
        return self.split.ranks.size if self.split else 1

    def _group(self, group: Sequence[Version], workload: Workload, gone: Sequence[str]) -> list[Result]:
        versions = [*self.dense_versions, *group]
        entries = [Entry(one.name, partial(self._built, one), one.compiled) for one in versions]
        less = {part: without(self.sites, part) for part in gone}
        heads = _heads(versions)
        hollow = [(without(self.sites), head) for head in heads] + [(choices, None) for choices in less.values()]
        entries += [Entry("rest", partial(self._hollow, *one)) for one in hollow]
        timed = time_in_turns(entries, workload, self.timer)
        latencies = [one.latency for one in timed[len(versions) :]]
        rests = dict(zip(heads, latencies, strict=False))
        dense = {one.fused is True: each for one, each in zip(self.dense_versions, timed, strict=False)}
        parts = {part: (shares(less[part])[part], one) for part, one in zip(less, latencies[len(heads) :], strict=True)}
        return [self._result(one, of_one, dense, rests, parts) for one, of_one in zip(versions, timed, strict=False)]

    def _built(self, one: Version) -> PreTrainedModel:
        fused = fuse_sites(self.sites) if one.fused is True else one.fused or ()
        if self.split:
            return self.split.variant(one.choices, fused, one.triton, one.plain)
        return variant(self.model, one.choices, fused, one.triton, one.plain, self._ends(one.head))

    def _hollow(self, choices: Sequence[WeightChoice], head: RoundedHead | None) -> PreTrainedModel:
        return self.split.without_gemms(choices) if self.split else without_gemms(self.model, choices, self._ends(head))

    def _ends(self, head: RoundedHead | None) -> Mapping[str, nn.Module]:
        """Embedding and head, rounded once for all versions that have them so."""
        if head is None:
            return {}
        if head.scheme not in self._rounded:
            self._rounded[head.scheme] = rounded_ends(self.model, scheme_named(head.scheme))
        return self._rounded[head.scheme]

    def _result(
        self,
        one: Version,
        timed: Timed,
        dense: Mapping[bool, Timed],
        rests: Mapping[RoundedHead | None, Spread],
        less: Mapping[str, tuple[float, Spread]],
    ) -> Result:
        """Beside the prediction, where the table has what it needs; ``dense`` is by whether weights are fused."""
        rest = rests[None]
        _, own, fused = self.dense_versions
        own, beside = fused if one.fused is True else own, dense[one.fused is True]
        planned = beside.memory_bytes + self._held(one, timed.workload) - self._held(own, timed.workload)
        found = Result(one.params, one.loss, timed, dense[False].latency, dense[True].latency, rest, planned)
        dense_ns, ours = own.table_ns.get(timed.workload), one.table_ns.get(timed.workload)
        if dense_ns is None or ours is None or one.compiled or one.plain or one.gpus != self._gpus:
            return found
        of_dense, of_ours, moved = self._attention(own, one, timed.workload)
        reference = Reference(beside.latency, dense_ns - of_dense, rest, less)
        other_head = rests[one.head].median_ns - rest.median_ns
        predicted = reference.predict(ours - of_ours, shares(one.choices)) + moved + other_head
        return replace(found, predicted_ns=predicted, sum_ns=reference.predict_by_sum(ours - of_dense))

    def _held(self, one: Version, workload: str) -> int:
        """Bytes of a GPU's part of the targeted weights and, where tokens are decoded, of the KV cache.

        A rounded head counts with what it is smaller by.
        """
        asked = Workload.parse(workload)
        tokens = asked.batch * asked.tokens if asked.phase == "decode" else 0
        head = one.head.bytes - one.head.dense_bytes if one.head else 0
        return (one.bytes + head + one.kv_numbers * tokens * self.model.dtype.itemsize) // self._gpus

    def _attention(self, dense: Version, one: Version, workload: str) -> tuple[int, int, int]:
        """What sums of the table hold of attention, of the dense model and of a version; how much latents add to it.

        The model without GEMMs has dense attention, and models with less of a part tell what other forms change.
        """
        over = [form_named(choice.form).cache.axis(choice.weight) is not None for choice in one.choices]
        before = [choice for choice, latents in zip(dense.choices, over, strict=True) if latents]
        after = [choice for choice, latents in zip(one.choices, over, strict=True) if latents]
        found = [counted(self.timing, choices, workload) for choices in (dense.choices, one.choices, before, after)]
        return found[0], found[1], found[3] - found[2]


def _heads(versions: Sequence[Version]) -> tuple[RoundedHead | None, ...]:
    """Those that the versions have, the dense model's first."""
    return tuple(dict.fromkeys((None, *(one.head for one in versions))))


def _parts_gone(versions: Sequence[Version]) -> list[str]:
    """The parts of which one of them has less than the dense model."""
    found = [shares(one.choices) for one in versions]
    return [part for part in PARTS if any(one[part] < 1 for one in found)]


def in_groups(versions: Sequence[Version], sizes: Sequence[int], room: float, most: int) -> list[list[Version]]:
    """Neighbours together, as many as fit into the room, from one to ``most``; one empty group where none is.

    Args:
        sizes: in bytes, of each version.
    """
    groups: list[list[Version]] = [[]]
    left = room
    for one, size in zip(versions, sizes, strict=True):
        if groups[-1] and (size > left or len(groups[-1]) == most):
            groups.append([])
            left = room
        groups[-1].append(one)
        left -= size
    return groups

"""Build versions, time them in groups that all include the dense model, and compare with the prediction."""

import gc
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

import torch
from torch import nn
from transformers import PreTrainedModel

from gac.allocation.latencies import Timing, summed_attention
from gac.core.workloads import Workload
from gac.evaluation.latency import Entry, Spread, Timed, Timer, time_in_turns, weight_bytes
from gac.forms import DENSE, FORMS, Form, form_named
from gac.forms.planned_sites import as_planned, fuse_sites
from gac.measurement.embeddings import quantised_embeddings
from gac.models.sites import Site, Weight
from gac.plan.evidence import RoundedHead
from gac.plan.plan import WeightChoice
from gac.profiling.timing.sampling import BATCH
from gac.schemes import scheme_named
from gac_extensions.lab.shapes.models import variant, without_gemms
from gac_extensions.lab.shapes.split import SplitShapes
from gac_extensions.lab.shapes.versions import Version

_USABLE = 0.92
_WORKSPACE = 4 * 10**9


PARTS: Mapping[str, Form] = {part: form for form in FORMS for part in form.removes}
"""Components of the time beside the GEMMs (attentions, MLPs, heads, neurons), by the form that removes each."""


def shares(choices: Sequence[WeightChoice]) -> dict[str, float]:
    """The fraction of each component that the choices keep, from 0 to 1."""
    kept: dict[str, list[float]] = {part: [] for part in PARTS}
    for choice in choices:
        form, dim = form_named(choice.form).shortening(choice.dim)
        for part, remover in PARTS.items():
            if _is_output(part, choice.weight):
                kept[part].append(dim / form.full(choice.weight) if form.name == remover.name else 1.0)
    return {part: sum(values) / len(values) if values else 1.0 for part, values in kept.items()}


def _is_output(part: str, weight: Weight) -> bool:
    return (weight.values if part in ("heads", "attentions") else weight.neurons) == "in"


def without(sites: Sequence[Site], part: str | None = None) -> tuple[WeightChoice, ...]:
    """Dense choices without half of one component: half of each block's, or half of the blocks."""
    weights = [weight for site in sites for weight in site.weights]
    dense = {weight.name: WeightChoice(weight, DENSE.name, DENSE.full(weight)) for weight in weights}
    if part is None:
        return tuple(dense.values())
    form = PARTS[part]
    blocks = [
        site
        for site in as_planned(sites, (form.name,), False)
        if any(_is_output(part, weight) for weight in site.weights) and site.joint_weights(form)
    ]
    for site in blocks[::2] if form.loss.needs_forward_runs else blocks:
        dense |= {
            weight.name: WeightChoice(weight, form.name, form.full(weight) // 2)
            for weight in site.weights
            if form.applies_to(weight)
        }
    return tuple(dense.values())


Reduced = Mapping[str, tuple[float, Spread]]
"""By component of PARTS: a share of it, and the time of the model without GEMMs with that share."""


def predicted_latency(
    dense_ns: float, rest_ns: float, gemms: float, reduced: Reduced, kept: Mapping[str, float]
) -> float:
    """ns of a model: the GEMMs of the dense one times ``gemms``, and the rest less what the ``kept`` shares save.

    ``rest_ns`` is the time of the dense model without the GEMMs of its targeted weights, measured in the same run.
    """
    saved = ((1 - kept[part]) * (rest_ns - less.median_ns) / (1 - share) for part, (share, less) in reduced.items())
    return (dense_ns - rest_ns) * gemms + rest_ns - sum(saved)


@dataclass(frozen=True)
class Result:
    """One version at one workload; predictions are None if the table lacks a shape."""

    params: int  # of the targeted weights
    loss: float  # predicted, nats a token
    timed: Timed  # the measurement
    dense: Spread  # of the dense model, in the same rounds
    dense_fused: Spread
    rest: Spread  # of the model without the GEMMs of its targeted weights, likewise
    planned_bytes: int  # those of the dense model, with the plan's weights and KV cache
    predicted_ns: float | None = None  # by ``predicted_latency``
    sum_ns: float | None = None  # the table's sum, and the dense model's time beyond its own sum

    @property
    def memory_error(self) -> float:
        return self.planned_bytes / self.timed.memory_bytes - 1

    @property
    def speedup(self) -> float:
        """Over the fused dense model."""
        return self.dense_fused.median_ns / self.timed.latency.median_ns

    @property
    def error(self) -> float | None:
        return None if self.predicted_ns is None else self.predicted_ns / self.timed.latency.median_ns - 1


@dataclass(frozen=True, eq=False)
class Bench:
    """A dense model, and the way to time its versions."""

    model: PreTrainedModel  # on the device; with ``split``, this process's shard
    sites: Sequence[Site]  # of its family
    timing: Timing  # of the versions' table latencies
    dense_versions: tuple[Version, Version, Version]  # as ``Planner.dense_versions`` gives them
    timer: Timer
    memory_bytes: int | None = None  # of the device, which limits the versions in memory; None means no limit
    split: SplitShapes | None = None  # builds this process's shard of each version, if they are split
    _quantized_ends: dict[str, Mapping[str, nn.Module]] = field(default_factory=dict, init=False, repr=False)

    def run(self, versions: Sequence[Version], workload: Workload) -> Iterator[Result]:
        """Time the dense models and the versions, as many at once as fit in memory."""
        sizes = [version.bytes // self._gpus for version in versions]
        kept = [shares(version.choices) for version in versions]
        parts = [part for part in PARTS if any(each[part] < 1 for each in kept)]
        dense = len(self.dense_versions)
        count = BATCH - dense - len(_heads(versions)) - len(parts)  # besides the dense models and those without GEMMs
        for number, group in enumerate(in_groups(versions, sizes, self._room(workload), count)):
            results = self._time_group(group, workload, parts)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            yield from results[dense if number else 0 :]

    def _room(self, workload: Workload) -> float:
        """Bytes for versions, besides the dense model, its fused copy, the KV cache and workspaces."""
        if self.memory_bytes is None:
            return inf
        weights = [weight for site in self.sites for weight in site.weights]
        copied = sum(weight.params for weight in weights if weight.input_group is not None)
        cached = sum(weight.cached_numbers for weight in weights) * workload.batch * workload.tokens
        used = weight_bytes(self.model) + (copied + cached) * self.model.dtype.itemsize // self._gpus
        return _USABLE * self.memory_bytes - used - _WORKSPACE

    @property
    def _gpus(self) -> int:
        return self.split.ranks.size if self.split else 1

    def _time_group(self, group: Sequence[Version], workload: Workload, parts: Sequence[str]) -> list[Result]:
        versions = [*self.dense_versions, *group]
        heads, reduced = _heads(versions), {part: without(self.sites, part) for part in parts}
        rests = [*((without(self.sites), head) for head in heads), *((choices, None) for choices in reduced.values())]
        entries = [Entry(version.name, partial(self._build, version), version.compiled) for version in versions]
        entries += [Entry("rest", partial(self._build_rest, *rest)) for rest in rests]
        timed = time_in_turns(entries, workload, self.timer)
        spreads = iter(each.latency for each in timed[len(versions) :])
        by_head = {head: next(spreads) for head in heads}
        by_part = {part: (shares(choices)[part], next(spreads)) for part, choices in reduced.items()}
        dense = {version.fused is True: each for version, each in zip(self.dense_versions, timed, strict=False)}
        pairs = zip(versions, timed, strict=False)
        return [self._result(version, each, dense, by_head, by_part) for version, each in pairs]

    def _build(self, version: Version) -> PreTrainedModel:
        fused = fuse_sites(self.sites) if version.fused is True else version.fused or ()
        if self.split:
            return self.split.variant(version.choices, fused, version.plain)
        return variant(self.model, version.choices, fused, version.plain, self._ends(version.head))

    def _build_rest(self, choices: Sequence[WeightChoice], head: RoundedHead | None) -> PreTrainedModel:
        return self.split.without_gemms(choices) if self.split else without_gemms(self.model, choices, self._ends(head))

    def _ends(self, head: RoundedHead | None) -> Mapping[str, nn.Module]:
        if head is None:
            return {}
        if head.scheme not in self._quantized_ends:
            self._quantized_ends[head.scheme] = quantised_embeddings(self.model, scheme_named(head.scheme))
        return self._quantized_ends[head.scheme]

    def _result(
        self,
        version: Version,
        timed: Timed,
        dense: Mapping[bool, Timed],
        rests: Mapping[RoundedHead | None, Spread],
        reduced: Reduced,
    ) -> Result:
        """The result, with a prediction if the table has what it needs; ``dense`` is by fusing."""
        rest, fused, workload = rests[None], version.fused is True, timed.workload
        dense_version, dense_timed = self.dense_versions[2 if fused else 1], dense[fused]
        planned = dense_timed.memory_bytes + self._bytes(version, workload) - self._bytes(dense_version, workload)
        spreads = dense[False].latency, dense[True].latency, rest
        result = Result(version.params, version.loss, timed, *spreads, planned)
        dense_ns, table_ns = dense_version.table_ns.get(workload), version.table_ns.get(workload)
        other_run = version.compiled or version.plain or version.gpus != self._gpus
        if dense_ns is None or table_ns is None or other_run:
            return result
        # The model without GEMMs has dense attention, and reduced models show the effect of other forms. So attention
        # is subtracted from the sums, and the difference that latents make is added.
        dense_attention, attention = self._attention_ns(dense_version, workload), self._attention_ns(version, workload)
        latents = {each.name for each in version.choices if form_named(each.form).cache.axis(each.weight) is not None}
        change = self._attention_ns(version, workload, latents) - self._attention_ns(dense_version, workload, latents)
        gemms, measured_ns = dense_ns - dense_attention, dense_timed.latency.median_ns
        ratio, kept = (table_ns - attention) / gemms, shares(version.choices)
        predicted = predicted_latency(measured_ns, rest.median_ns, ratio, reduced, kept)
        predicted += change + rests[version.head].median_ns - rest.median_ns
        return replace(result, predicted_ns=predicted, sum_ns=table_ns - dense_attention + measured_ns - gemms)

    def _attention_ns(self, version: Version, workload: str, names: Container[str] | None = None) -> int:
        """The sum by the table, over all weights or those of these names."""
        choices = (choice for choice in version.choices if names is None or choice.name in names)
        return summed_attention(self.timing, choices, workload)

    def _bytes(self, version: Version, workload: str) -> int:
        parsed = Workload.parse(workload)
        tokens = parsed.batch * parsed.tokens if parsed.phase == "decode" else 0
        head = version.head.bytes - version.head.dense_bytes if version.head else 0
        return (version.bytes + head + version.kv_numbers * tokens * self.model.dtype.itemsize) // self._gpus


def _heads(versions: Sequence[Version]) -> tuple[RoundedHead | None, ...]:
    return tuple(dict.fromkeys((None, *(version.head for version in versions))))


def in_groups(versions: Sequence[Version], sizes: Sequence[int], room: float, count: int) -> list[list[Version]]:
    """Split versions into groups of up to ``count`` whose ``sizes`` in bytes fit; without versions, one empty group."""
    groups: list[list[Version]] = [[]]
    free = room
    for version, size in zip(versions, sizes, strict=True):
        if groups[-1] and (size > free or len(groups[-1]) == count):
            groups.append([])
            free = room
        groups[-1].append(version)
        free -= size
    return groups

"""Activation and gradient statistics of linear weights, streamed over calibration windows.

For y = W x, with g the gradient, at y, of the summed token loss of the window under labels that the model draws
(``gac.measurement.runs.drawn_loss``), expectations over the tokens, and a power p that a method has:

    A = E[|g|^p x x^T] / E[|g|^p]        G = E[|x|^p g g^T] E[|g|^p] / E[|g|^p |x|^p]

Taking the Fisher matrix E[x x^T (x) g g^T] as A (x) G is K-FAC (arXiv 1503.05671, section 3.1) at p = 0, where x and g
count as independent. They are not: tokens with huge activations (attention sinks) often have tiny gradients. At p = 2
A and G are its exact partial traces, up to a factor, and A (x) G has its trace. ``results/curvature.md`` has
what each p measured, and what labels from the text itself (the empirical Fisher) measured.

A second shot keeps the inputs of the dense model and takes the gradients of a compressed one (``stream_second``).

Layers are measured one at a time, the last one first (``gac.measurement.layerwise``): one layer's moments are alive,
whatever the size of the model. They are summed in float64 on a CPU and in float32 on a GPU, in TF32 products where what
is multiplied is 16-bit. TF32 holds these exactly at p = 0. At other p an activation is multiplied by sqrt(|g|^p) first,
a gradient by sqrt(|x|^p), and then cut to TF32's 11 significant bits: by less than 1 part in 1,000.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor, nn

from gac.core.distributed.ranks import ALONE, Ranks
from gac.core.errors import ModelError
from gac.core.linalg import check_measured
from gac.core.progress import progress_bar, rough_duration
from gac.forms.curvature.methods import Method
from gac.measurement.attended import AttendedSums, cached_weights, held_out
from gac.measurement.layerwise import LayerwiseBackward, Tick
from gac.measurement.mixture import mixed
from gac.measurement.moments import LayerMoments
from gac.measurement.routed import RoutedSums
from gac.measurement.store import (
    CPU,
    StatisticsStore,
    TensorFile,
    read_rows,
    read_tensors,
    temporary_store,
    write_tensors,
)
from gac.measurement.sums import MomentSums, first_half, noise_name, parts_at_once
from gac.models.digests import read_parameter
from gac.models.examples import TokenWindows, predicted_tokens
from gac.models.modules import input_device, listening
from gac.models.sites import Site, Weight

logger = logging.getLogger(__name__)

SNAPSHOT_SECONDS = 120.0
BACK = 2
"""Duration of the backward pass and its sums, relative to the forward pass."""
LAYER_BYTES = 2**29
"""Moments of larger layers are not kept on disk."""
ATTENDED = "attended-2"
"""The name of files of moments with attended ones, and of what is measured by them; its number changes with their
definition."""
ROUTED = "routed-2"
"""Likewise of those with the tokens of routed experts."""


@dataclass(frozen=True, eq=False)
class TextOfMixture:
    """One of several texts that are calibrated on together.

    Attributes:
        windows: the numbers of its windows among all.
        store: where its moments are kept, for any mixture.
        weight: what each of its tokens counts.
    """

    windows: tuple[int, ...]
    store: StatisticsStore
    weight: float = 1.0


@dataclass(frozen=True, eq=False)
class CalibrationRun:
    """A model that is measured on one text, in the metric of one method.

    Attributes:
        model: a causal LM; runs on the devices it is on, its parameters are left alone.
        windows: calibration token ids, int64, shape ``(windows, tokens)``, or examples.
        store: where finished layers are kept and found again; the default is deleted with the run.
        source: streams the moments of some sites' layers for a run as ``stream_moments`` does; None takes that.
        ranks: the processes that measure together, each with the whole model and text. They share the store.
        attended: whether keys and values are measured as attention reads them too, see ``LayerMoments.attended``.
        readers: the quantisers of inputs whose noise is measured.
        routed: the routed experts whose tokens are kept, by layer, see ``LayerMoments.routed``.
        texts: of windows of several texts, each text. Moments are then kept by text, and ``store`` has all else.
    """

    model: nn.Module
    windows: TokenWindows
    method: Method
    store: StatisticsStore = field(default_factory=temporary_store)
    progress: bool = True
    source: "Source | None" = None
    ranks: Ranks = ALONE
    attended: bool = False
    readers: tuple[str, ...] = ()
    routed: Mapping[int, Sequence[Weight]] = field(default_factory=dict)
    texts: tuple[TextOfMixture, ...] = ()

    @property
    def rows(self) -> slice:
        if len(self.windows) < self.ranks.count:
            problem = f"{len(self.windows)} calibration windows in {self.ranks.count} processes"
            raise ModelError(problem, "a window for each process at least", "Start fewer, or use more windows.")
        return self.ranks.rows(len(self.windows))

    @property
    def held_out(self) -> list[int]:
        if not self.texts:
            return held_out(*self.windows.shape)
        length = self.windows.shape[1]
        return sorted(text.windows[number] for text in self.texts for number in held_out(len(text.windows), length))

    @property
    def window_weights(self) -> Tensor:
        """Weight of the tokens of each window, shape ``(windows,)``."""
        weights = torch.ones(len(self.windows), dtype=torch.float32)
        for text in self.texts:
            weights[list(text.windows)] = text.weight
        return weights

    def of_text(self, text: TextOfMixture) -> "CalibrationRun":
        return replace(self, windows=self.windows[list(text.windows)], store=text.store, texts=())

    def moments_path(self, layer: int) -> Path:
        kinds = [ATTENDED if self.attended else "layer", *([ROUTED] if layer in self.routed else [])]
        return self.store.path("-".join(kinds), layer)

    def has_moments(self, layer: int, weights: Sequence[Weight]) -> bool:
        """True if the moments of a layer are kept on disk, with the noise of all ``readers``."""
        path = self.moments_path(layer)
        if not path.exists():
            return False
        needed = {noise_name(reader, weight.name) for reader in self.readers for weight in weights}
        return not needed or needed <= set(TensorFile(path, CPU))

    def stored(self, name: str, measure: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Read tensors of all layers from the store; rank 0 measures and writes them where they are missing."""
        path = self.store.path(name, 0)

        def read_or_measure() -> dict[str, Tensor]:
            if not path.exists():
                write_tensors(path, measure())
            return read_tensors(path, CPU)

        return self.ranks.once(read_or_measure)


Source = Callable[[CalibrationRun, Sequence[Site]], Iterator[tuple[int, LayerMoments | None]]]


def group_by_layer(sites: Sequence[Site]) -> dict[int, list[Weight]]:
    """The linear weights of each layer."""
    layers = groupby(sites, key=lambda site: site.layer)
    return {layer: [each for site in group for each in site.weights if not each.is_routed] for layer, group in layers}


def routed_by_layer(sites: Sequence[Site]) -> dict[int, Sequence[Weight]]:
    """The routers and routed experts of each layer that has such sites."""
    return {site.layer: site.weights for site in sites if site.weights[0].is_routed}


def kept_on_disk(sites: Sequence[Site], attended: bool = False) -> bool:
    return moment_bytes(sites, attended) <= LAYER_BYTES * len({site.layer for site in sites})


def moment_bytes(sites: Sequence[Site], attended: bool = False) -> int:
    """Bytes of the float32 moments of these sites, on two halves of the text; ``attended`` adds those of attention."""
    weights = [weight for weights in group_by_layer(sites).values() for weight in weights]
    weights += cached_weights(weights) if attended else []
    return 8 * sum(weight.in_features**2 + weight.out_features**2 for weight in weights)


def stream_moments(run: CalibrationRun, sites: Sequence[Site]) -> Iterator[tuple[int, LayerMoments | None]]:
    """Yield ``(layer, moments)`` for whole layers of sites, from the last layer to the first; stored ones are read.

    Several processes take turns: as many layers are measured by all of them, each on its windows, as there are
    processes, and the sums of each go to another one, its owner. Then every process yields these layers, with the
    moments of its own and None for those of others; so owners work on their layers at the same time.

    Moments of more than ``LAYER_BYTES`` a layer are not kept on disk. A run that was cut short goes on from a boundary
    between layers that was written at most ``SNAPSHOT_SECONDS`` before, where the layers above it are not asked for.

    Raises:
        ModelError: the loss or a statistic is not finite, or the model is no stack of decoder layers.
        StatisticsError: what is kept cannot be written or read.
    """
    if not run.texts:
        yield from _stream_text(run, sites)
        return
    windows, weights = [text.windows for text in run.texts], [text.weight for text in run.texts]
    for parts in zip(*(_stream_text(run.of_text(text), sites) for text in run.texts), strict=True):
        by_text = [moments.tensors for _, moments in parts if moments is not None]
        yield parts[0][0], LayerMoments(mixed(by_text, windows, weights)) if by_text else None


def _stream_text(run: CalibrationRun, sites: Sequence[Site]) -> Iterator[tuple[int, LayerMoments | None]]:
    weights, on_disk, ranks = group_by_layer(sites), kept_on_disk(sites, run.attended), run.ranks
    stored = ranks.once(lambda: {layer for layer, of in weights.items() if on_disk and run.has_moments(layer, of)})
    missing = {layer: of for layer, of in weights.items() if layer not in stored}
    descending = sorted(weights, reverse=True)  # each process works on one layer of a turn
    turns = [descending[start : start + ranks.count] for start in range(0, len(descending), ranks.count)]
    measured = _measure(run, missing, turns) if missing else iter(())
    for turn in turns:
        turn_moments: list[tuple[int, LayerMoments | None]] = []
        for owner, layer in enumerate(turn):
            if layer in stored:
                moments = None
                if ranks.owns(owner):
                    device = read_parameter(run.model, f"{weights[layer][0].name}.weight").device
                    moments = LayerMoments.read(run.moments_path(layer), device, weights[layer])
                turn_moments.append((layer, moments))
                del moments
                continue
            turn_moments.append(next(measured))
            moments = turn_moments[-1][1]
            if on_disk and moments is not None:
                moments.write(run.moments_path(layer))
            del moments
        while turn_moments:
            yield turn_moments.pop(0)  # so that it is let go before the next layer's are summed
    next(measured, None)  # what it does after its last layer


def _measure(
    run: CalibrationRun, weights: Mapping[int, Sequence[Weight]], turns: Sequence[Sequence[int]]
) -> Iterator[tuple[int, LayerMoments | None]]:
    """Measure layers from the last wanted one down to the first; layers between them are only passed through."""
    model, windows, ranks, lowest = run.model, run.windows, run.ranks, min(weights)
    layers, rows = decoder_layers(model, weights), run.rows
    count = len(windows[rows])
    owners = {layer: owner for turn in turns for owner, layer in enumerate(turn)}
    ends = {min(measured) for turn in turns if (measured := [layer for layer in turn if layer in weights])}
    cut, parts = first_half(len(windows)) - rows.start, None
    if not run.attended:  # attention is heard one window after the other
        parts = parts_at_once(windows[rows], cut, input_device(model))
    backward = LayerwiseBackward(model, layers, windows[rows], lowest, rows.start, parts)
    with progress_bar("calibrating", "window", 0, shown=run.progress) as bar:
        bar.reset(count * (len(layers) + 1))
        backward.start(_with_eta(bar.update, count, len(layers), lowest) if run.progress else bar.update)
        # The first token of a window is not predicted.
        loss = ranks.total(backward.loss) / predicted_tokens(windows)
        last = _restore(run, backward, max(weights))
        bar.reset(count * (last - lowest + 1))
        saved, settled = time.monotonic(), True
        for layer in range(last, lowest - 1, -1):
            sums = MomentSums(weights.get(layer, ()), run.method.power, windows, rows.start, run.readers)
            attended = AttendedSums(weights.get(layer, ()) if run.attended else (), windows, rows.start)
            stacks = [weight for weight in run.routed.get(layer, ()) if weight.experts]
            routed = RoutedSums(stacks, run.method.power, windows.shape, rows.start)
            with listening(model, sums.hooks | routed.hooks), attended.listening(model):
                backward.through(layer, bar.update)
            if layer in weights:
                for part in (sums, attended, routed):
                    part.bring_to(owners[layer], ranks)
                moments = None
                if ranks.owns(owners[layer]):
                    moments = LayerMoments(sums.means() | attended.means() | routed.means() | {"loss": loss})
                    for name, tensor in moments.tensors.items():
                        problem = f"statistic {name} of layer {layer} is not finite"
                        check_measured(_telling(name, tensor), problem, "finite activations and gradients")
                del sums, attended, routed
                yield layer, moments
                del moments
                settled = layer in ends
            if layer > lowest and settled and ranks.once(partial(_is_due, saved)):
                gradients = ranks.collected(backward.gradients)
                if gradients is not None:
                    write_tensors(run.store.boundary, {"gradients": gradients, "layer": torch.tensor(layer)})
                saved = time.monotonic()
    ranks.wait()  # others may work on their last layer: if one is lost, the next run begins at the boundary
    if ranks.leads:
        run.store.boundary.unlink(missing_ok=True)


def _telling(name: str, statistic: Tensor) -> Tensor:
    """The part of a statistic that is not finite where any of it is not: of a second moment, the diagonal."""
    return statistic.diagonal() if "inputs/" in name or "gradients/" in name else statistic


def _is_due(saved: float) -> bool:
    return time.monotonic() - saved > SNAPSHOT_SECONDS


def _with_eta(tick: Tick, windows: int, layers: int, lowest: int) -> Tick:
    """Log the time that calibration down to layer ``lowest`` will take, after layer 2 (layer 1 includes loading)."""
    times: list[float] = []

    def timed() -> None:
        times.append(time.monotonic())
        if len(times) == 2 * windows:
            seconds = (times[-1] - times[windows - 1]) * (layers + BACK * (layers - lowest))
            rest = "then the layers are decomposed, and the first one shows how long that takes"
            logger.info("calibrating on %d windows: %s; %s", windows, rough_duration(seconds), rest)
        tick()

    return timed


def decoder_layers(model: nn.Module, weights: Mapping[int, Sequence[Weight]]) -> Sequence[nn.Module]:
    names = {weight.name.partition(f".{layer}.")[0] for layer, members in weights.items() for weight in members}
    layers = model.get_submodule(min(names)) if len(names) == 1 else None
    if not isinstance(layers, nn.ModuleList):
        raise ModelError(
            f"the layers of a {type(model).__name__} lie in {', '.join(sorted(names))}",
            "one list of decoder layers",
            "Use a causal language model of a supported architecture.",
        )
    return list(layers)


def _restore(run: CalibrationRun, backward: LayerwiseBackward, last: int) -> int:
    """Return the layer to begin with: below the snapshot of an interrupted run, where no layer above it is wanted."""
    path, shape = run.store.boundary, (len(run.windows), *backward.gradients.shape[1:])

    def snapshot_layer() -> int | None:
        try:
            snapshot = TensorFile(path, CPU)
        except FileNotFoundError:
            return None
        return int(snapshot["layer"]) if snapshot.shape("gradients") == shape else None

    layer = run.ranks.once(snapshot_layer)
    if layer is None or layer <= last:
        return backward.last
    backward.gradients.copy_(read_rows(path, "gradients", run.rows))
    return layer - 1


FIRST_KEPT = 0.8
"""Kept fraction of the first shot; measured for second shots to 0.8 and to 0.6."""


def stream_second(
    dense: CalibrationRun, first: CalibrationRun, sites: Sequence[Site]
) -> Iterator[tuple[int, LayerMoments | None]]:
    """Yield moments as ``stream_moments`` does: inputs of the dense model, gradients of the first shot's.

    The curvature at the dense model says what a small error costs. What is planned is no small error: gradients taken
    where a first plan has led to are nearer to what its next one meets. Its inputs are of no use, for what was cut away
    never shows in them, and another plan would cut there at no cost (``results/curvature.md``). This is the
    re-estimation of the curvature between shots of LLM Surgeon (arXiv 2312.17244), on one of its two sides.

    Both models run over the same windows, a layer of one and then the same layer of the other; labels are drawn from
    each by itself.

    Args:
        first: of the first shot's model, with weights of the dense one's shapes; it has to be the same whenever an
            interrupted run goes on.
    """
    gradients = stream_moments(first, sites)
    for (layer, moments), (_, of_first) in zip(stream_moments(dense, sites), gradients, strict=True):
        if moments is not None and of_first is not None:
            names = [name for name in of_first.tensors if name.startswith(("gradients/", "tokens/", "counts/"))]
            moments.tensors.update((name, of_first.tensors[name]) for name in names)
            of_first.tensors.clear()  # so that what is not asked for is let go before the layer is decomposed
        yield layer, moments

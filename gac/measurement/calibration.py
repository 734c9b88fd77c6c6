"""Activation and gradient statistics of linear weights, streamed over calibration windows.

For y = W x, with g the gradient, at y, of the summed token loss of the window under labels that the model draws
(``gac.measurement.losses.drawn_loss``), expectations over the tokens, and a power p that a method has:

    A = E[|g|^p x x^T] / E[|g|^p]        G = E[|x|^p g g^T] E[|g|^p] / E[|g|^p |x|^p]

Taking the Fisher matrix E[x x^T (x) g g^T] as A (x) G is K-FAC (arXiv 1503.05671, section 3.1) at p = 0, where x and g
count as independent. They are not: tokens with huge activations (attention sinks) often have tiny gradients. At p = 2
A and G are its exact partial traces, up to a factor, and A (x) G has its trace. ``results/curvature.md`` has
what each p measured, and what labels from the text itself (the empirical Fisher) measured.

Layers are measured one at a time, the last one first (``gac.measurement.layerwise``): one layer's moments are alive,
whatever the size of the model. They are summed in float64 on a CPU and in float32 on a GPU, in TF32 products where what
is multiplied is 16-bit. TF32 holds these exactly at p = 0. At other p an activation is multiplied by sqrt(|g|^p) first,
a gradient by sqrt(|x|^p), and then cut to TF32's 11 significant bits: by less than 1 part in 1,000.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from gac.core.distributed.ranks import ALONE, Ranks
from gac.core.errors import ModelError
from gac.core.linalg import add_square, check_measured, fits_tf32, mirrored, tf32_products
from gac.core.progress import progress_bar, rough_duration
from gac.forms.curvature.methods import Method
from gac.forms.curvature.metric import Halves, Moments
from gac.measurement.attended import AttendedSums, cached_weights, held_out, seen_windows
from gac.measurement.layerwise import LayerwiseBackward, Tick
from gac.measurement.store import StatisticsStore, TensorFile, read_rows, read_tensors, write_tensors
from gac.models.loading import read_parameter
from gac.models.modules import listening
from gac.models.sites import Site, Weight
from gac.runtime.storage.eight_bits import READERS

logger = logging.getLogger(__name__)

SNAPSHOT_SECONDS = 120.0
BACK = 2
"""Duration of the backward pass and its sums, relative to the forward pass."""
LAYER_BYTES = 2**29
"""Moments of larger layers are not kept on disk."""
ATTENDED = "attended-2"
"""The name of files of moments with attended ones, and of what is measured by them; its number changes with their
definition."""
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, eq=False)
class LayerMoments:
    """The moments of one layer's weights by name, as they are kept on disk."""

    tensors: dict[str, Tensor]

    @property
    def loss(self) -> float:
        """Mean loss of the dense model over the windows, nats for a predicted token."""
        return float(self.tensors["loss"])

    def tokens(self, weight: Weight) -> Tensor:
        """Weight of each token in the moment of the inputs, |g|^p, shape ``(windows, tokens)``."""
        return self.tensors[f"tokens/{weight.name}"]

    def of(self, weight: Weight, pooled: Callable[[Halves], Tensor] = Halves.mean) -> Moments:
        """The moments of a weight.

        Args:
            pooled: makes one second moment of those of two halves of the windows.
        """
        counted = self.tokens(weight)
        half = first_half(len(counted))
        part = counted[:half].sum(dtype=torch.float64) / counted.sum(dtype=torch.float64).clamp_min(TINY)
        inputs, gradients = (
            pooled(self._halves(what, weight, share))
            for what, share in (("inputs", float(part)), ("gradients", half / len(counted)))
        )
        noise = {name: self.tensors[f"{name}-noise/{weight.name}"] for name in READERS}
        return Moments(inputs, gradients, self.tensors[f"scale/{weight.name}"], noise)

    def attended(self, weight: Weight, pooled: Callable[[Halves], Tensor] = Halves.mean) -> Moments:
        """The moments of k_proj or v_proj as attention reads what is cached, see ``gac.measurement.attended``.

        They are there where the run was asked for them. Arguments as for ``of``.
        """
        windows, length = self.tokens(weight).shape
        seen = seen_windows(windows, first_half(windows), held_out(windows, length))
        share = seen[0] / sum(seen)
        inputs, gradients = (
            pooled(self._halves(f"attended-{what}", weight, share)) for what in ("inputs", "gradients")
        )
        return replace(self.of(weight), inputs=inputs, gradients=gradients)

    def _halves(self, what: str, weight: Weight, share: float) -> Halves:
        first, second = (self.tensors.get(f"{what}/{half}/{weight.name}") for half in range(2))
        assert first is not None, f"no {what} of {weight.name} were measured"
        return Halves(first, second, share)


def first_half(windows: int) -> int:
    """Count the windows in the first half of the text."""
    return (windows + 1) // 2


@dataclass(frozen=True, eq=False)
class CalibrationRun:
    """A model that is measured on one text, in the metric of one method.

    Attributes:
        model: a causal LM; runs on the devices it is on, its parameters are left alone.
        windows: calibration token ids, int64, shape ``(windows, tokens)``.
        store: where finished layers are kept and found again; None keeps nothing.
        source: streams the moments of some sites' layers for a run as ``stream_moments`` does; None takes that.
        ranks: the processes that measure together, each with the whole model and text. They share the store.
        attended: whether keys and values are measured as attention reads them too, see ``LayerMoments.attended``.
    """

    model: nn.Module
    windows: Tensor
    method: Method
    store: StatisticsStore | None = None
    progress: bool = True
    source: "Source | None" = None
    ranks: Ranks = ALONE
    attended: bool = False

    @property
    def rows(self) -> slice:
        """The windows that this process runs.

        Raises:
            ModelError: there are fewer windows than processes.
        """
        if len(self.windows) < self.ranks.count:
            problem = f"{len(self.windows)} calibration windows in {self.ranks.count} processes"
            raise ModelError(problem, "a window for each process at least", "Start fewer, or use more windows.")
        return self.ranks.rows(len(self.windows))

    def moments(self, sites: Sequence[Site]) -> Iterator[tuple[int, LayerMoments | None]]:
        """Those of the sites' layers, from the last layer to the first; raises as ``stream_moments`` does."""
        return (self.source or stream_moments)(self, sites)

    @property
    def held_out(self) -> list[int]:
        """The numbers of the windows that moments of keys and values as attention reads them leave out."""
        return held_out(*self.windows.shape)

    def moments_path(self, store: StatisticsStore, layer: int) -> Path:
        """Path of the moments of a layer."""
        return store.moments(layer, ATTENDED if self.attended else None)


Source = Callable[[CalibrationRun, Sequence[Site]], Iterator[tuple[int, LayerMoments | None]]]


def kept_on_disk(sites: Sequence[Site], attended: bool = False) -> bool:
    """True if the moments of these sites' layers are small enough to be stored; arguments as for ``moment_bytes``."""
    layers = {site.layer for site in sites}
    return moment_bytes(sites, attended) <= LAYER_BYTES * len(layers)


def moment_bytes(sites: Sequence[Site], attended: bool = False) -> int:
    """Bytes of the float32 moments of these sites, on two halves of the text.

    Args:
        attended: whether those of keys and values as attention reads them count too.
    """
    weights = [weight for site in sites for weight in site.weights]
    weights += cached_weights(weights) if attended else []
    return 8 * sum(weight.in_features**2 + weight.out_features**2 for weight in weights)


def stream_moments(run: CalibrationRun, sites: Sequence[Site]) -> Iterator[tuple[int, LayerMoments | None]]:
    """Yield ``(layer, moments)`` for the weights of ``sites``, from the last layer to the first; kept ones are read.

    Several processes take turns: as many layers are measured by all of them, each on its windows, as there are
    processes, and the sums of each go to another one, its owner. Then every process yields these layers, with the
    moments of its own and None for those of others; so owners work on their layers at the same time.

    Moments of more than ``LAYER_BYTES`` a layer are not kept on disk. A run that was cut short goes on from a boundary
    between layers that was written at most ``SNAPSHOT_SECONDS`` before, where the layers above it are not asked for.

    Args:
        sites: whole layers of them, in model order.

    Raises:
        ModelError: the loss or a statistic is not finite, or the model is no stack of decoder layers.
        StatisticsError: what is kept cannot be written or read.
    """
    weights: dict[int, list[Weight]] = {}
    for site in sites:
        weights.setdefault(site.layer, []).extend(site.weights)
    keeps, ranks = run.store if kept_on_disk(sites, run.attended) else None, run.ranks
    stored = ranks.once(
        lambda: {layer for layer in weights if keeps is not None and run.moments_path(keeps, layer).exists()}
    )
    missing = {layer: of for layer, of in weights.items() if layer not in stored}
    turns = _turns(weights, ranks.count)
    measured = _measure(run, missing, turns) if missing else iter(())
    for turn in turns:
        turn_moments: list[tuple[int, LayerMoments | None]] = []
        for owner, layer in enumerate(turn):
            if keeps is not None and layer in stored:
                turn_moments.append((layer, _read(run, keeps, weights[layer][0], layer) if ranks.owns(owner) else None))
                continue
            turn_moments.append(next(measured))
            moments = turn_moments[-1][1]
            if keeps is not None and moments is not None:
                write_tensors(run.moments_path(keeps, layer), moments.tensors)
            del moments
        while turn_moments:
            yield turn_moments.pop(0)  # so that it is let go before the next layer's are summed
    next(measured, None)  # what it does after its last layer


def _turns(weights: Mapping[int, Sequence[Weight]], count: int) -> list[list[int]]:
    """Split the layers into turns, the last layers first: each process works on one layer of a turn."""
    layers = sorted(weights, reverse=True)
    return [layers[start : start + count] for start in range(0, len(layers), count)]


def _read(run: CalibrationRun, store: StatisticsStore, weight: Weight, layer: int) -> LayerMoments:
    device = read_parameter(run.model, f"{weight.name}.weight").device
    return LayerMoments(read_tensors(run.moments_path(store, layer), device))


def _measure(
    run: CalibrationRun, weights: Mapping[int, Sequence[Weight]], turns: Sequence[Sequence[int]]
) -> Iterator[tuple[int, LayerMoments | None]]:
    """Measure layers from the last wanted one down to the first; layers between them are only passed through."""
    model, windows, store, ranks, lowest = run.model, run.windows, run.store, run.ranks, min(weights)
    layers, rows = decoder_layers(model, weights), run.rows
    rank_windows = windows[rows]
    owners = {layer: owner for turn in turns for owner, layer in enumerate(turn)}
    ends = {min(measured) for turn in turns if (measured := [layer for layer in turn if layer in weights])}
    backward = LayerwiseBackward(model, layers, rank_windows, lowest, rows.start)
    with progress_bar("calibrating", "window", 0, shown=run.progress) as bar:
        bar.reset(len(rank_windows) * (len(layers) + 1))
        backward.start(_with_eta(bar.update, len(rank_windows), len(layers), lowest) if run.progress else bar.update)
        loss = ranks.total(backward.loss)
        loss = loss / (windows.numel() - len(windows))  # the first token of a window is not predicted
        last = _restore(run, backward, max(weights))
        bar.reset(len(rank_windows) * (last - lowest + 1))
        saved, settled = time.monotonic(), True
        for layer in range(last, lowest - 1, -1):
            out = run.held_out if run.attended else None
            sums = _Sums(weights.get(layer, ()), run.method.power, len(windows), rows.start, out)
            with listening(model, sums.hooks), sums.attended.listening(model):
                backward.through(layer, bar.update)
            if layer in weights:
                sums.bring_to(owners[layer], ranks)
                moments = _moments_of(sums, layer, windows.shape[1], loss) if ranks.owns(owners[layer]) else None
                del sums
                yield layer, moments
                del moments
                settled = layer in ends
            if store is not None and layer > lowest and settled and _is_due(saved, ranks):
                _save(store, backward, layer, ranks)
                saved = time.monotonic()
    if store is not None:
        ranks.wait()  # others may work on their last layer: if one is lost, the next run begins at the boundary
        if ranks.leads:
            store.boundary.unlink(missing_ok=True)


def _moments_of(sums: "_Sums", layer: int, length: int, loss: Tensor) -> LayerMoments:
    moments = LayerMoments(sums.means(length) | {"loss": loss})
    for name, tensor in moments.tensors.items():
        check_measured(tensor, f"statistic {name} of layer {layer} is not finite", "finite activations and gradients")
    return moments


def _is_due(saved: float, ranks: Ranks) -> bool:
    return ranks.once(lambda: time.monotonic() - saved > SNAPSHOT_SECONDS)


def _save(store: StatisticsStore, backward: LayerwiseBackward, layer: int, ranks: Ranks) -> None:
    gradients = ranks.collected(backward.gradients)
    if gradients is not None:
        write_tensors(store.boundary, {"gradients": gradients, "layer": torch.tensor(layer)})


def _with_eta(tick: Tick, windows: int, layers: int, lowest: int) -> Tick:
    """Log the time that calibration will take after layer 2 (layer 1 includes loading).

    Args:
        lowest: the last layer that is gone back through.
    """
    times: list[float] = []

    def timed() -> None:
        times.append(time.monotonic())
        if len(times) == 2 * windows:
            seconds = (times[-1] - times[windows - 1]) * (layers + BACK * (layers - lowest))
            rest = "decomposing the layers comes on top, which the first one will tell"
            logger.info("calibrating on %d windows: %s; %s", windows, rough_duration(seconds), rest)
        tick()

    return timed


def decoder_layers(model: nn.Module, weights: Mapping[int, Sequence[Weight]]) -> Sequence[nn.Module]:
    """The decoder layers in order: the list that holds every layer's weights under the layer's number.

    Raises:
        ModelError: there is no such list.
    """
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
    store = run.store
    if store is None:
        return backward.last
    shape = (len(run.windows), *backward.gradients.shape[1:])
    layer = run.ranks.once(lambda: _boundary(store, shape))
    if layer is None or layer <= last:
        return backward.last
    backward.gradients.copy_(read_rows(store.boundary, "gradients", run.rows))
    return layer - 1


def _boundary(store: StatisticsStore, shape: tuple[int, ...]) -> int | None:
    """Return the layer whose input gradients the snapshot holds, if they have this shape."""
    try:
        snapshot = TensorFile(store.boundary, torch.device("cpu"))
    except FileNotFoundError:
        return None
    return int(snapshot["layer"]) if snapshot.shape("gradients") == shape else None


class _Sums:
    """Running sums of one layer's weights, and the hooks that add each window to them.

    Args:
        windows: how many windows the text has.
        first: the number of the first window that this process runs.
        held_out: the numbers of those that the attended sums leave out; None: there are no attended sums.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        power: float,
        windows: int,
        first: int = 0,
        held_out: Sequence[int] | None = None,
    ) -> None:
        self._weights, self._power, self._windows, self._first = weights, power, windows, first
        self._half = first_half(windows)
        self._sums: dict[str, Tensor] = {}
        self._tokens: dict[str, list[Tensor]] = {weight.name: [] for weight in weights}
        self._read: tuple[Tensor, dict[str, Tensor]] | None = None
        self.hooks = {weight.name: partial(self._listen, weight.name) for weight in weights}
        attended_weights = () if held_out is None else weights
        self.attended = AttendedSums(attended_weights, windows, self._half, first, held_out or ())

    def bring_to(self, owner: int, ranks: Ranks) -> None:
        """Add up the sums of all processes, each of its own windows, at the owner; the others' are gone."""
        if ranks.count == 1:
            return
        for weight in self._weights:
            token_rows = torch.stack(self._tokens[weight.name])
            counted = token_rows.new_zeros(self._windows, token_rows.shape[1])
            counted[self._first : self._first + len(token_rows)] = token_rows
            self._tokens[weight.name] = list(ranks.total_at(owner, counted))
            for name, shape in self._shapes(weight).items():
                ranks.total_at(owner, self._total(name, shape, token_rows.device))
                if not ranks.owns(owner):
                    del self._sums[name]
        self.attended.bring_to(owner, ranks)

    def _shapes(self, weight: Weight) -> dict[str, tuple[int, ...]]:
        read, wrote, name = (weight.in_features,), (weight.out_features,), weight.name
        shapes: dict[str, tuple[int, ...]] = {f"both/{name}": (), f"scale/{name}": read}
        shapes |= {f"{reader}-noise/{name}": read for reader in READERS}
        for half in range(1 if self._windows == self._half else 2):
            shapes |= {f"inputs/{half}/{name}": 2 * read, f"gradients/{half}/{name}": 2 * wrote}
        return shapes

    def means(self, length: int) -> dict[str, Tensor]:
        """The float32 moments, and what each token counted, ``(windows, tokens)``; the sums are gone.

        Args:
            length: tokens of a window.
        """
        means = {f"tokens/{name}": torch.stack(counted) for name, counted in self._tokens.items()}
        for name in self._tokens:
            counted = means[f"tokens/{name}"].sum(1, dtype=torch.float64)
            both = self._sums.pop(f"both/{name}").clamp_min(TINY)
            for what in ("scale", *(f"{reader}-noise" for reader in READERS)):
                means[f"{what}/{name}"] = self._sums.pop(f"{what}/{name}").div_(counted.sum().clamp_min(TINY)).float()
            for half, part in enumerate((counted[: self._half], counted[self._half :])):
                alike = len(part) * length * both / counted.sum()
                for what, count in (("inputs", part.sum().clamp_min(TINY)), ("gradients", alike)):
                    if len(part):
                        square = mirrored(self._sums.pop(f"{what}/{half}/{name}"))
                        means[f"{what}/{half}/{name}"] = square.div_(count).float()
        return means | self.attended.means(length)

    def _listen(self, name: str, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.register_hook(partial(self._add, name, inputs[0].detach()))  # type: ignore[no-untyped-call]

    def _add(self, name: str, activations: Tensor, gradients: Tensor) -> None:
        x = activations.reshape(-1, activations.shape[-1]).float()
        g = gradients.detach().reshape(-1, gradients.shape[-1]).float()
        of_g, of_x = (rows.norm(dim=1) ** self._power for rows in (g, x))
        half = (self._first + len(self._tokens[name])) // self._half
        self._tokens[name].append(of_g)
        self._total(f"both/{name}", (), x.device).add_(of_g @ of_x)
        self._total(f"scale/{name}", x.shape[1:], x.device).add_(x.abs().T @ of_g)
        for reader, errors in self._noise_of(activations, x).items():
            self._total(f"{reader}-noise/{name}", x.shape[1:], x.device).add_(errors.T @ of_g)
        with tf32_products(fits_tf32(activations)):
            add_square(self._total(f"inputs/{half}/{name}", 2 * x.shape[1:], x.device), x * of_g.sqrt()[:, None])
        with tf32_products(fits_tf32(gradients)):
            add_square(self._total(f"gradients/{half}/{name}", 2 * g.shape[1:], g.device), g * of_x.sqrt()[:, None])

    def _noise_of(self, activations: Tensor, x: Tensor) -> dict[str, Tensor]:
        """Squared errors ``(tokens, features)`` by reader; computed once for weights that share an input."""
        seen = None if self._read is None else self._read[0]
        if seen is None or (seen.data_ptr(), seen.shape) != (activations.data_ptr(), activations.shape):
            noise = {}
            for reader, read in READERS.items():
                numbers, scale = read(x)
                noise[reader] = numbers.mul_(scale).sub_(x).square_()
            self._read = activations, noise  # which keeps the input from being let go, and another from its place
        assert self._read is not None
        return self._read[1]

    def _total(self, name: str, shape: Sequence[int], device: torch.device) -> Tensor:
        if name not in self._sums:
            wide = torch.float64 if device.type == "cpu" else torch.float32
            self._sums[name] = torch.zeros(tuple(shape), dtype=wide, device=device)
        return self._sums[name]

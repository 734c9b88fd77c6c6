"""Activation and gradient statistics of linear weights, streamed over calibration windows.

For y = W x: G = E[g g^T] over the tokens, with g the gradient, at y, of the summed token loss of the window under its
true labels (the empirical Fisher), and A = E[|g|^p x x^T] / E[|g|^p]. Taking the Fisher matrix E[x x^T (x) g g^T] as
A (x) G is K-FAC (arXiv 1503.05671, section 3.1) at p = 0, where x and g count as independent. They are not: tokens with
huge activations (attention sinks) often have tiny gradients, and at p = 0 they rule A. p = 2 is the exact partial trace
of the Fisher over the outputs, and noisier. ``tests/benchmarks/README.md`` has what each p measured.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from gac.errors import ModelError
from gac.files import atomic_path
from gac.forms import Weight
from gac.sites import Site

SNAPSHOT_SECONDS = 120.0
CHUNK_BYTES = 12 * 2**30
STORE_BYTES = 16 * 2**30


@dataclass(frozen=True, eq=False)
class Moments:
    """What was seen of one weight, float32.

    Attributes:
        inputs: second moment A of the activations, shape ``(in, in)``.
        gradients: second moment G of the gradients at the output, shape ``(out, out)``.
        scale: mean absolute activation of each input feature (weighed as A is), shape ``(in,)``.
    """

    inputs: Tensor
    gradients: Tensor
    scale: Tensor


@dataclass(frozen=True, eq=False)
class LayerMoments:
    """The moments of one layer's weights by name, as they are kept on disk."""

    tensors: dict[str, Tensor]

    @property
    def loss(self) -> float:
        """Mean loss of the dense model over the windows, nats for a predicted token."""
        return float(self.tensors["loss"])

    def of(self, weight: Weight) -> Moments:
        return Moments(*(self.tensors[f"{what}/{weight.name}"] for what in ("inputs", "gradients", "scale")))


@dataclass(frozen=True)
class StatisticsStore:
    """Finished layers and the running sums on disk, so that calibration resumes and is not repeated.

    Attributes:
        directory: one directory for one model, one calibration text and one p (name it by their digests).
    """

    directory: Path

    def layer(self, index: int) -> Path:
        return self.directory / f"layer-{index:04d}.safetensors"

    @property
    def partial(self) -> Path:
        return self.directory / "partial.safetensors"

    def save_layer(self, index: int, moments: LayerMoments) -> None:
        tensors = {name: tensor.cpu().contiguous() for name, tensor in moments.tensors.items()}
        with atomic_path(self.layer(index)) as temporary:
            save_file(tensors, temporary)

    def load_layer(self, index: int, device: torch.device) -> LayerMoments:
        return LayerMoments(load_file(self.layer(index), device=str(device)))


def moment_bytes(sites: Sequence[Site]) -> int:
    """Bytes of the float32 moments of these sites."""
    return 4 * sum(size * size for size in _sizes(sites).values())


def stream_moments(
    model: nn.Module,
    sites: Sequence[Site],
    windows: Tensor,
    *,
    power: float,
    store: StatisticsStore | None = None,
    progress: bool = True,
) -> Iterator[tuple[int, LayerMoments]]:
    """Yield ``(layer, moments)`` in layer order for the weights of ``sites``.

    The windows are read once for each chunk of layers whose float64 sums fit in ``CHUNK_BYTES``. Moments of more than
    ``STORE_BYTES`` are not kept on disk: they are measured again when they are needed again.

    Args:
        model: a causal LM; runs on the device it is on, its parameters are left alone.
        windows: token ids, int64, shape ``(windows, tokens)``.
        power: p, with which a token's gradient weighs its activation.
        sites: whole layers of them, in model order.
        store: where finished layers are kept and found again; None keeps nothing.

    Raises:
        ModelError: the loss or a statistic is not finite.
    """
    device = next(model.parameters()).device
    if moment_bytes(sites) > STORE_BYTES:
        store = None
    layers = [(layer, list(group)) for layer, group in groupby(sites, key=lambda site: site.layer)]
    for chunk in _chunks(layers):
        missing = [(layer, group) for layer, group in chunk if store is None or not store.layer(layer).exists()]
        fresh = _measure(model, missing, windows, power, store, progress) if missing else {}
        for layer, _ in chunk:
            if layer in fresh:
                yield layer, fresh.pop(layer)
            else:
                assert store is not None
                yield layer, store.load_layer(layer, device)


def _chunks(layers: Sequence[tuple[int, list[Site]]]) -> Iterator[list[tuple[int, list[Site]]]]:
    chunk: list[tuple[int, list[Site]]] = []
    size = 0
    for layer, group in layers:
        bytes_needed = 2 * moment_bytes(group)
        if chunk and size + bytes_needed > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append((layer, group))
        size += bytes_needed
    if chunk:
        yield chunk


def _sizes(sites: Sequence[Site]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for weight in (weight for site in sites for weight in site.weights):
        sizes[f"inputs/{weight.name}"] = weight.in_features
        sizes[f"gradients/{weight.name}"] = weight.out_features
    return sizes


def _measure(
    model: nn.Module,
    layers: Sequence[tuple[int, list[Site]]],
    windows: Tensor,
    power: float,
    store: StatisticsStore | None,
    progress: bool,
) -> dict[int, LayerMoments]:
    """One pass over the windows; float64 sums, saved every ``SNAPSHOT_SECONDS`` where there is a store."""
    device = next(model.parameters()).device
    sites = [site for _, group in layers for site in group]
    sums = {n: torch.zeros(s, s, dtype=torch.float64, device=device) for n, s in _sizes(sites).items()}
    sums |= {
        f"scale/{weight.name}": torch.zeros(weight.in_features, dtype=torch.float64, device=device)
        for site in sites
        for weight in site.weights
    }
    scalars = ["loss", *(f"weight/{weight.name}" for site in sites for weight in site.weights)]
    sums |= {name: torch.zeros((), dtype=torch.float64, device=device) for name in scalars}
    first = _restore(store, sums)
    with _Recorder(model, sites, sums, power):
        bar = tqdm(windows[first:], "calibrating", len(windows), initial=first, unit="window", disable=not progress)
        saved = time.monotonic()
        for done, window in enumerate(bar, start=first + 1):
            sums["loss"] += _backward(model, window.to(device).unsqueeze(0), done - 1)
            if store is not None and done < len(windows) and time.monotonic() - saved > SNAPSHOT_SECONDS:
                _snapshot(store, sums, done)
                saved = time.monotonic()
    tokens = windows.numel()
    loss = sums["loss"] / (tokens - len(windows))  # the first token of a window is not predicted
    found: dict[int, LayerMoments] = {}
    for layer, group in layers:
        moments = LayerMoments(_means(group, sums, tokens) | {"loss": loss})
        _check(moments, layer)
        found[layer] = moments
        if store is not None:
            store.save_layer(layer, moments)
    if store is not None:
        store.partial.unlink(missing_ok=True)
    return found


def _means(sites: Sequence[Site], sums: dict[str, Tensor], tokens: int) -> dict[str, Tensor]:
    """The float32 moments of these sites; their sums are freed."""
    means: dict[str, Tensor] = {}
    for weight in (weight for site in sites for weight in site.weights):
        total = sums[f"weight/{weight.name}"].clamp_min(torch.finfo(torch.float64).tiny)
        for what in ("inputs", "scale"):
            means[f"{what}/{weight.name}"] = (sums.pop(f"{what}/{weight.name}") / total).float()
        means[f"gradients/{weight.name}"] = (sums.pop(f"gradients/{weight.name}") / tokens).float()
    return means


def _restore(store: StatisticsStore | None, sums: dict[str, Tensor]) -> int:
    """Take up a snapshot of the same sums; returns how many windows are in them."""
    if store is None or not store.partial.exists():
        return 0
    kept = load_file(store.partial)
    if set(kept) != {*sums, "windows"}:
        return 0
    for name, total in sums.items():
        total.copy_(kept[name])
    return int(kept["windows"])


def _snapshot(store: StatisticsStore, sums: dict[str, Tensor], windows: int) -> None:
    tensors = {name: total.cpu() for name, total in sums.items()} | {"windows": torch.tensor(windows)}
    with atomic_path(store.partial) as temporary:
        save_file(tensors, temporary)


def _check(moments: LayerMoments, layer: int) -> None:
    for name, tensor in moments.tensors.items():
        if not torch.isfinite(tensor).all():
            raise ModelError(
                f"statistic {name} of layer {layer} is not finite",
                "finite activations and gradients",
                "Load the model in bfloat16 or float32, and check its weights.",
            )


class _Recorder:
    """Hooks that add each window's statistics to the sums, and are gone on exit."""

    def __init__(self, model: nn.Module, sites: Sequence[Site], sums: dict[str, Tensor], power: float) -> None:
        self._model, self._sums, self._power = model, sums, power
        self._weights = [weight for site in sites for weight in site.weights]
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._frozen: list[nn.Parameter] = []
        self._training = model.training

    def __enter__(self) -> None:
        self._model.eval()
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                self._frozen.append(parameter)
        for weight in self._weights:
            module = self._model.get_submodule(weight.name)
            self._handles.append(module.register_forward_hook(self._listen(weight)))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._model.train(self._training)

    def _listen(self, weight: Weight) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def forward(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            activations = inputs[0].detach()
            output.register_hook(lambda gradients: self._add(weight.name, activations, gradients))  # type: ignore[no-untyped-call]

        return forward

    def _add(self, name: str, activations: Tensor, gradients: Tensor) -> None:
        x = activations.reshape(-1, activations.shape[-1]).float()
        g = gradients.detach().reshape(-1, gradients.shape[-1]).float()
        weight = g.norm(dim=1) ** self._power
        self._sums[f"weight/{name}"] += weight.sum(dtype=torch.float64)
        self._sums[f"scale/{name}"] += x.abs().T @ weight
        self._sums[f"inputs/{name}"] += (x * weight[:, None]).T @ x
        self._sums[f"gradients/{name}"] += g.T @ g


def _backward(model: nn.Module, ids: Tensor, index: int) -> Tensor:
    """Back-propagate the summed token loss of one window, ids ``(1, tokens)``; returns that sum in nats."""
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_(True)  # type: ignore[operator]
    logits = model(inputs_embeds=embeddings, use_cache=False).logits
    loss = F.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum")
    if not torch.isfinite(loss):
        raise ModelError(
            f"the loss of calibration window {index} is {loss.item()}",
            "a finite loss",
            "Load the model in bfloat16 or float32, and check its weights.",
        )
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()

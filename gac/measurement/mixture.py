"""Moments of several texts as those of their mixture.

A text t of weight v counts each of its tokens v times. So each half of the mixture is a mean over that half of the
texts: A and the like by v sum |g|^p, and G by v and the number of windows, where each text's is first multiplied by
E[|g|^p |x|^p] / E[|g|^p], by which ``gac.measurement.sums`` has divided it.
"""

from collections.abc import MutableMapping, Sequence

import torch
from torch import Tensor

from gac.measurement.routed import mixed_tokens
from gac.measurement.sums import TINY

_Tensors = MutableMapping[str, Tensor]
_Halves = list[list[float]]  # of each text, what either half counts


def mixed(texts: Sequence[_Tensors], windows: Sequence[Sequence[int]], weights: Sequence[float]) -> dict[str, Tensor]:
    """Mix the moments of one layer on several texts, which are used up.

    Args:
        texts: the tensors of ``gac.measurement.moments.LayerMoments``, by text.
        windows: the numbers of each text's windows in the mixture.
        weights: what each token of a text counts.
    """
    losses = torch.tensor([float(text.pop("loss")) for text in texts], dtype=torch.float64)
    full = [float(text["windows"].sum()) for text in texts]
    shares = torch.tensor([weight * count for weight, count in zip(weights, full, strict=True)]).double()
    mixture = {"losses": losses, "loss": (losses @ shares) / shares.sum()}
    mixture |= mixed_tokens(texts, shares / shares.sum())
    by_window = {"": _weighted(texts, "windows", weights)}
    if "attended-windows" in texts[0]:
        by_window["attended-"] = _weighted(texts, "attended-windows", weights)
    mixture |= {f"{start}windows": _summed(counts) for start, counts in by_window.items()}
    for name in [key.removeprefix("counts/") for key in texts[0] if key.startswith("counts/")]:
        counts = _weighted(texts, f"counts/{name}", weights)
        mixture[f"counts/{name}"] = _summed(counts)
        mixture[f"tokens/{name}"] = _in_order([text.pop(f"tokens/{name}") for text in texts], windows, weights)
        totals = list(map(sum, counts))
        for key in [key for key in texts[0] if key == f"scale/{name}" or key.endswith(f"-noise/{name}")]:
            if not all(key in text for text in texts):  # of a text that was measured with more readers
                continue
            mixture[key] = _sum([text.pop(key) for text in texts], [total / _sized(sum(totals)) for total in totals])
        for start, of_windows in by_window.items():
            if f"{start}power/{name}" in texts[0]:
                mixture |= _moments(texts, start, name, of_windows if start else counts, of_windows)
    return mixture


def _moments(
    texts: Sequence[_Tensors], start: str, name: str, of_inputs: _Halves, of_windows: _Halves
) -> dict[str, Tensor]:
    """Mix A and G of one weight, half by half; a text of one window has no second half."""
    powers = [float(text.pop(f"{start}power/{name}")) for text in texts]
    totals = list(map(sum, of_inputs))
    power = _sized(sum(map(float.__mul__, map(float, totals), powers)) / _sized(sum(totals)))
    moments = {}
    for what, counts, factors in (
        ("inputs", of_inputs, [1.0] * len(texts)),
        ("gradients", of_windows, [each / power for each in powers]),
    ):
        for half in range(2):
            key, total = f"{start}{what}/{half}/{name}", _sized(sum(halves[half] for halves in counts))
            there = [index for index, text in enumerate(texts) if key in text]
            if there:
                parts = [factors[index] * counts[index][half] / total for index in there]
                moments[key] = _sum([texts[index].pop(key) for index in there], parts)
    return moments


def _weighted(texts: Sequence[_Tensors], key: str, weights: Sequence[float]) -> _Halves:
    return [[weight * count for count in text.pop(key).tolist()] for text, weight in zip(texts, weights, strict=True)]


def _summed(halves: _Halves) -> Tensor:
    return torch.tensor(halves, dtype=torch.float64).sum(0)


def _sum(tensors: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    total = tensors[0] * factors[0]
    for tensor, factor in zip(tensors[1:], factors[1:], strict=True):
        total.add_(tensor, alpha=factor)
    return total


def _in_order(tokens: Sequence[Tensor], windows: Sequence[Sequence[int]], weights: Sequence[float]) -> Tensor:
    ordered = tokens[0].new_empty(sum(map(len, windows)), tokens[0].shape[1])
    for counted, numbers, weight in zip(tokens, windows, weights, strict=True):
        ordered[list(numbers)] = weight * counted
    return ordered


def _sized(number: float) -> float:
    return max(number, TINY)

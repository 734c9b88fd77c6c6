"""Weights that read the same input run their first GEMMs as one: q/k/v and gate/up, in any forms."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .contract import apart_from
from .modules import Heads, LowRankLinear, ValueLinear


class FusedInput(nn.Module):
    """One GEMM whose output features are, one after the other, those of several weights, the shortest first.

    A low-rank pair has as many features here as its rank, any other weight its output features. ``weight`` has shape
    ``(sum of features, in)``, ``bias`` shape ``(sum of features,)`` or is None. Where the input has so many rows that
    a part runs apart, the longer parts behind it do too, and the shared GEMM ends before them.

    Its parameters appear in ``state_dict`` under the names of the weights, as if they were not fused.
    """

    def __init__(self, firsts: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.multiply: Callable[..., Tensor] = getattr(firsts[0], "multiply", functional.linear)
        by_length = sorted(range(len(firsts)), key=lambda at: firsts[at].out_features)
        ends = dict(zip(by_length, accumulate(firsts[at].out_features for at in by_length), strict=True))
        self.parts = tuple(slice(ends[at] - first.out_features, ends[at]) for at, first in enumerate(firsts))
        firsts = [firsts[at] for at in by_length]
        reference = firsts[0].weight
        self.weight = nn.Parameter(torch.cat([first.weight.detach() for first in firsts]), reference.requires_grad)
        biases = [first.weight.new_zeros(first.out_features) if first.bias is None else first.bias for first in firsts]
        fused = (
            torch.cat([bias.detach() for bias in biases]) if any(first.bias is not None for first in firsts) else None
        )
        self.bias = None if fused is None else nn.Parameter(fused, reference.requires_grad)
        self.read: Tensor | None = None
        self.output: Tensor | None = None

    def part_of(self, x: Tensor, part: slice) -> Tensor:
        """This part's output for x ``(..., in)``; the GEMM runs unless the last one read the same tensor."""
        apart = apart_from(x.numel() // x.shape[-1])
        if part.stop - part.start >= apart:
            return self._multiplied(x, part)
        if self.output is None or self.read is not x:
            joined = max(one.stop for one in self.parts if one.stop - one.start < apart)
            self.read, self.output = x, self._multiplied(x, slice(joined))
        return self.output[..., part]

    def _multiplied(self, x: Tensor, part: slice) -> Tensor:
        return self.multiply(x, self.weight[part], None if self.bias is None else self.bias[part])

    def forget(self) -> None:
        """Drop the last input and output."""
        self.read = self.output = None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Nothing: each weight writes its own part."""

    def _load_from_state_dict(self, *_: Any) -> None:
        """Nothing: each weight reads its own part."""


class FusedMember(nn.Module):
    """A weight that takes its part of the fused GEMM's output, and multiplies it by its second factor if it has one.

    The first member runs the GEMM, the others use its output if they are called with the same tensor, and the last one
    drops it. Threads must not share such a model.

    Args:
        fused: the GEMM; the first member has it as a submodule.
        weight: the module that it stands for.
        at: its position among the members, in the order of their calls.
    """

    def __init__(self, fused: FusedInput, weight: nn.Linear | LowRankLinear, at: int) -> None:
        super().__init__()
        self._link = (fused,)
        if at == 0:
            self.fused = fused
        self.second = weight.second if isinstance(weight, LowRankLinear) else None
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self._part = fused.parts[at]
        self._biased = _first(weight).bias is not None
        self._is_first, self._is_last = at == 0, at == len(fused.parts) - 1
        self._length = weight.length if isinstance(weight, ValueLinear) else None

    def forward(self, x: Tensor) -> Tensor | Heads:
        (fused,) = self._link
        if self._is_first:
            fused.forget()
        part = fused.part_of(x, self._part)
        if self._is_last:
            fused.forget()
        if self._length is not None:
            return Heads(part, self._length)
        return part if self.second is None else self.second(part)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, features={self._part}"

    def _parts(self) -> Iterator[tuple[str, Tensor]]:
        """Its rows of the fused parameters, under the names that it has unfused."""
        (fused,) = self._link
        prefix = "" if self.second is None else "first."
        yield f"{prefix}weight", fused.weight[self._part]
        if self._biased:
            assert fused.bias is not None
            yield f"{prefix}bias", fused.bias[self._part]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, value in self._parts():
            destination[prefix + name] = value if keep_vars else value.detach()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        *_, missing_keys, _, error_msgs = rest
        for name, value in self._parts():
            given = state_dict.get(prefix + name)
            if given is None:
                missing_keys.append(prefix + name)
            elif given.shape != value.shape:
                error_msgs.append(f"{prefix}{name} has shape {tuple(given.shape)}, not {tuple(value.shape)}")
            else:
                with torch.no_grad():
                    value.copy_(given)


def share_gemm(model: nn.Module, names: Sequence[str]) -> None:
    """Let weights that read the same input run their first GEMMs as one; the model is changed in place.

    Outputs are the same up to rounding, and so are the names and values in ``state_dict``.

    Args:
        names: of the weights, in the order in which the model calls them.
    """
    weights: list[Any] = [model.get_submodule(name) for name in names]
    fused = FusedInput([_first(weight) for weight in weights])
    for at, (name, weight) in enumerate(zip(names, weights, strict=True)):
        model.set_submodule(name, FusedMember(fused, weight, at).train(weight.training))


def _first(weight: nn.Linear | LowRankLinear) -> nn.Linear:
    """The GEMM that reads the input."""
    return weight.first if isinstance(weight, LowRankLinear) else weight

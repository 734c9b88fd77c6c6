"""Weights that read the same input run their first GEMMs as one: q/k/v and gate/up, in any forms."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gac.runtime.contract import apart_from
from gac.runtime.modules import LowRankLinear, ValueLinear
from gac.runtime.parallel.ranks import Ranks
from gac.runtime.plain.modeling_gac import Heads
from gac.runtime.storage.base import Storage
from gac.runtime.storage.modules import StoredLinear


class SharedGemm:
    """One GEMM whose output features are, one after the other, those of several weights, the shortest first.

    A low-rank pair has as many features here as its rank, any other weight its output features. Where the input has so
    many rows that a part runs apart, the longer parts behind it do too, and the shared GEMM ends before them. The first
    weight runs the GEMM, the others use its output if they are called with the same tensor, and the last one drops it.
    Threads must not share such a model.
    """

    parts: tuple[slice, ...]  # the features of each weight, in the order of their calls
    # by their place in that order, the pairs whose features come from all processes of a split model; those that the
    # GEMM gives are gathered at once
    gathering: Mapping[int, Ranks] = MappingProxyType({})
    read: Tensor | None = None
    output: Tensor | None = None
    gathered: Tensor | None = None

    def of(self, index: int, x: Tensor) -> Tensor:
        """The output of a weight for x ``(..., in)``, of all processes where these are gathered."""
        apart = apart_from(x.numel() // x.shape[-1])
        if index == 0:
            self._drop()
        result = self._part_of(x, self.parts[index], apart)
        if index in self.gathering:
            result = self._from_all(index, result, apart)
        if index == len(self.parts) - 1:
            self._drop()
        return result

    def _drop(self) -> None:
        self.read = self.output = self.gathered = None

    def _from_all(self, index: int, local: Tensor, apart: int) -> Tensor:
        ranks, size = self.gathering[index], local.shape[-1]
        if size >= apart:
            return ranks.gathered(local)
        joint = sorted((self.parts[item] for item in self.gathering), key=lambda part: part.start)
        joint = [part for part in joint if _length(part) < apart]
        sizes = [_length(part) for part in joint]
        if self.gathered is None:
            assert self.output is not None
            adjacent = all(part.stop == other.start for part, other in pairwise(joint))
            if adjacent:
                local = self.output[..., joint[0].start : joint[-1].stop]
            else:
                local = torch.cat([self.output[..., part] for part in joint], -1)
            stacked = ranks.stacked(local)
            self.gathered = torch.cat([item for part in torch.split(stacked, sizes, -1) for item in part], -1)
        start = ranks.size * sum(sizes[: joint.index(self.parts[index])])
        return self.gathered[..., start : start + ranks.size * size]

    def _part_of(self, x: Tensor, part: slice, apart: int) -> Tensor:
        if _length(part) >= apart:
            return self._multiplied(x, part)
        if self.output is None or self.read is not x:
            joined = max(item.stop for item in self.parts if _length(item) < apart)
            self.read, self.output, self.gathered = x, self._multiplied(x, slice(0, joined)), None
        return self.output[..., part]

    def _multiplied(self, x: Tensor, part: slice) -> Tensor:
        raise NotImplementedError


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _laid_out(features: Sequence[int], step: int = 1) -> tuple[slice, ...]:
    """Slices of so many features, the shortest first, each from a multiple of ``step`` on."""
    parts, end = dict[int, slice](), 0
    for index in sorted(range(len(features)), key=features.__getitem__):
        start = -(-end // step) * step
        end = start + features[index]
        parts[index] = slice(start, end)
    return tuple(parts[index] for index in range(len(features)))


class FusedInput(SharedGemm, nn.Module):
    """The GEMM that weights in the model's dtype share.

    ``weight`` has shape ``(sum of features, in)``, ``bias`` shape ``(sum of features,)`` or is None. They appear in
    ``state_dict`` under the names of the weights, as if they were not fused.
    """

    def __init__(self, firsts: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.parts = _laid_out([first.out_features for first in firsts])
        firsts = sorted(firsts, key=lambda first: first.out_features)
        reference = firsts[0].weight
        self.weight = nn.Parameter(torch.cat([first.weight.detach() for first in firsts]), reference.requires_grad)
        biases = [first.weight.new_zeros(first.out_features) if first.bias is None else first.bias for first in firsts]
        fused = (
            torch.cat([bias.detach() for bias in biases]) if any(first.bias is not None for first in firsts) else None
        )
        self.bias = None if fused is None else nn.Parameter(fused, reference.requires_grad)

    def _multiplied(self, x: Tensor, part: slice) -> Tensor:
        return functional.linear(x, self.weight[part], None if self.bias is None else self.bias[part])

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Nothing: each weight writes its own part."""

    def _load_from_state_dict(self, *_: Any) -> None:
        """Nothing: each weight reads its own part."""


class FusedStored(SharedGemm):
    """The GEMM that weights in equal storages share. Each keeps its tensors, which become parts of joined ones.

    Rows that fill a part up to whole words hold zeros, and nobody reads what they give.
    """

    def __init__(self, members: Sequence[StoredLinear]) -> None:
        self._members, self._storage = tuple(members), members[0].storage
        self._columns = members[0].in_features
        self.parts = _laid_out([member.out_features for member in members], self._storage.step)
        self._tensors: dict[str, Tensor] = {}
        self.join()
        for index, member in enumerate(members):
            member.shared = self, index

    def join(self) -> None:
        """Put the tensors of all weights into joined ones, where they are not yet, once they are on one device."""
        devices = {stored.device for member in self._members for stored in member.counted.values()}
        if len(devices) > 1 or (self._tensors and self._is_joined()):
            return
        rows = -(-max(part.stop for part in self.parts) // self._storage.step) * self._storage.step
        tensors = self._storage.tensors(rows, self._columns).items()
        self._tensors = {
            name: torch.zeros(shape, dtype=dtype, device=min(devices, key=str))
            for name, (shape, dtype) in tensors
            if name not in self._storage.metadata
        }
        for member, part in zip(self._members, self.parts, strict=True):
            local = self._storage.slice_rows(self._tensors, part)
            for name, joined in local.items():
                joined.copy_(member.get_buffer(name))
                setattr(member, name, joined)

    def _is_joined(self) -> bool:
        parts = [self._storage.slice_rows(self._tensors, part) for part in self.parts]
        pairs = ((pair, local) for pair, part in zip(self._members, parts, strict=True) for local in part.items())
        return all(pair.get_buffer(name).data_ptr() == joined.data_ptr() for pair, (name, joined) in pairs)

    def _multiplied(self, x: Tensor, part: slice) -> Tensor:
        stored = self._storage.slice_rows(self._tensors, part)
        return self._members[0].multiply(x, stored, _length(part))


class FusedMember(nn.Module):
    """The weight at an ``index`` of a fused GEMM: its part of the output, multiplied by its second factor if any.

    The first member has the GEMM as a submodule.
    """

    def __init__(self, fused: FusedInput, weight: nn.Linear | LowRankLinear, index: int) -> None:
        super().__init__()
        self._link = (fused,)
        if index == 0:
            self.fused = fused
        self.second = weight.second if isinstance(weight, LowRankLinear) else None
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.cache_bits = getattr(weight, "cache_bits", None)
        self._index, self._part = index, fused.parts[index]
        self._biased = first_of(weight).bias is not None
        self._length = weight.length if isinstance(weight, ValueLinear) else None

    def forward(self, x: Tensor) -> Tensor | Heads:
        (fused,) = self._link
        part = fused.of(self._index, x)
        if self._length is not None:
            return Heads(part, self._length)
        return part if self.second is None else self.second(part)

    def fused_parameters(self) -> list[nn.Parameter]:
        """Those of the fused GEMM, which hold other weights' too."""
        return list(self._link[0].parameters())

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, features={self._part}"

    def _parts(self) -> Iterator[tuple[str, Tensor]]:
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
            inputs = state_dict.get(prefix + name)
            if inputs is None:
                missing_keys.append(prefix + name)
            elif inputs.shape != value.shape:
                error_msgs.append(f"{prefix}{name} has shape {tuple(inputs.shape)}, not {tuple(value.shape)}")
            else:
                with torch.no_grad():
                    value.copy_(inputs)


def share_gemm(model: nn.Module, names: Sequence[str]) -> None:
    """Let weights that read the same input run their first GEMMs as one; the model is changed in place.

    Outputs are the same up to rounding, and so are the names and values in ``state_dict``. ``names`` are in the order
    in which the model calls the weights.
    """
    weights: list[Any] = [model.get_submodule(name) for name in names]
    firsts = [first_of(weight) for weight in weights]
    pairs = {index: weight for index, weight in enumerate(weights) if getattr(weight, "gathers_from", None) is not None}
    gathering = {index: pair.gathers_from for index, pair in pairs.items()}
    if storage_of(firsts[0]) is not None:
        FusedStored(firsts).gathering = gathering
        for pair in pairs.values():
            pair.gathers_from = None  # its first factor hands on what is gathered
        return
    fused = FusedInput(firsts)
    fused.gathering = gathering
    for index, (name, weight) in enumerate(zip(names, weights, strict=True)):
        model.set_submodule(name, FusedMember(fused, weight, index).train(weight.training))


def can_share(weights: Sequence[Any]) -> bool:
    """Return whether what holds the first factors of these weights is the same."""
    firsts = [first_of(weight) for weight in weights]
    linear = all(hasattr(weight, "in_features") for weight in weights)
    return linear and all(storage_of(first) == storage_of(firsts[0]) for first in firsts)


def first_of(weight: Any) -> Any:
    """The GEMM of a linear weight or a pair that reads the input."""
    return weight.first if isinstance(weight, LowRankLinear) else weight


def storage_of(first: nn.Module) -> Storage | None:
    """Return what holds a linear weight; None: it is in the model's dtype."""
    return first.storage if isinstance(first, StoredLinear) else None

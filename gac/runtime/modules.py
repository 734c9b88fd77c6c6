"""The modules that run: what each form of a weight is built as."""

from collections.abc import Callable
from copy import copy
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from gac.runtime.latents.quantise import rounded_latents
from gac.runtime.limits import LARGEST, MOST_BITS
from gac.runtime.parallel.ranks import Ranks
from gac.runtime.plain import modeling_gac
from gac.runtime.plain.modeling_gac import multiply_blocks


def empty_linear(in_features: int, out_features: int, bias: bool, **where: Any) -> nn.Linear:
    """An ``nn.Linear`` that is allocated, not initialised: drawing its numbers takes most of the time to make one.

    ``where`` is ``device`` and ``dtype``, here and in all modules below.
    """
    where["device"] = where.get("device") or torch.get_default_device()  # skip_init would take the CPU
    linear: nn.Linear = skip_init(nn.Linear, in_features, out_features, bias, **where)  # type: ignore[no-untyped-call]
    return linear


class RoundedLinear(nn.Linear):
    """A k_proj or v_proj whose outputs the KV cache keeps in ``cache_bits`` a number, allocated, not initialised.

    They are rounded where attention reads them (``gac.runtime.latents.rounded``). A ValueError if they never are so.
    """

    def __init__(self, in_features: int, out_features: int, bits: int, bias: bool = True, **where: Any) -> None:
        if not 1 <= bits <= MOST_BITS:
            raise ValueError(f"keys or values of {bits} bits; expected 1 to {MOST_BITS}.")
        super().__init__(in_features, out_features, bias, **where)
        self.cache_bits = bits

    def reset_parameters(self) -> None:
        """Nothing: drawing numbers takes most of the time to make one."""

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, cache_bits={self.cache_bits}"


class LowRankLinear(nn.Module):
    """y = B (A x) + bias with A ``(rank, in)`` and B ``(out, rank)``: two GEMMs.

    ``first`` holds A, ``second`` holds B and the bias, allocated but not initialised. x has shape ``(..., in)``, y
    ``(..., out)``.
    """

    second: "nn.Linear | BlockLinear"
    gathers_from: Ranks | None = None  # the processes of which each has some rows of A; None: A is whole

    def __init__(self, in_features: int, rank: int, out_features: int, bias: bool = True, **where: Any) -> None:
        super().__init__()
        self.in_features, self.rank, self.out_features = in_features, rank, out_features
        self.first = empty_linear(in_features, rank, bias=False, **where)
        self.second = empty_linear(rank, out_features, bias=bias, **where)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        y: Tensor = self.second(hidden if self.gathers_from is None else self.gathers_from.gathered(hidden))
        return y

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, rank={self.rank}, out_features={self.out_features}"


class BlockLinear(nn.Module):
    """y_g = B_g z_g for every block g of the input, and the bias: one batched GEMM.

    ``weight`` holds the B_g, shape ``(blocks, rows, rank)``; x has shape ``(..., blocks * rank)``, y ``(..., blocks *
    rows)``. The input is rounded to ``bits``, as a cache keeps it, unless these are None.
    """

    def __init__(self, blocks: int, rank: int, rows: int, bias: bool, bits: int | None = None, **where: Any) -> None:
        super().__init__()
        self.bits = bits
        self.weight = nn.Parameter(torch.empty(blocks, rows, rank, **where))
        self.bias = nn.Parameter(torch.empty(blocks * rows, **where)) if bias else None
        self.in_features, self.out_features = blocks * rank, blocks * rows

    @property
    def blocks(self) -> int:
        return len(self.weight)

    def forward(self, x: Tensor, is_rounded: bool = False) -> Tensor:
        """Multiply the input, rounded before unless it ``is_rounded`` already."""
        x = x if is_rounded else rounded_latents(x, self.blocks, self.bits)
        return multiply_blocks(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        sizes = f"blocks={self.blocks}, in_features={self.in_features}, out_features={self.out_features}"
        return sizes if self.bits is None else f"{sizes}, bits={self.bits}"


class LatentLinear(LowRankLinear):
    """y = blockdiag(B_1, B_2, ...) (A x) + bias: a low-rank pair for each group of output features.

    ``first`` holds the A_g, one above the other, shape ``(groups * rank, in)``; ``second`` is a ``BlockLinear``.
    Latents are rounded to ``bits`` between the factors, unless these are None; a ValueError if they never are of so
    many.
    """

    def __init__(
        self,
        in_features: int,
        groups: int,
        rank: int,
        out_features: int,
        bias: bool,
        bits: int | None = None,
        **where: Any,
    ) -> None:
        if bits is not None and bits not in LARGEST:
            raise ValueError(f"latents of {bits} bits; expected one of {', '.join(map(str, LARGEST))}.")
        nn.Module.__init__(self)
        self.in_features, self.rank, self.out_features = in_features, groups * rank, out_features
        self.first = empty_linear(in_features, groups * rank, bias=False, **where)
        self.second = BlockLinear(groups, rank, out_features // groups, bias, bits, **where)


class ValueLinear(modeling_gac.ValueLinear):
    """v_proj with shorter value vectors: a GEMM whose output is split into heads of ``length``.

    ``weight`` has shape ``(heads * length, in)``, ``bias`` shape ``(heads * length,)`` or is None. It is no
    ``nn.Linear``: what puts layers of its own in the place of those (vLLM, quantisers) would lose the heads.
    """

    def __init__(self, in_features: int, heads: int, length: int, bias: bool, **where: Any) -> None:
        super().__init__(in_features, heads, length, bias=bias, **where)
        self.in_features, self.out_features = in_features, heads * length

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, length={self.length}"


def _sizes_of(make: Callable[..., nn.Module]) -> tuple[str, ...]:
    """Return the sizes that a plain module is made of: its arguments before those that all modules have."""
    names = (name for name, argument in signature(make).parameters.items() if argument.kind != argument.VAR_KEYWORD)
    return tuple(name for name in names if name not in ("bias", "storage"))


def resized(dense: Any, **sizes: int) -> Any:
    """Return a router, or routed experts, like these of other sizes; parameters are allocated, not initialised."""
    module = copy(dense)
    vars(module)["_modules"] = {name: copy(inner) for name, inner in dense._modules.items()}
    modeling_gac.resize(module, **sizes)
    return module


KINDS: dict[str, tuple[Callable[..., nn.Module], tuple[str, ...]]] = {
    name: (make, _sizes_of(make)) for name, make in modeling_gac.MODULES.items()
} | {
    "Linear": (empty_linear, ("in_features", "out_features")),
    "LowRankLinear": (LowRankLinear, ("in_features", "rank", "out_features")),
    "LatentLinear": (LatentLinear, ("in_features", "groups", "rank", "out_features")),
    "RoundedLatentLinear": (LatentLinear, ("in_features", "groups", "rank", "out_features", "bits")),
    "RoundedLinear": (RoundedLinear, ("in_features", "out_features", "bits")),
    "ValueLinear": (ValueLinear, ("in_features", "heads", "length")),
    "Router": (resized, ("experts",)),
    "Experts": (resized, ("experts", "width")),
}
"""The modules that a weight can be, by the name that ``config.json`` gives them, and the sizes that make one."""

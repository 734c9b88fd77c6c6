"""How vLLM splits a compressed model: its Transformers backend reads styles by name, and puts layers of its own there.

Names are patterns there, of which any that begins a module's name matches; so factors are named, not their weights.
"""

import re
import sys
from collections.abc import Mapping
from functools import cache, wraps
from typing import Any

from torch import Tensor, fx, nn

from .division import Cuts, Division, Unit, Whole, units_of
from .header import own_name, skipped_blocks, storage_of, weights_of
from .modules import Absent, Heads, LatentLinear, LowRankLinear
from .ranks import SplitError
from .storage import Storage

_STYLES = {"colwise": "colwise", "colwise_gather": "colwise_gather_output", "rowwise": "rowwise"}
"""What vLLM 0.32 calls the styles of ``gac.runtime.division``, as transformers does."""
_REMEDY = "Serve it with fewer GPUs each, and --data-parallel-size, or with transformers."


def tell_vllm(model: Any) -> None:
    """Give the model the plan by which vLLM splits it, where it does.

    Raises:
        SplitError: an attention cannot be divided, which vLLM always does.
    """
    vllm = sys.modules["vllm.distributed"]
    if (size := vllm.get_tensor_model_parallel_world_size()) == 1:
        return
    told = _Told(model, vllm.get_tensor_model_parallel_rank(), size)
    for unit in list(units_of(model)):
        told.add(unit)
    for one in skipped_blocks(model):
        if one["attention"]:
            _shorten(model.get_submodule(one["block"]), one, size)
    model._tp_plan = {f"{re.escape(name)}$": style for name, style in told.styles.items()}


def _shorten(attention: Any, described: Mapping[str, Any], size: int) -> None:
    """Let a skipped attention hand out zeros of as many heads as vLLM has on a GPU."""
    if not hasattr(attention, "k_proj"):
        expected = "one with weights of its own for queries, keys and values"
        raise SplitError(f"{described['block']}, which is skipped, over {size} GPUs", expected, _REMEDY)
    for name, weight in attention.named_children():
        if isinstance(weight, Absent) and name != described["output"]:
            weight.out_features = max(attention.head_dim, weight.out_features // size)


class _Told:
    """What vLLM is told.

    Attributes:
        styles: by the name of each linear weight that it divides, how.
    """

    def __init__(self, model: Any, rank: int, size: int) -> None:
        self.styles: dict[str, str] = {}
        self._rank, self._size = rank, size
        self._changed = {own_name(model, name) for name in weights_of(model.config)}
        self._storages = _storages(model)

    def add(self, unit: Unit) -> None:
        """An attention or an MLP."""
        if not unit.apart and self._is_linear(unit):
            self.styles |= unit.styles  # vLLM takes weights apart that are several in one
        elif unit.heads is not None:
            self._attention(unit)
        elif unit.apart:
            self._mlp(unit)
        else:
            self._stacked(unit)

    def _is_linear(self, unit: Unit) -> bool:
        return all(isinstance(unit.weight(name), nn.Linear) for name in unit.styles)

    def _attention(self, unit: Unit) -> None:
        try:
            cuts = Division(unit, self._rank, self._size, self._storages).all()
        except Whole as reason:
            raise SplitError(
                f"{unit.path} over {self._size} GPUs ({reason})",
                "an attention that they divide, as vLLM always does",
                _REMEDY,
            ) from None
        if cuts.groups and not self._is_linear(unit):
            raise SplitError(
                f"{unit.path} over {self._size} GPUs, which are more than its {unit.heads} key-value heads",
                "as many at most, where weights of the attention are no longer linear",
                _REMEDY,
            )
        self._take(unit, cuts)

    def _mlp(self, unit: Unit) -> None:
        try:
            self._take(unit, Division(unit, self._rank, self._size, self._storages).all())
        except Whole:
            keep_from_merging(unit.module)  # what is merged is divided

    def _stacked(self, unit: Unit) -> None:
        """An MLP with gate above up of which one is a pair: every GPU has all neurons, and a part of each matrix."""
        keep_from_merging(unit.module)
        for name in unit.styles:
            weight, last = unit.weight(name), name == unit.last
            for leaf in ("first", "second") if isinstance(weight, LowRankLinear) else ("",):
                path = f"{name}.{leaf}" if leaf else name
                self.styles[path] = "rowwise_split_input" if last and leaf != "second" else _STYLES["colwise_gather"]

    def _take(self, unit: Unit, cuts: Cuts) -> None:
        """What vLLM does not replace stays whole, and hands on its own part."""
        for name in unit.styles:
            weight = unit.weight(name)
            ours = isinstance(weight, LatentLinear) or not isinstance(weight, nn.Linear | LowRankLinear)
            if ours and name != unit.last:
                rows = cuts.matrices[f"{name}.second" if isinstance(weight, LatentLinear) else name].rows
                assert rows is not None
                weight.register_forward_hook(_Part(rows[0]))
            else:
                found = {
                    path: cut for path, cut in cuts.matrices.items() if path == name or path.startswith(f"{name}.")
                }
                self.styles |= {path: _STYLES[cut.style] for path, cut in found.items()}


class _Part:
    """Takes some features of an output."""

    def __init__(self, rows: slice) -> None:
        self.rows = rows

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor | Heads) -> Tensor | Heads:
        if isinstance(output, Heads):
            return Heads(output.features[..., self.rows], output.length)
        return output[..., self.rows]


def _storages(model: Any) -> dict[str, Storage]:
    """What is to hold the linear weights in the end, by their names."""
    found: dict[str, Storage] = {}
    for stated, described in weights_of(model.config).items():
        name = own_name(model, stated)
        if (storage := storage_of(name, described)) is not None:
            linears = model.get_submodule(name).named_modules(prefix=name)
            found |= {path: storage for path, module in linears if isinstance(module, nn.Linear)}
    return found


def keep_from_merging(module: nn.Module) -> None:
    """Let vLLM merge none of a module's weights."""
    module.__class__ = _untraced(type(module))  # type: ignore[arg-type]  # a class can be hashed


@cache
def _untraced(module_class: type[nn.Module]) -> type[nn.Module]:
    """A subclass that runs as the class does, but for torch.fx, with which vLLM looks for weights to merge."""
    forward = module_class.forward

    @wraps(forward)
    def untraced(self: Any, *args: Any, **options: Any) -> Any:
        if any(isinstance(one, fx.Proxy) for one in (*args, *options.values())):
            raise TypeError("weights that are stored or divided in several ways are not merged")
        return forward(self, *args, **options)

    return type(module_class.__name__, (module_class,), {"forward": untraced})

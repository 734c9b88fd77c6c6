"""Tensor parallelism: how each module is divided over processes, and a model of which each process holds its part.

An attention is divided by heads and an MLP by neurons, so that a block needs one sum over all processes at its end, as
in Megatron-LM (arXiv 1909.08053). A pair's factors are both divided: the rank-r vectors between them are gathered, or
summed. What transformers divides of an architecture is known from its ``base_model_tp_plan``.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .ends import StoredHead, TiedHead
from .modules import BlockLinear, GroupedLinear, LowRankLinear, ValueLinear
from .ranks import Ranks, SplitError
from .storage import Storage
from .stored import StoredLinear

Style = Literal["colwise", "colwise_gather", "rowwise"]
"""Of a matrix: its rows are divided, for these are columns of W^T; they are, and its outputs are gathered; its columns
are, and its outputs are summed."""

_OUT, _IN = "colwise", "rowwise"
_WHOLE_HEADS = "its attention needs all heads at once"
_logger = logging.getLogger("gac")


@dataclass(frozen=True)
class Cut:
    """What one process has of a matrix.

    Attributes:
        style: how it is divided.
        rows: which of its rows, blocks one above the other; None: all.
        columns: which of its columns; None: all.
    """

    style: Style
    rows: tuple[slice, ...] | None = None
    columns: slice | None = None


@dataclass(frozen=True)
class Cuts:
    """What one process has of a model.

    Attributes:
        matrices: by the name of each module that holds a matrix and is divided.
        whole: by the name of each weight or factor that is not, why.
        groups: by the name of each attention, how many query heads read a key-value head there.
    """

    matrices: Mapping[str, Cut]
    whole: Mapping[str, str]
    groups: Mapping[str, int]


@dataclass(frozen=True)
class _Unit:
    """An attention or an MLP.

    Attributes:
        path: its name.
        outputs: the weights that it computes with, by name; their rows are divided.
        last: the one through which it writes, whose columns are.
        apart: whether each process can compute with what it has itself.
    """

    path: str
    module: Any
    outputs: Mapping[str, Any]
    last: str
    apart: bool


class _Whole(Exception):  # noqa: N818 - nothing is wrong
    """Why something is not divided."""


def styles_of(module: nn.Module, side: Literal["out", "in"]) -> dict[str, Style]:
    """How the matrices of a weight's module are divided, by their names in it; none where it has none.

    Args:
        side: of the weight, which is divided: its outputs, or its inputs.
    """
    if isinstance(module, GroupedLinear):
        return {"first": "colwise", "second": "colwise"}
    if isinstance(module, LowRankLinear):
        first: Style = "colwise_gather" if side == "out" else "rowwise"
        return {"first": first, "second": "colwise" if side == "out" else "colwise_gather"}
    return {"": "colwise" if side == "out" else "rowwise"} if _is_matrix(module) else {}


def split(model: Any, ranks: Ranks) -> None:
    """Leave of a model what this process has of it, on its device; the model is changed in place.

    What cannot be divided stays whole, which process 0 says once.

    Raises:
        SplitError: nothing of it can be divided.
    """
    cuts = cuts_of(model, ranks.rank, ranks.size)
    if ranks.rank == 0 and cuts.whole:
        name, reason = next(iter(cuts.whole.items()))
        _logger.warning(
            "%d matrices are whole in each of %d processes; the first is %s: %s",
            len(cuts.whole), ranks.size, name, reason,
        )  # fmt: skip
    for name, cut in cuts.matrices.items():
        _take(model.get_submodule(name), cut, ranks)
    for name, count in cuts.groups.items():
        model.get_submodule(name).num_key_value_groups = count
    for name, pair in model.named_modules():
        if isinstance(pair, LowRankLinear):
            _join(pair, name, cuts.matrices, ranks)
    model.to(ranks.device)
    _divide_head(model, ranks)
    model.requires_grad_(False)
    model._tp_size = ranks.size


def cuts_of(model: Any, rank: int, size: int, storages: Mapping[str, Storage] | None = None) -> Cuts:
    """What a process has of a model; nothing is changed.

    Args:
        storages: by name, what is to hold plain matrices of the model in the end.

    Raises:
        SplitError: nothing of it can be divided.
    """
    matrices: dict[str, Cut] = {}
    whole: dict[str, str] = {}
    groups: dict[str, int] = {}
    units = list(_units(model))
    for unit in units:
        try:
            found = _Division(unit, model.config.get_text_config(), rank, size, storages or {}).all()
        except _Whole as reason:
            whole |= {name: str(reason) for name in (*unit.outputs, unit.last)}
            continue
        matrices |= found.matrices
        whole |= found.whole
        groups |= found.groups
    if not matrices:
        reason = f"{next(iter(whole))}: {next(iter(whole.values()))}" if whole else "transformers has no plan for it"
        raise SplitError(
            f"a {model.config.model_type} over {size} processes, of which nothing can be divided ({reason})",
            "a number of processes that divides its key-value heads or its neurons",
            "Start another number of them, or run it whole.",
        )
    return Cuts(matrices, whole, groups)


def _units(model: Any) -> Iterator[_Unit]:
    """The attentions and MLPs of which transformers' plan divides the weights, and that are not skipped."""
    plan = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    rules = [
        (re.compile(re.escape(name).replace(r"\*", r"\d+")), style)
        for name, style in plan.items()
        if style.startswith((_OUT, _IN))
    ]
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    found: dict[str, dict[str, str]] = {}
    for name, module in model.base_model.named_modules():
        style = next((style for rule, style in rules if rule.fullmatch(name)), None)
        if style is not None and hasattr(module, "out_features"):
            found.setdefault(prefix + name.rpartition(".")[0], {})[prefix + name] = style
    for path, styles in found.items():
        weights = {name: model.get_submodule(name) for name in styles}
        last = next((name for name, style in styles.items() if style.startswith(_IN)), None)
        if last is not None and styles_of(weights[last], "in"):
            outputs = {name: weight for name, weight in weights.items() if name != last}
            apart = {*styles.values()} == {_OUT, _IN}
            yield _Unit(path, model.get_submodule(path), outputs, last, apart)


class _Division:
    """What one process has of a unit."""

    def __init__(self, unit: _Unit, config: Any, rank: int, size: int, storages: Mapping[str, Storage]) -> None:
        self._unit, self._config, self._storages = unit, config, storages
        self._rank, self._size = rank, size
        self._last: Any = unit.module.get_submodule(unit.last.removeprefix(f"{unit.path}."))
        self._matrices: dict[str, Cut] = {}
        self._whole: dict[str, str] = {}

    def all(self) -> Cuts:
        """Every matrix of the unit.

        Raises:
            _Whole: why all of it has to stay whole.
        """
        heads = self._heads()
        self._check(heads)
        groups: dict[str, int] = {}
        for name, module in self._unit.outputs.items():
            parts = self._size
            if heads is not None and heads < self._size and name.rpartition(".")[2] in ("k_proj", "v_proj"):
                parts = heads
                groups[self._unit.path] = self._query_heads() // self._size
            blocks = 1 if heads is not None else module.out_features // self._last.in_features
            self._outputs(name, module, parts, blocks)
        self._inputs()
        return Cuts(self._matrices, self._whole, groups)

    def _heads(self) -> int | None:
        """Key-value heads of an attention; None for an MLP."""
        attention = self._unit.module
        if (keys := getattr(attention, "k_proj", None)) is not None:
            return int(keys.out_features // attention.head_dim)
        if hasattr(attention, "head_dim") or hasattr(attention, "head_size"):
            return int(getattr(self._config, "num_key_value_heads", None) or self._config.num_attention_heads)
        return None

    def _query_heads(self) -> int:
        return int(self._unit.module.q_proj.out_features // self._unit.module.head_dim)

    def _check(self, heads: int | None) -> None:
        size, neurons = self._size, self._last.in_features
        if heads is None and neurons % size:
            raise _Whole(f"{neurons} neurons")
        if heads is None:
            return
        if not self._unit.apart or any(one.ndim > 1 for one in self._beside()):
            raise _Whole(_WHOLE_HEADS)
        shared = hasattr(self._unit.module, "k_proj") and size % heads == 0 and self._query_heads() % size == 0
        if heads % size and not shared:
            raise _Whole(f"{heads} key-value heads")

    def _beside(self) -> Iterator[nn.Parameter]:
        """Parameters of an attention that are none of its weights'."""
        weights = [*self._unit.outputs.values(), self._last]
        own = {id(one) for weight in weights for one in weight.parameters()}
        return (one for one in self._unit.module.parameters() if id(one) not in own)

    def _outputs(self, name: str, module: Any, parts: int, blocks: int) -> None:
        """Of a weight whose rows are divided into so many parts; in each of its blocks by itself."""
        rows = self._ranges(module.out_features, parts, blocks)
        for leaf, style in styles_of(module, "out").items():
            path = f"{name}.{leaf}" if leaf else name
            if style == "colwise_gather":
                self._gathered(path, module.rank)
            elif isinstance(module, GroupedLinear) and leaf == "first":
                self._add(path, Cut(style, rows=(self._latents(module, rows[0]),)))
            else:
                self._add(path, Cut(style, rows=rows))

    def _latents(self, module: GroupedLinear, rows: slice) -> slice:
        """Those of the groups that the rows lie in: whole groups, or a part of one."""
        groups = self._groups(module)
        rank, length = module.rank // groups, module.out_features // groups
        whole = rows.start % length == 0 and rows.stop % length == 0
        if not whole and rows.start // length != (rows.stop - 1) // length:
            raise _Whole(f"{groups} groups of heads")
        return slice(rows.start // length * rank, -(-rows.stop // length) * rank)

    def _groups(self, module: GroupedLinear) -> int:
        second: Any = module.second
        return int(second.shape[0] if isinstance(second, StoredLinear) else len(second.weight))

    def _inputs(self) -> None:
        """Of the weight through which the unit writes."""
        name, module = self._unit.last, self._last
        width = module.in_features // self._size
        columns = slice(self._rank * width, (self._rank + 1) * width)
        for leaf, style in styles_of(module, "in").items():
            path = f"{name}.{leaf}" if leaf else name
            if style == "rowwise":
                self._add(path, Cut(style, columns=columns))
            else:
                self._gathered(path, module.out_features)

    def _gathered(self, path: str, rows: int) -> None:
        """A matrix whose outputs all processes have in the end: it may stay whole."""
        try:
            self._add(path, Cut("colwise_gather", rows=self._ranges(rows, self._size, 1)))
        except _Whole as reason:
            self._whole[path] = str(reason)

    def _ranges(self, rows: int, parts: int, blocks: int) -> tuple[slice, ...]:
        length, at = rows // blocks, self._rank * parts // self._size
        if length % parts:
            raise _Whole(f"{length} rows")
        part = length // parts
        starts = (block * length + at * part for block in range(blocks))
        return tuple(slice(start, start + part) for start in starts)

    def _add(self, path: str, cut: Cut) -> None:
        """Take it, where what holds the matrix can be cut there."""
        matrix: Any = self._unit.module.get_submodule(path.removeprefix(f"{self._unit.path}."))
        storage = matrix.storage if isinstance(matrix, StoredLinear) else self._storages.get(path)
        if storage is not None:
            columns = matrix.in_features if not isinstance(matrix, StoredLinear) else matrix.matrix[1]
            ends = [end for one in cut.rows or () for end in (one.start, one.stop)]
            if any(end % storage.step for end in ends):
                raise _Whole(f"{storage} is divided after multiples of {storage.step} rows")
            if cut.columns is not None and not storage.cuts(cut.columns, columns):
                raise _Whole(f"{storage} is not divided after {cut.columns.stop - cut.columns.start} columns")
        self._matrices[path] = cut


def _is_matrix(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | ValueLinear | BlockLinear | StoredLinear)


# --- what is left of a module -----------------------------------------------------------------------------------------


def _take(module: Any, cut: Cut, ranks: Ranks) -> None:
    """Leave of a module that holds a matrix what the process has of it."""
    if isinstance(module, StoredLinear):
        _take_stored(module, cut, ranks.device)
    else:
        _take_plain(module, cut, ranks.device)
    if module.bias is not None:
        module.bias = _bias(module.bias, cut, ranks)
    rows = None if cut.rows is None else sum(one.stop - one.start for one in cut.rows)
    module.out_features = rows or module.out_features
    if cut.columns is not None:
        module.in_features = cut.columns.stop - cut.columns.start
        module.register_forward_hook(_Sum(ranks))


def _take_plain(module: Any, cut: Cut, device: torch.device) -> None:
    weight: Tensor = module.weight.detach()
    stacked = weight.flatten(0, -2)
    values = _on(_rows(stacked, cut.rows) if cut.columns is None else stacked[:, cut.columns], device)
    if weight.ndim == 3:
        blocks = _blocks(values.shape[0], weight.shape[1])
        values = values.view(blocks, -1, weight.shape[2])
        module.in_features = blocks * weight.shape[2]
    module.weight = nn.Parameter(values, requires_grad=False)


def _take_stored(module: StoredLinear, cut: Cut, device: torch.device) -> None:
    storage, (rows, columns) = module.storage, module.matrix
    if cut.columns is None:
        parts = [storage.part(module.held, one) for one in cut.rows or ()]
        held = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    else:
        held, columns = storage.cut(module.held, cut.columns, columns), cut.columns.stop - cut.columns.start
    rows = rows if cut.rows is None else sum(one.stop - one.start for one in cut.rows)
    held |= storage.stated(rows, columns)
    if len(module.shape) == 3:
        blocks = _blocks(rows, module.shape[1])
        module.shape = (blocks, rows // blocks, columns)
        module.in_features = blocks * columns
    else:
        module.shape = (rows, columns)
    for name in module.names:
        setattr(module, name, _on(held[name], device))


def _rows(values: Tensor, rows: Sequence[slice] | None) -> Tensor:
    parts = [values[one] for one in rows or (slice(None),)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _blocks(rows: int, length: int) -> int:
    """How many blocks of that length the rows are, or are a part of."""
    return max(1, rows // length)


def _bias(bias: nn.Parameter, cut: Cut, ranks: Ranks) -> nn.Parameter | None:
    """Its part; where outputs are summed, process 0 alone adds it."""
    if cut.columns is not None and ranks.rank:
        return None
    return nn.Parameter(_on(_rows(bias.detach(), cut.rows), ranks.device), requires_grad=False)


def _on(part: Tensor, device: torch.device) -> Tensor:
    """A copy on a device, so that what it is a part of can go."""
    return torch.empty_like(part, device=device, memory_format=torch.contiguous_format).copy_(part)


def _join(pair: LowRankLinear, name: str, cuts: Mapping[str, Cut], ranks: Ranks) -> None:
    """Bring what the first factor writes to all processes, or hand on the output of the second."""
    first, second = (cuts.get(f"{name}.{factor}") for factor in ("first", "second"))
    pair.in_features, pair.rank, pair.out_features = (
        pair.first.in_features, pair.first.out_features, pair.second.out_features
    )  # fmt: skip
    if first is not None and first.style == "colwise_gather":
        pair.second.register_forward_pre_hook(_GatherInput(ranks))  # where first GEMMs are shared, no other one runs
    if second is not None and second.style == "colwise_gather":
        pair.second.register_forward_hook(_Gather(ranks))
        pair.out_features *= ranks.size


class _Hook:
    """What is done to the input or the output of a module."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks


class _Sum(_Hook):
    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return self.ranks.summed(output)


class _Gather(_Hook):
    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return self.ranks.gathered(output)


class _GatherInput(_Hook):
    def __call__(self, module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        (x,) = inputs
        return (self.ranks.gathered(x),)


# --- the head ---------------------------------------------------------------------------------------------------------


def _divide_head(model: Any, ranks: Ranks) -> None:
    """Divide a head's rows, where they can be; its outputs are gathered. A tied one reads a part of the embedding."""
    head = model.get_output_embeddings()
    if head is None:
        return
    rows = head.out_features // ranks.size
    part = slice(ranks.rank * rows, (ranks.rank + 1) * rows)
    step = head.storage.step if isinstance(head, StoredHead) else 1
    if head.out_features % ranks.size or rows % step or type(head) not in (nn.Linear, StoredHead, TiedHead):
        if ranks.rank == 0:
            _logger.warning("the head is whole in each of %d processes: it has %d rows", ranks.size, head.out_features)
        return
    if isinstance(head, TiedHead):
        head.part = part
    elif isinstance(head, StoredHead):
        _take_stored(head, Cut("colwise_gather", rows=(part,)), ranks.device)
    else:
        head.weight = nn.Parameter(_head_rows(model, head, part), requires_grad=False)
    if head.bias is not None:
        head.bias = nn.Parameter(_on(head.bias[part].detach(), ranks.device), requires_grad=False)
    head.out_features = rows
    head.register_forward_hook(_Gather(ranks))


def _head_rows(model: Any, head: Any, part: slice) -> Tensor:
    """A view where the embedding keeps all rows anyway."""
    rows: Tensor = head.weight.detach()[part]
    tied = head.weight is model.get_input_embeddings().weight
    return rows if tied else _on(rows, rows.device)

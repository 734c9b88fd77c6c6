"""Tensor parallelism: what each of several processes has of a model, from its modules alone.

An attention is divided by heads and an MLP by neurons, so that a block needs one sum over all processes at its end, as
in Megatron-LM (arXiv 1909.08053). A pair's factors are both divided: the rank-r vectors between them are gathered, or
summed. What is divided of an architecture is known from its ``base_model_tp_plan`` in transformers.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from gac.runtime.modules import BlockLinear, LatentLinear, LowRankLinear, ValueLinear
from gac.runtime.parallel.ranks import SplitError
from gac.runtime.storage.base import Storage
from gac.runtime.storage.modules import StoredLinear

Style = Literal["colwise", "colwise_gather", "rowwise"]
"""The division of a matrix: its rows (``colwise``, as engines say, for these are columns of W^T), whose outputs stay
where they are or are gathered in every process, or its columns, whose outputs are summed."""

_SHARED = ("k_proj", "v_proj")


@dataclass(frozen=True)
class Cut:
    """The part of a matrix that one process has.

    Attributes:
        style: how it is divided.
        rows: which of its rows, blocks one above the other; None: all.
        columns: which of its columns; None: all.
    """

    style: Style
    rows: tuple[slice, ...] | None = None
    columns: slice | None = None

    @property
    def count(self) -> int | None:
        """Return how many rows."""
        return None if self.rows is None else sum(row.stop - row.start for row in self.rows)


@dataclass(frozen=True)
class Cuts:
    """The parts of matrices that one process has.

    Attributes:
        matrices: by the name of each module that holds a matrix and is divided.
        undivided: by the name of each weight or factor that is not, why.
        groups: by the name of an attention, how many query heads read a key-value head there, where that changes.
    """

    matrices: Mapping[str, Cut]
    undivided: Mapping[str, str]
    groups: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Unit:
    """An attention or an MLP, whose weights are divided together or not at all.

    Attributes:
        path: its name.
        module: it itself.
        styles: of its weights, by name, as transformers has them.
        outputs: the names of the weights that it computes with, whose rows are divided.
        last: the name of the one through which it writes, whose columns are.
    """

    path: str
    module: Any
    styles: Mapping[str, str]
    outputs: tuple[str, ...]
    last: str

    def weight(self, name: str) -> Any:
        """A module within it, by its name in the model."""
        return self.module.get_submodule(name.removeprefix(f"{self.path}."))

    @property
    def heads(self) -> int | None:
        """Key-value heads of an attention; None for an MLP."""
        attention = self.module
        if (keys := getattr(attention, "k_proj", None)) is not None:
            return int(keys.out_features // attention.head_dim)
        if not hasattr(attention, "head_dim") and not hasattr(attention, "head_size"):
            return None
        return int(getattr(attention.config, "num_key_value_heads", None) or attention.config.num_attention_heads)

    @property
    def apart(self) -> bool:
        """Return whether transformers lets each process compute with what it has itself."""
        return {*self.styles.values()} == {"colwise", "rowwise"}


class NotDivided(Exception):  # noqa: N818 - nothing is wrong
    """Why something is not divided."""


def styles_of(module: nn.Module, side: Literal["out", "in"]) -> dict[str, Style]:
    """Return how the matrices of a weight's module are divided, by their names in it; none where it has none.

    Args:
        side: of the weight, which is divided: its outputs, or its inputs.
    """
    if isinstance(module, LatentLinear):
        return {"first": "colwise", "second": "colwise"}
    if isinstance(module, LowRankLinear):
        if side == "out":
            return {"first": "colwise_gather", "second": "colwise"}
        return {"first": "rowwise", "second": "colwise_gather"}
    if not isinstance(module, nn.Linear | ValueLinear | BlockLinear | StoredLinear):
        return {}
    return {"": "colwise" if side == "out" else "rowwise"}


def cuts_of(model: Any, rank: int, size: int) -> Cuts:
    """Return what a process has of a model; nothing is changed.

    Raises:
        SplitError: nothing of it can be divided.
    """
    matrices: dict[str, Cut] = {}
    undivided: dict[str, str] = {}
    groups: dict[str, int] = {}
    for unit in units_of(model):
        try:
            result = Division(unit, rank, size).all()
        except NotDivided as reason:
            undivided |= {name: str(reason) for name in unit.styles}
            continue
        matrices |= result.matrices
        undivided |= result.undivided
        groups |= result.groups
    if not matrices:
        first = next((f"{name}: {why}" for name, why in undivided.items()), "transformers has no plan for it")
        raise SplitError(
            f"a {model.config.model_type} over {size} processes, of which nothing can be divided ({first})",
            "a number of processes that divides its key-value heads or its neurons",
            "Start another number of them, or run it whole.",
        )
    return Cuts(matrices, undivided, groups)


def units_of(model: Any) -> Iterator[Unit]:
    """The attentions and MLPs of which transformers' plan divides the weights, and that are not skipped."""
    plan = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    rules = [
        (re.compile(re.escape(name).replace(r"\*", r"\d+")), style)
        for name, style in plan.items()
        if style.startswith(("colwise", "rowwise"))
    ]
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    result: dict[str, dict[str, str]] = {}
    for name, module in model.base_model.named_modules():
        style = next((style for rule, style in rules if rule.fullmatch(name)), None)
        if style is not None and hasattr(module, "out_features"):
            result.setdefault(prefix + name.rpartition(".")[0], {})[prefix + name] = style
    for path, styles in result.items():
        last = next((name for name, style in styles.items() if style.startswith("rowwise")), None)
        if last is not None and styles_of(model.get_submodule(last), "in"):
            outputs = tuple(name for name in styles if name != last)
            yield Unit(path, model.get_submodule(path), styles, outputs, last)


class Division:
    """The division of a unit.

    Args:
        storages: by name, what is to hold plain matrices of the model in the end.
    """

    def __init__(self, unit: Unit, rank: int, size: int, storages: Mapping[str, Storage] | None = None) -> None:
        self._unit, self._rank, self._size = unit, rank, size
        self._storages = storages or {}
        self._last = unit.weight(unit.last)
        self._matrices: dict[str, Cut] = {}
        self._undivided: dict[str, str] = {}

    def all(self) -> Cuts:
        """Every matrix of the unit.

        Raises:
            NotDivided: why all of it has to stay whole.
        """
        heads = self._unit.heads
        self._check(heads)
        shares = heads is not None and heads < self._size
        for name in self._unit.outputs:
            module = self._unit.weight(name)
            parts = heads if heads and shares and name.endswith(_SHARED) else self._size
            blocks = 1 if heads is not None else module.out_features // self._last.in_features
            self._outputs(name, module, parts, blocks)
        self._inputs()
        groups = {self._unit.path: self._query_heads() // self._size} if shares else {}
        return Cuts(self._matrices, self._undivided, groups)

    def _query_heads(self) -> int:
        return int(self._unit.module.q_proj.out_features // self._unit.module.head_dim)

    def _check(self, heads: int | None) -> None:
        neurons = self._last.in_features
        if heads is None and neurons % self._size:
            raise NotDivided(f"{neurons} neurons")
        if heads is None:
            return
        if not self._unit.apart or self._turns_heads():
            raise NotDivided("its attention computes with all heads at once")
        shared = hasattr(self._unit.module, "k_proj") and self._size % heads == 0
        if heads % self._size and not (shared and self._query_heads() % self._size == 0):
            raise NotDivided(f"{heads} key-value heads")

    def _turns_heads(self) -> bool:
        local = {id(parameter) for name in self._unit.styles for parameter in self._unit.weight(name).parameters()}
        return any(parameter.ndim > 1 and id(parameter) not in local for parameter in self._unit.module.parameters())

    def _outputs(self, name: str, module: Any, parts: int, blocks: int) -> None:
        rows = self._ranges(module.out_features, parts, blocks)
        for leaf, style in styles_of(module, "out").items():
            path = f"{name}.{leaf}" if leaf else name
            if style == "colwise_gather":
                self._gathered(path, module.rank)
            elif leaf == "first":
                self._add(path, Cut(style, rows=(_latents(module, rows[0]),)))
            else:
                self._add(path, Cut(style, rows=rows))

    def _inputs(self) -> None:
        width = self._last.in_features // self._size
        columns = slice(self._rank * width, (self._rank + 1) * width)
        for leaf, style in styles_of(self._last, "in").items():
            path = f"{self._unit.last}.{leaf}" if leaf else self._unit.last
            if style == "rowwise":
                self._add(path, Cut(style, columns=columns))
            else:
                self._gathered(path, self._last.out_features)

    def _gathered(self, path: str, rows: int) -> None:
        try:
            self._add(path, Cut("colwise_gather", rows=self._ranges(rows, self._size, 1)))
        except NotDivided as reason:
            self._undivided[path] = str(reason)

    def _ranges(self, rows: int, parts: int, blocks: int) -> tuple[slice, ...]:
        length, index = rows // blocks, self._rank * parts // self._size
        if length % parts:
            raise NotDivided(f"{length} rows")
        part = length // parts
        starts = (block * length + index * part for block in range(blocks))
        return tuple(slice(start, start + part) for start in starts)

    def _add(self, path: str, cut: Cut) -> None:
        matrix = self._unit.weight(path)
        stored = isinstance(matrix, StoredLinear)
        storage = matrix.storage if stored else self._storages.get(path)
        if storage is not None:
            columns = matrix.matrix[1] if stored else matrix.in_features
            if any(end % storage.step for item in cut.rows or () for end in (item.start, item.stop)):
                raise NotDivided(f"{cut.count} rows in {storage}, which is cut every {storage.step} rows")
            if cut.columns is not None and not storage.can_slice_columns(cut.columns, columns):
                raise NotDivided(
                    f"{cut.columns.stop - cut.columns.start} columns in {storage}, which would cut a group"
                )
        self._matrices[path] = cut


def _latents(module: LatentLinear, rows: slice) -> slice:
    second: Any = module.second
    groups = int(second.shape[0] if isinstance(second, StoredLinear) else len(second.weight))
    rank, length = module.rank // groups, module.out_features // groups
    undivided = rows.start % length == 0 and rows.stop % length == 0
    if not undivided and rows.start // length != (rows.stop - 1) // length:
        raise NotDivided(f"{groups} groups of heads")
    return slice(rows.start // length * rank, -(-rows.stop // length) * rank)

"""Tensor parallelism: what each of several processes has of a model, from its modules alone.

An attention is divided by heads and an MLP by neurons, so that a block needs one sum over all processes at its end, as
in Megatron-LM (arXiv 1909.08053). A pair's factors are both divided: the rank-r vectors between them are gathered, or
summed. What is divided of an architecture is known from its ``base_model_tp_plan`` in transformers.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from gac.runtime.contract import experts_of
from gac.runtime.modules import BlockLinear, LatentLinear, LowRankLinear, ValueLinear
from gac.runtime.parallel.ranks import SplitError
from gac.runtime.storage.modules import StoredLinear

Style = Literal["colwise", "colwise_gather", "rowwise"]
"""The division of a matrix: its rows (``colwise``, as engines say, for these are columns of W^T), whose outputs stay
where they are or are gathered in every process, or its columns, whose outputs are summed."""


@dataclass(frozen=True)
class Cut:
    """The part of a matrix that one process has."""

    style: Style
    rows: tuple[slice, ...] | None = None  # blocks one above the other; None: all
    columns: slice | None = None  # None: all

    @property
    def count(self) -> int | None:
        """Number of rows; None: all."""
        return None if self.rows is None else sum(row.stop - row.start for row in self.rows)


@dataclass(frozen=True)
class Cuts:
    """The parts of matrices that one process has."""

    matrices: dict[str, Cut] = field(default_factory=dict)  # by the name of each module that is divided
    undivided: dict[str, str] = field(default_factory=dict)  # by the name of each weight or factor that is not, why
    groups: dict[str, int] = field(default_factory=dict)  # by attention: queries of a key-value head if it changes


class NotDivided(Exception):  # noqa: N818 - nothing is wrong
    """Why something is not divided."""


def styles_of(module: nn.Module, side: Literal["out", "in"]) -> dict[str, Style]:
    """Return how the matrices of a module are divided, by their names in it, where a side of the weight is divided."""
    if getattr(module, "cache_bits", None) is not None:
        return {}
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
    """Return what a process has of a model, which is not changed; a SplitError if nothing of it can be divided."""
    if experts_of(model.config):
        problem = f"a {model.config.model_type}, a mixture of experts, over {size} processes"
        raise SplitError(problem, "a model with one MLP a layer", "Run it whole, or place it with device_map='auto'.")
    cuts = Cuts()
    for unit in units_of(model):
        try:
            parts = Division(unit, rank, size).cuts
        except NotDivided as reason:
            parts = Cuts(undivided=dict.fromkeys(unit.styles, str(reason)))
        cuts.matrices.update(parts.matrices)
        cuts.undivided.update(parts.undivided)
        cuts.groups.update(parts.groups)
    if not cuts.matrices:
        first = next((f"{name}: {why}" for name, why in cuts.undivided.items()), "transformers has no plan for it")
        raise SplitError(
            f"a {model.config.model_type} over {size} processes, of which nothing can be divided ({first})",
            "a number of processes that divides its key-value heads or its neurons",
            "Start another number of them, or run it whole.",
        )
    return cuts


@dataclass(frozen=True, eq=False)
class Unit:
    """An attention or an MLP, whose weights are divided together or not at all."""

    path: str  # its name
    module: Any
    styles: Mapping[str, str]  # of its weights, by name, as transformers has them
    last: str  # the name of the weight through which it writes, whose columns are divided; of the others the rows

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
    def query_heads(self) -> int:
        """Query heads of an attention with a q_proj."""
        return int(self.module.q_proj.out_features // self.module.head_dim)


def units_of(model: Any) -> Iterator[Unit]:
    """The attentions and MLPs of which transformers' plan divides the weights, and that are not skipped."""
    plan = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    rules = [
        (re.compile(re.escape(name).replace(r"\*", r"\d+")), style)
        for name, style in plan.items()
        if style.startswith(("colwise", "rowwise"))
    ]
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    units: dict[str, dict[str, str]] = {}
    for name, module in model.base_model.named_modules():
        style = next((style for rule, style in rules if rule.fullmatch(name)), None)
        if style is not None and hasattr(module, "out_features"):
            units.setdefault(prefix + name.rpartition(".")[0], {})[prefix + name] = style
    for path, styles in units.items():
        last = next((name for name, style in styles.items() if style.startswith("rowwise")), None)
        if last is not None and styles_of(model.get_submodule(last), "in"):
            yield Unit(path, model.get_submodule(path), styles, last)


class Division:
    """The division of a unit, of which ``cuts`` has the parts of one process; NotDivided says why it stays whole."""

    def __init__(self, unit: Unit, rank: int, size: int) -> None:
        self._unit, self._rank, self._size, self.cuts = unit, rank, size, Cuts()
        heads, last = unit.heads, unit.weight(unit.last)
        self._check(heads, last.in_features)
        shares = heads is not None and heads < size
        for name in unit.styles:
            module = unit.weight(name)
            if name != unit.last:
                parts = heads if heads and shares and name.endswith(("k_proj", "v_proj")) else size
                blocks = 1 if heads is not None else module.out_features // last.in_features
                self._add_outputs(name, module, self._ranges(module.out_features, parts, blocks))
        (columns,) = self._ranges(last.in_features, size)
        for leaf, style in styles_of(last, "in").items():
            path = f"{unit.last}.{leaf}" if leaf else unit.last
            if style == "rowwise":
                self._add(path, Cut(style, columns=columns))
            else:
                self._add_gathered(path, last.out_features)
        if shares:
            self.cuts.groups[unit.path] = unit.query_heads // size

    def _check(self, heads: int | None, neurons: int) -> None:
        unit = self._unit
        if heads is None:
            if neurons % self._size:
                raise NotDivided(f"{neurons} neurons")
            return
        of_weights = {id(parameter) for name in unit.styles for parameter in unit.weight(name).parameters()}
        others = (parameter for parameter in unit.module.parameters() if id(parameter) not in of_weights)
        norms_over_heads = any(parameter.ndim > 1 for parameter in others)
        if {*unit.styles.values()} != {"colwise", "rowwise"} or norms_over_heads:
            raise NotDivided("its attention computes with all heads at once")
        shared = hasattr(unit.module, "k_proj") and self._size % heads == 0
        if heads % self._size and not (shared and unit.query_heads % self._size == 0):
            raise NotDivided(f"{heads} key-value heads")

    def _add_outputs(self, name: str, module: Any, rows: tuple[slice, ...]) -> None:
        if getattr(module, "cache_bits", None) is not None:
            raise NotDivided("keys or values are cached in few bits")
        for leaf, style in styles_of(module, "out").items():
            path = f"{name}.{leaf}" if leaf else name
            if style == "colwise_gather":
                self._add_gathered(path, module.rank)
            else:
                self._add(path, Cut(style, rows=(_latents(module, rows[0]),) if leaf == "first" else rows))

    def _add_gathered(self, path: str, rows: int) -> None:
        try:
            self._add(path, Cut("colwise_gather", rows=self._ranges(rows, self._size)))
        except NotDivided as reason:
            self.cuts.undivided[path] = str(reason)

    def _ranges(self, rows: int, parts: int, blocks: int = 1) -> tuple[slice, ...]:
        length, index = rows // blocks, self._rank * parts // self._size
        if length % parts:
            raise NotDivided(f"{length} rows")
        part = length // parts
        starts = (block * length + index * part for block in range(blocks))
        return tuple(slice(start, start + part) for start in starts)

    def _add(self, path: str, cut: Cut) -> None:
        matrix = self._unit.weight(path)
        if isinstance(matrix, StoredLinear):
            storage = matrix.storage
            if any(end % storage.step for rows in cut.rows or () for end in (rows.start, rows.stop)):
                raise NotDivided(f"{cut.count} rows in {storage}, which is cut every {storage.step} rows")
            if cut.columns is not None and not storage.can_slice_columns(cut.columns, matrix.shape[-1]):
                columns = cut.columns.stop - cut.columns.start
                raise NotDivided(f"{columns} columns in {storage}, which would cut a group")
        self.cuts.matrices[path] = cut


def _latents(module: LatentLinear, rows: slice) -> slice:
    """The latents of which such rows of the second factor are made."""
    groups = int(module.second.blocks)  # type: ignore[arg-type]
    rank, length = module.rank // groups, module.out_features // groups
    undivided = rows.start % length == 0 and rows.stop % length == 0
    if not undivided and rows.start // length != (rows.stop - 1) // length:
        raise NotDivided(f"{groups} groups of heads")
    return slice(rows.start // length * rank, -(-rows.stop // length) * rank)

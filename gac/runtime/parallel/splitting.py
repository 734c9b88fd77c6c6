"""A model of which each process holds its part, as ``gac.runtime.parallel.division`` says.

What is left of a module is the same module with smaller tensors, so that all that multiplies runs as it does whole.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gac.runtime.modules import LowRankLinear
from gac.runtime.parallel.division import Cut, cuts_of
from gac.runtime.parallel.ranks import Ranks
from gac.runtime.storage.embeddings import StoredHead, TiedHead
from gac.runtime.storage.modules import StoredLinear

_logger = logging.getLogger("gac")


def split(model: Any, ranks: Ranks) -> None:
    """Leave of a causal LM what this process has of it, on its device; it is changed in place, without gradients.

    What cannot be divided stays whole, which process 0 says once. Its weights share no GEMMs yet. A SplitError says if
    nothing of it can be divided.
    """
    cuts = cuts_of(model, ranks.rank, ranks.size)
    for name, cut in cuts.matrices.items():
        _take(model.get_submodule(name), cut, ranks)
    for name, count in cuts.groups.items():
        model.get_submodule(name).num_key_value_groups = count
    for name, pair in model.named_modules():
        if isinstance(pair, LowRankLinear):
            _join(pair, name, cuts.matrices, ranks)
    model.to(ranks.device)
    undivided = {**cuts.undivided, **_divide_head(model, ranks)}
    model.requires_grad_(False)
    model._tp_size = ranks.size
    if ranks.rank == 0 and undivided:
        name, reason = next(iter(undivided.items()))
        more = f" and {len(undivided) - 1} more" if len(undivided) > 1 else ""
        _logger.warning("whole in each of %d processes: %s (%s)%s", ranks.size, name, reason, more)


def _take(module: Any, cut: Cut, ranks: Ranks) -> None:
    (_take_stored if isinstance(module, StoredLinear) else _take_plain)(module, cut, ranks.device)
    if module.bias is not None:
        keeps_bias = cut.columns is None or ranks.rank == 0  # outputs are summed
        module.bias = _parameter(_rows(module.bias.detach(), cut.rows), ranks.device) if keeps_bias else None
    module.out_features = cut.count or module.out_features
    if cut.columns is not None:
        module.in_features = cut.columns.stop - cut.columns.start
        _exchange_outputs(module, ranks.summed)


def _take_plain(module: Any, cut: Cut, device: torch.device) -> None:
    weight: Tensor = module.weight.detach()
    stacked = weight.flatten(0, -2)
    values = _rows(stacked, cut.rows) if cut.columns is None else stacked[:, cut.columns]
    if weight.ndim == 3:
        blocks = max(1, len(values) // weight.shape[1])
        values = values.view(blocks, -1, weight.shape[2])
        module.in_features = blocks * weight.shape[2]
    module.weight = _parameter(values, device)


def _take_stored(module: StoredLinear, cut: Cut, device: torch.device) -> None:
    storage, (rows, columns) = module.storage, module.matrix
    if cut.columns is None:
        parts = [storage.slice_rows(module.tensors, item) for item in cut.rows or ()]
        stored = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    else:
        stored = storage.slice_columns(module.tensors, cut.columns, columns)
        columns = cut.columns.stop - cut.columns.start
    rows = cut.count or rows
    stored |= storage.metadata_for(rows, columns)
    if len(module.shape) == 3:
        blocks = max(1, rows // module.shape[1])
        module.shape = (blocks, rows // blocks, columns)
        module.in_features = blocks * columns
    else:
        module.shape = (rows, columns)
    for name in module.tensors:
        setattr(module, name, _on(stored[name], device))


def _rows(values: Tensor, rows: Sequence[slice] | None) -> Tensor:
    parts = [values[item] for item in rows or (slice(None),)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _on(part: Tensor, device: torch.device) -> Tensor:
    """A contiguous copy, never a view: the whole tensor is freed."""
    return torch.empty_like(part, device=device, memory_format=torch.contiguous_format).copy_(part)


def _parameter(part: Tensor, device: torch.device) -> nn.Parameter:
    return nn.Parameter(_on(part, device), requires_grad=False)


def _join(pair: LowRankLinear, name: str, cuts: Mapping[str, Cut], ranks: Ranks) -> None:
    """Set the sizes of a pair whose factors are cut, and gather between or behind them where that is due."""
    first, second = (cuts.get(f"{name}.{factor}") for factor in ("first", "second"))
    pair.in_features, pair.rank = pair.first.in_features, pair.first.out_features
    pair.out_features = pair.second.out_features
    if first is not None and first.style == "colwise_gather":
        pair.gathers_from = ranks
    if second is not None and second.style == "colwise_gather":
        _exchange_outputs(pair.second, ranks.gathered)
        pair.out_features *= ranks.size


def _exchange_outputs(module: Any, exchange: Callable[[Tensor], Tensor]) -> None:
    module.register_forward_hook(partial(_exchanged, exchange))


def _exchanged(exchange: Callable[[Tensor], Tensor], module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return exchange(output)


def _divide_head(model: Any, ranks: Ranks) -> dict[str, str]:
    head = model.get_output_embeddings()
    if head is None:
        return {}
    rows = head.out_features // ranks.size
    part = slice(ranks.rank * rows, (ranks.rank + 1) * rows)
    step = head.storage.step if isinstance(head, StoredHead) else 1
    if head.out_features % ranks.size or rows % step or type(head) not in (nn.Linear, StoredHead, TiedHead):
        return {"the head": f"{head.out_features} rows"}
    if isinstance(head, TiedHead):
        head.part = part
    elif isinstance(head, StoredHead):
        _take_stored(head, Cut("colwise_gather", rows=(part,)), ranks.device)
    elif head.weight is model.get_input_embeddings().weight:  # tied: a view of the embedding, which is whole
        head.weight = nn.Parameter(head.weight.detach()[part], requires_grad=False)
    else:
        head.weight = _parameter(head.weight.detach()[part], head.weight.device)
    if head.bias is not None:
        head.bias = _parameter(head.bias.detach()[part], ranks.device)
    head.out_features = rows
    _exchange_outputs(head, ranks.gathered)
    return {}

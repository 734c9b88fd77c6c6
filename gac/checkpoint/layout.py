"""The key ``quantization_config`` of a checkpoint: how its weights of few bits lie, in compressed-tensors' words.

It names modules, a low-rank pair's two each by itself. What it cannot say, such as groups that do not divide a matrix,
it leaves out, with all that is in 16 bits.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from torch import nn

from gac.plan.plan import Plan
from gac.runtime.contract import COMPRESSED_TENSORS
from gac.runtime.fusion.shared_gemm import FusedMember
from gac.runtime.modules import BlockLinear, ValueLinear
from gac.runtime.storage.embeddings import TiedHead
from gac.runtime.storage.modules import Stored, StoredStack
from gac.schemes import scheme_named

_MIXED = "mixed-precision"
_LINEAR = (nn.Linear, ValueLinear, BlockLinear, FusedMember, Stored, TiedHead)


def without(layout: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The same key for a model in which these modules are in 16 bits."""
    gone = {*names}
    targets = [[name for name in group["targets"] if name not in gone] for group in layout["config_groups"].values()]
    groups = zip(layout["config_groups"].values(), targets, strict=True)
    rest = [name for name in layout["ignore"] if name not in gone]
    return _key([group | {"targets": names} for group, names in groups if names], [*rest, *sorted(gone)])


def layout_of(model: nn.Module, plan: Plan, exported: bool = False) -> dict[str, Any] | None:
    """The key for a model with the plan's modules in it; None where no weight is in a format of compressed-tensors.

    ``exported``: weights lie as ``Storage.exported`` has them, not as they are stored.
    """
    schemes = {choice.name: choice.scheme for choice in plan.weights}
    groups: dict[str, dict[str, Any]] = {}
    rest: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, _LINEAR) or isinstance(module, StoredStack):  # compressed-tensors has no stacks
            continue
        group = None
        if isinstance(module, Stored) and (exported or module.storage.is_exported_as_stored):
            group = scheme_named(_scheme_of(name, schemes, plan)).config_group(module.matrix[1])
        if group is not None:
            groups.setdefault(json.dumps(group, sort_keys=True), group | {"targets": []})["targets"].append(name)
        elif isinstance(module, FusedMember) and module.second is not None:
            rest.append(f"{name}.first")
        else:
            rest.append(name)
    return _key([*groups.values()], rest) if groups else None


def _key(groups: Sequence[dict[str, Any]], rest: list[str]) -> dict[str, Any]:
    formats = {group["format"] for group in groups}
    return {
        "quant_method": COMPRESSED_TENSORS,
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else _MIXED,
        "config_groups": {f"group_{index}": group for index, group in enumerate(groups)},
        "ignore": rest,
    }


def _scheme_of(name: str, schemes: dict[str, str], plan: Plan) -> str:
    for path in accumulate(name.split("."), "{}.{}".format):
        if path in schemes:
            return schemes[path]
    assert plan.measured.head is not None, f"{name} is in a storage, and no weight of the plan"
    return plan.measured.head.scheme

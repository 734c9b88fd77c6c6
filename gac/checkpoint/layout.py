"""The key ``quantization_config`` of a checkpoint: how its weights of few bits lie, in compressed-tensors' words.

It names modules, a low-rank pair's two each by itself. What it cannot say, such as groups that do not divide a matrix,
it leaves out, with all that is in 16 bits.
"""

import json
from collections.abc import Iterable
from typing import Any

from torch import nn

from gac.plan import Plan
from gac.runtime.contract import COMPRESSED_TENSORS
from gac.runtime.ends import TiedHead
from gac.runtime.modules import BlockLinear, ValueLinear
from gac.runtime.shared_gemm import FusedMember
from gac.runtime.stored import Stored
from gac.schemes import scheme_named

_MIXED = "mixed-precision"
_LINEAR = (nn.Linear, ValueLinear, BlockLinear, FusedMember, Stored, TiedHead)


def layout_of(model: nn.Module, plan: Plan) -> dict[str, Any] | None:
    """The key as compressed-tensors reads it; None where no weight is in a format that it has.

    Args:
        model: with the plan's modules in it.
    """
    schemes = {choice.name: choice.scheme for choice in plan.weights}
    groups: dict[str, dict[str, Any]] = {}
    rest = []
    for name, module in model.named_modules():
        if not isinstance(module, _LINEAR):
            continue
        group = _group(module, _scheme_of(name, schemes, plan)) if isinstance(module, Stored) else None
        if group is None:
            rest.append(f"{name}.first" if _fused_pair(module) else name)
        else:
            found = groups.setdefault(json.dumps(group, sort_keys=True), group | {"targets": []})
            found["targets"].append(name)
    if not groups:
        return None
    return {
        "quant_method": COMPRESSED_TENSORS,
        "quantization_status": "compressed",
        "format": _format(one["format"] for one in groups.values()),
        "config_groups": {f"group_{at}": group for at, group in enumerate(groups.values())},
        "ignore": rest,
    }


def _scheme_of(name: str, schemes: dict[str, str], plan: Plan) -> str:
    """Of a module in a storage: its weight's, which a factor of a pair lies below; or that of embedding and head."""
    if (scheme := schemes.get(name) or schemes.get(name.rpartition(".")[0])) is not None:
        return scheme
    assert plan.measured.head is not None, f"{name} is in a storage, and no weight of the plan"
    return plan.measured.head.scheme


def _group(module: Stored, scheme: str) -> dict[str, Any] | None:
    return scheme_named(scheme).config_group(module.matrix[1])


def _fused_pair(module: nn.Module) -> bool:
    """Whether it stands for the first factor of a pair, which has no module of its own."""
    return isinstance(module, FusedMember) and module.second is not None


def _format(formats: Iterable[str]) -> str:
    several = {*formats}
    return several.pop() if len(several) == 1 else _MIXED

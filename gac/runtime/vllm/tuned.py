"""Configs of vLLM's kernel of routed experts for sizes that nobody has tuned: those of the nearest sizes.

vLLM has files of tuned configs by the number of experts and their width, and a plan's sizes have none. In 8 bits its
default is up to 1.4 times as slow as what was tuned for sizes near them; in 16 bits it is about as fast.
"""

import functools
import re
from collections.abc import Callable
from math import log2
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.model_executor.layers.fused_moe import fused_moe

_FILE = re.compile(r"E=(\d+),N=(\d+)(,.*\.json)")
_FARTHEST = 2.0
"""Halvings and doublings of both sizes, added up, up to which configs are taken."""


def use_nearest_configs() -> None:
    """Let the kernel take the configs of the nearest sizes where its own have no file."""
    if not hasattr(fused_moe.get_moe_configs, "exact"):
        fused_moe.get_moe_configs = _nearest_configs(fused_moe.get_moe_configs)


def _nearest_configs(exact: Callable[..., Any]) -> Callable[..., Any]:
    @functools.cache
    def nearest(
        experts: int, width: int, dtype: str | None, block_n: int | None = None, block_k: int | None = None
    ) -> Any:
        block = [block_n, block_k] if block_n and block_k else None
        sizes = nearest_sizes(fused_moe.get_config_file_name(experts, width, dtype, block))
        return exact(*(sizes or (experts, width)), dtype, block_n, block_k)

    nearest.exact = exact  # type: ignore[attr-defined]
    return nearest


def nearest_sizes(name: str) -> tuple[int, int] | None:
    """Return experts and width of the file nearest to one of this name: of the same GPU and dtype; None: none is near.

    Between two as near, the wider one.
    """
    match = _FILE.fullmatch(name)
    if match is None:
        return None
    experts, width = int(match[1]), int(match[2])
    folders = [Path(fused_moe.__file__).parent / "configs", envs.VLLM_TUNED_CONFIG_FOLDER]
    files = [_FILE.fullmatch(path.name) for folder in folders if folder for path in Path(folder).glob("E=*.json")]
    sizes = {(int(each[1]), int(each[2])) for each in files if each and each[3] == match[3]}
    distances = {each: abs(log2(each[0] / experts)) + abs(log2(each[1] / width)) for each in sizes}
    best = min(sorted(distances, reverse=True), key=distances.__getitem__, default=None)
    return best if best is not None and distances[best] <= _FARTHEST else None

"""Tensors of a checkpoint put into its model without transformers' loader, where they are just what the model holds.

The loader compiles a pattern for every tensor, and a thousand more for names of other versions, before it reads a byte.
That takes longer than the bytes of a compressed model do. Where anything differs, no model is made here: transformers
loads it, and says what is wrong.
"""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gac.runtime.stored import Stored

Places = dict[str, tuple[nn.Module, str]]
"""By name in the model, the module that holds a tensor, and the tensor's name in it."""
_FOR_THE_LOADER = ("quantization_config", "fusion_config")  # of a config: what changes modules before they are filled
_HUB = dict.fromkeys(("cache_dir", "proxies", "token", "revision")) | {"force_download": False, "subfolder": ""}


def empty_model(model_class: Any, config: Any, dtype: torch.dtype | str, tensors: Mapping[str, Tensor]) -> Any:
    """The model with its own tensors on the meta device; None: the given ones are not just what it holds.

    Args:
        config: it stays as it is.
        dtype: ``auto`` is the config's.
    """
    dtype = config.dtype if dtype == "auto" else dtype
    if not isinstance(dtype, torch.dtype) or any(getattr(config, name, None) for name in _FOR_THE_LOADER):
        return None
    with torch.device("meta"):
        model = model_class._from_config(copy.deepcopy(config), dtype=dtype)
    if model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict or not _fit(_places(model), tensors):
        return None
    for module in model.modules():
        _make_buffers(model, module)
    return model.eval()


def fill(model: Any, tensors: dict[str, Tensor], source: Path) -> None:
    """Give a model that ``empty_model`` made these tensors, all on one device; it is then as transformers loads it.

    Args:
        tensors: they are taken out one by one, so that none is there in two dtypes for long.
        source: its directory, where its generation config is.
    """
    device = next(iter(tensors.values())).device
    for name, (module, own) in _places(model).items():
        given = tensors.pop(name).to(getattr(module, own).dtype)
        if own in module._buffers:
            module._buffers[own] = given
        else:
            module._parameters[own] = nn.Parameter(given, given.is_floating_point())
    for module in model.modules():
        for own in _made(module):
            module._buffers[own] = module._buffers[own].to(device)
    model.tie_weights(recompute_mapping=False)
    _mark_as_initialised(model)
    model.config.name_or_path = str(source)
    model.adjust_generation_fn(None, False, None, source, local_files_only=True, trust_remote_code=False, **_HUB)


def _places(model: Any) -> Places:
    """Where the tensors of a checkpoint go; of those that are tied, there is one in it."""
    found: Places = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        found |= {prefix + own: (module, own) for own in _held(module)}
    return {name: place for name, place in found.items() if name not in model.all_tied_weights_keys}


def _held(module: nn.Module) -> Iterator[str]:
    """The names of its own tensors that files have."""
    for held in (module._parameters, module._buffers):
        yield from (
            own for own, one in held.items() if one is not None and own not in module._non_persistent_buffers_set
        )


def _made(module: nn.Module) -> list[str]:
    """The names of its own tensors that no file has: its architecture makes them from the config."""
    return [own for own in module._non_persistent_buffers_set if module._buffers[own] is not None]


def _fit(places: Places, tensors: Mapping[str, Tensor]) -> bool:
    """Whether there is one for each place, of the same shape and dtype; what is no stored matrix may be cast."""
    return places.keys() == tensors.keys() and all(_fits(*place, tensors[name]) for name, place in places.items())


def _fits(module: nn.Module, own: str, given: Tensor) -> bool:
    due = getattr(module, own)
    is_stored = isinstance(module, Stored) and own in module.names
    is_cast = not is_stored and due.is_floating_point() and given.is_floating_point()
    return given.shape == due.shape and (given.dtype == due.dtype or is_cast)


@torch.no_grad()
def _make_buffers(model: Any, module: Any) -> None:
    """Give it those tensors that no file has. Others are on the meta device, where setting them does nothing."""
    if made := _made(module):
        for own in made:
            module._buffers[own] = torch.empty_like(module._buffers[own], device="cpu")
        model._init_weights(module)


def _mark_as_initialised(model: nn.Module) -> None:
    """Whatever transformers adds to the model later, an adapter, say, it initialises what has no such mark."""
    for module in model.modules():
        for one in (module, *module._parameters.values(), *module._buffers.values()):
            if one is not None:
                vars(one)["_is_hf_initialized"] = True

"""A model and its modules: run, listened to, frozen, and replaced by others."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gac.models.examples import Example, TokenWindow
from gac.models.families import family_of


def swap_in(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    for name, module in modules.items():
        model.set_submodule(name, module)


def cast(model: Any, dtype: torch.dtype) -> None:
    """Cast a model in place, but for buffers that no file has, such as rotary frequencies."""
    buffers = [
        (module, name, module._buffers[name])
        for module in model.modules()
        for name in module._non_persistent_buffers_set
    ]
    model.to(dtype)
    for module, name, buffer in buffers:
        module._buffers[name] = buffer
    model.config.dtype = dtype


@contextmanager
def swapped(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    before = {name: model.get_submodule(name) for name in modules}
    try:
        swap_in(model, modules)
        yield
    finally:
        swap_in(model, before)


@contextmanager
def listening(model: nn.Module, hooks: Mapping[str, Callable[..., None]]) -> Iterator[None]:
    with ExitStack() as registered:
        for name, hook in hooks.items():
            registered.enter_context(model.get_submodule(name).register_forward_hook(hook))
        yield


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """In eval mode and with no parameter that requires a gradient, and as it was on exit."""
    training = {module: module.training for module in model.modules()}
    required = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    try:
        model.eval()
        for parameter in required.values():
            parameter.requires_grad_(False)
        yield
    finally:
        for module, was in training.items():
            module.training = was
        now = dict(model.named_parameters())
        for name, before in required.items():
            for parameter in {before, now.get(name, before)}:  # streamed weights are other parameters by now
                with torch.inference_mode(parameter.is_inference()):  # the caller ran the model in it
                    parameter.requires_grad_(True)


def last_norm_of(model: nn.Module) -> str | None:
    """Name of the norm before the head; None: it has no gains (OLMo), or is missing (OPT with norms behind)."""
    name = family_of(model.config).last_norm
    parent, _, attribute = name.rpartition(".")
    norm = getattr(model.get_submodule(parent), attribute)
    return name if getattr(norm, "weight", None) is not None else None


def input_device(model: Any) -> torch.device:
    embedding: nn.Module = model.get_input_embeddings()
    device = next(chain(embedding.parameters(), embedding.buffers())).device
    hook: Any = getattr(embedding, "_hf_hook", None)  # of accelerate, where the weights lie elsewhere
    return torch.device(hook.execution_device) if device.type == "meta" and hook is not None else device


def run_on(model: Any, ids: torch.Tensor | Example) -> Any:
    """Outputs of a causal LM, without a cache, for token ids ``(windows, tokens)``, or for an example with its images.

    Pixels are cast to the model's dtype.
    """
    device = input_device(model)
    if isinstance(ids, Example):
        more = ids.inputs.items()
        inputs = {name: each.to(device, model.dtype if each.is_floating_point() else None) for name, each in more}
        return model(input_ids=ids.ids[None].to(device), use_cache=False, **inputs)
    return model(input_ids=ids.to(device), use_cache=False)


def run_window(model: Any, window: TokenWindow) -> Any:
    """Outputs of a causal LM for one window."""
    return run_on(model, window if isinstance(window, Example) else window[None])


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that are free, with those that PyTorch holds and does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + unused)


def training_autocast(model: Any) -> torch.autocast:
    """Autocast to bfloat16 on a GPU and for 16-bit models; float32 models on a CPU keep their dtype."""
    kind = input_device(model).type
    enabled = kind == "cuda" or model.dtype != torch.float32
    return torch.autocast(kind, torch.bfloat16, enabled=enabled, cache_enabled=False)  # a cache would miss steps


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which autocast computes with a tensor; its own if autocast is off."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype

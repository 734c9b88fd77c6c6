"""Checks of a dense model whose weights are to be replaced and saved."""

import copy
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from gac.core.errors import CheckpointError, ModelError
from gac.models.digests import read_parameter
from gac.models.families import family_of
from gac.models.loading import UNREADABLE
from gac.models.quantised import ORIGINAL, SCALES
from gac.runtime.architectures import factory_of, generating_class
from gac.runtime.storage.embeddings import embeddings_of


def check_plain(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Refuse a dense model that cannot be compressed and saved, before anything is measured.

    Args:
        names: the linear weights that may be replaced, such as ``model.layers.0.self_attn.q_proj``.

    Raises:
        ModelError: the model is quantised, has an adapter, hooks or other parameters than its architecture, a weight
            is no plain matrix, shares its memory with another one, or is not finite; or a config is invalid.
        CheckpointError: its class is not transformers' own causal LM of its architecture.
    """
    check_class(model)
    _check_parameters(model)
    for name in names:
        _check_linear(model, name)
    _check_hooks(model)
    _check_memory(model)
    _check_configs(model)
    check_finite(model)


def check_class(model: PreTrainedModel) -> None:
    """Refuse a dense model that is not transformers' own whole model of its architecture, by a CheckpointError."""
    kind: Any = type(model.config)
    dense = generating_class(kind) or PreTrainedModel
    if type(model) is not dense:
        expected, remedy = f"a {dense.__name__} of transformers", f"Load it with {factory_of(kind).__name__}."
        raise CheckpointError(f"a {type(model).__name__}", expected, remedy)


def _check_parameters(model: PreTrainedModel) -> None:
    architecture: Any = type(model)
    with torch.device("meta"):
        fresh = architecture._from_config(copy.deepcopy(model.config))
    expected, actual = _shapes(fresh), _shapes(model)
    kind = type(model).__name__
    if extra := sorted(actual.keys() - expected.keys(), key=lambda name: ("lora_" not in name, name)):
        others = f" and {len(extra) - 1} other parameters" if len(extra) > 1 else ""
        raise ModelError(
            f"a {kind} with {extra[0]}{others} beside the weights of its architecture",
            "these weights alone: no adapter, quantiser or parametrisation",
            _remedy(model, extra),
        )
    if missing := sorted(expected.keys() - actual.keys()):
        remedy = _remedy(model, [name for name, _ in model.named_buffers()])
        raise ModelError(f"a {kind} without {missing[0]} ({len(missing)} missing)", "every weight", remedy)
    for name, shape in expected.items():
        if actual[name] != shape:
            expectation = f"{tuple(shape)}, as its config says"
            raise ModelError(f"{name} has shape {tuple(actual[name])}", expectation, "Correct the model or its config.")


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: values.shape for name, values in model.named_parameters(remove_duplicate=False)}


def _remedy(model: Any, names: Iterable[str] = ()) -> str:
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        return "Merge the adapter into the weights first (merge_and_unload of peft)."
    if getattr(model, "is_quantized", False) or any(SCALES.search(name) for name in names):
        return ORIGINAL
    if any("_orig_mod" in name.split(".") for name in names):
        return "Compress the model before torch.compile."
    return "Merge or remove what was added, or load the model with AutoModelForCausalLM."


def _check_linear(model: nn.Module, name: str) -> None:
    """Refuse a module that computes anything but ``x W^T + b`` with a W of 16 bits or more."""
    module = model.get_submodule(name)
    weight: Any = module.weight
    kinds = [kind for kind in (type(module), type(weight.data)) if kind not in (nn.Linear, Conv1D, torch.Tensor)]
    kinds = [kind for kind in kinds if kind.__name__ != "FalconLinear"]  # which computes what nn.Linear does
    if kinds:
        raise ModelError(f"{name} is a {kinds[0].__name__}", "a plain linear weight: an nn.Linear", _remedy(model))
    if not weight.is_floating_point() or weight.element_size() < 2:
        raise ModelError(f"{name} has weights in {weight.dtype}", "16 or 32 bits a number", ORIGINAL)
    offloaded = hasattr(module, "_hf_hook")  # accelerate replaces ``forward`` to bring the weights
    if _hooks(module) or ("forward" in vars(module) and not offloaded):
        expected = "a plain linear weight: whatever replaces it has no hooks"
        raise ModelError(f"{name} has a forward hook, or a forward of its own", expected, _WITHOUT_HOOKS)


def _check_hooks(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if any(getattr(hook, "__module__", "").partition(".")[0] not in _HOOKING for hook in _hooks(module)):
            expected = "a model without hooks, which are not saved"
            raise ModelError(f"{name or 'the model'} has a forward hook", expected, _WITHOUT_HOOKS)


def _hooks(module: nn.Module) -> list[Any]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


_WITHOUT_HOOKS = "Remove the hooks, or compress a freshly loaded model."
_HOOKING = ("accelerate", "peft", "transformers")
"""Packages whose hooks record outputs, turn gradients on or bring weights, and leave values as they are."""


def _check_memory(model: PreTrainedModel) -> None:
    last: tuple[int, int, int, str] = (0, 0, 0, "")
    for span in sorted(_spans(model)):
        if span[0] == last[0] and span[1] < last[2]:
            raise ModelError(
                f"{last[3]} and {span[3]} share their memory",
                "parameters of their own; only embedding and head may be one tensor",
                f"Give {span[3]} a copy of its own: nn.Parameter(values.detach().clone()).",
            )
        last = span


def _spans(model: Any) -> Iterator[tuple[int, int, int, str]]:
    ends = [(f"{name}.weight", module.weight) for name, module in embeddings_of(model).items()]
    tied = ends[-1][0] if ends[0][1] is ends[-1][1] and len(ends) > 1 else None
    for name, values in model.named_parameters(remove_duplicate=False):
        if values.is_meta or not values.numel() or name == tied:
            continue
        size, steps = values.element_size(), zip(values.shape, values.stride(), strict=True)
        first = values.storage_offset() * size
        length = sum((count - 1) * step for count, step in steps) + 1
        yield values.untyped_storage().data_ptr(), first, first + length * size, name


def _check_configs(model: Any) -> None:
    for config in (model.config, model.generation_config):
        try:
            with TemporaryDirectory() as folder:
                config.save_pretrained(folder)
        except UNREADABLE as failure:
            kind = type(config).__name__
            problem = f"an invalid {kind} ({' '.join(str(failure).split())})"
            name = "generation_config" if config is model.generation_config else "config"
            remedy = f"Correct model.{name}, which is read from {name}.json."
            raise ModelError(problem, "one that transformers can save", remedy) from failure


def is_in_memory(model: nn.Module) -> bool:
    return _offloaded(model) is None


def _offloaded(model: nn.Module) -> str | None:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return next((name for name, values in tensors if values.is_meta), None)


def check_in_memory(
    model: nn.Module,
    option: str = "",
    use: str = "where its smaller one can take its place",
    otherwise: str = " to compress it; a plan can be made as it is",
) -> None:
    """Refuse a model with weights that accelerate has offloaded, by a ModelError that names the first.

    Parts of its message: the ``option`` that needs them, its ``use`` of weights, and what to do ``otherwise``.
    """
    if name := _offloaded(model):
        raise ModelError(
            f"{name} is offloaded by its device_map{option}",
            f"every weight in the memory of a device, {use}",
            f'Load the model with device_map="cpu"{otherwise}.',
        )


def dtypes_of(model: Any) -> dict[torch.dtype, str]:
    """The dtypes of a model's weights, each with the name of the first; without those that transformers keeps apart.

    Such are routers and their biases, in float32 whatever the model is loaded in.
    """
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    experts = family_of(model.config).experts
    kept |= {f".{experts.router}."} if experts else set()
    first: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32 or not any(part in name for part in kept):
            first.setdefault(parameter.dtype, name)
    return first


def check_one_dtype(model: nn.Module) -> None:
    """Refuse a model with several dtypes, by a ModelError: a compressed checkpoint has one."""
    first = dtypes_of(model)
    if len(first) > 1:
        raise ModelError(
            " and ".join(f"{name} in {dtype}" for dtype, name in first.items()),
            "one dtype for all weights",
            "Cast the model to one, as in model.to(torch.bfloat16).",
        )


def check_frequencies(model: nn.Module) -> None:
    """Refuse rotary embeddings with other frequencies than the config's, which is all that is saved of them.

    The ModelError names the first such buffer.
    """
    for path, module in model.named_modules():
        if not hasattr(module, "rope_type") or not hasattr(module, "config"):
            continue
        expected = dict(type(module)(module.config).named_buffers())
        for name, values in module.named_buffers():
            changing = re.search("dynamic|longrope", str(module.rope_type)) and "original" not in name
            if values.is_meta or changing or name not in expected:
                continue
            # As equal as two devices compute them, in a dtype to which the model may have been cast.
            due, tolerance = expected[name].to(values), 4 * torch.finfo(values.dtype).eps
            if values.shape != due.shape or not torch.allclose(values, due, rtol=tolerance, atol=0):
                raise ModelError(
                    f"{path}.{name}, which is not what the model's config gives",
                    "frequencies that follow from the config, which is all that is saved of them",
                    "Set rope_parameters in the config, and load the model with it.",
                )


def check_finite(model: nn.Module) -> None:
    """Refuse a model with NaN or infinite weights or buffers, by a ModelError that names the first."""
    named = ((name, read_parameter(model, name)) for name, _ in model.named_parameters())
    buffers = ((name, values) for name, values in model.named_buffers() if not values.is_meta)
    for name, values in chain(named, buffers):
        if values.element_size() == 1:
            values = values.float()  # isfinite has no 8-bit kernel
        finite = torch.isfinite(values)
        if not finite.all():
            raise ModelError(
                f"{name} holds {int((~finite).sum()):,} NaN or infinite values of {values.numel():,}",
                "finite weights",
                "Use a sound checkpoint; if this one is float16, load it as bfloat16 or float32.",
            )

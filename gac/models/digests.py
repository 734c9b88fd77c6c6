"""Values of a model's parameters, read back where they are offloaded, and digests of them."""

import hashlib
import importlib.util
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from gac.core.errors import ModelError

_THREADS = 8
_ALIGNING = Lock()  # threads that read two parameters of one module would take them away from each other


def read_parameter(model: nn.Module, name: str) -> torch.Tensor:
    """The values of a parameter, read back where ``device_map`` has offloaded it; a ModelError if it has none."""
    values = model.get_parameter(name).detach()
    if values.is_meta and importlib.util.find_spec("accelerate") is not None:
        from accelerate.utils import align_module_device

        with _ALIGNING, align_module_device(model.get_submodule(name.rpartition(".")[0])):
            values = model.get_parameter(name).detach()
    if values.is_meta:
        raise ModelError(f"{name} is on the meta device", "weights that have values", "Load the model's weights.")
    return values


def model_digest(model: PreTrainedModel, names: Iterable[str]) -> str:
    """SHA-256 of the config, and of the SHA-256 of every parameter in its dtype.

    The model's source, and the config's keys for generation and versions, do not count; tied parameters count once.
    The weights of the modules of these ``names`` come first, in this order.
    """
    config = _essential(json.loads(model.config.to_json_string()))
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    targeted = [f"{name}.weight" for name in names]
    with ThreadPoolExecutor(_THREADS) as pool:
        tied: Any = model.all_tied_weights_keys  # offloaded, tied parameters are no longer one tensor
        untied = {name for name, values in model.named_parameters() if not (values.is_meta and name in tied)}
        order = (*targeted, *sorted(untied.difference(targeted)))
        for of_tensor in pool.map(lambda name: tensor_digest(name, read_parameter(model, name)), order):
            digest.update(of_tensor)
    return digest.hexdigest()


def tensor_digest(name: str, values: torch.Tensor) -> bytes:
    """SHA-256 of a tensor's name, dtype, shape and bytes."""
    digest = hashlib.sha256(f"{name} {values.dtype} {tuple(values.shape)}".encode())
    digest.update(bytes_of(values))
    return digest.digest()


def bytes_of(values: torch.Tensor) -> memoryview:
    # NumPy has no bfloat16, so every dtype is read as bytes.
    return values.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data


_NOT_OF_THE_MODEL = frozenset(
    {
        *("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "unsloth_version"),
        *("output_hidden_states", "output_attentions", "return_dict", "gradient_checkpointing"),
        *("id2label", "label2id", "problem_type"),
    }
)


def _essential(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {
        key: _essential(value)
        for key, value in config.items()
        if key not in _NOT_OF_THE_MODEL and not key.endswith(("name_or_path", "_token_id"))
    }

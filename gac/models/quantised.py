"""Quantised checkpoints: dequantised while they are read where that is exact, else refused by method and producer."""

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers.modeling_utils import load_state_dict

from gac.core.errors import ModelError
from gac.core.untrusted import is_plain_name, read_model_json

logger = logging.getLogger("gac")

ORIGINAL = "Use the checkpoint that it was made from."
SCALES = re.compile(  # names of tensors by which quantisers keep what belongs to a weight, or the weight itself
    r"(_scale(_\w+)?|\.scales?|_scales|zeros?|zero_point|_packed|_shape|g_idx|absmax|quant_map|quant_state\..*|nested_\w+"
    r"|qweight|\bSCB|_amax|_blocks|_quantizer\..*)$"
)

_EXPECTED = (
    "weights in 16 or 32 bits, FP8 in blocks (quant_method 'fp8'), MXFP4 of experts alone ('mxfp4'), or "
    "compressed-tensors of one scheme, which are dequantised as they are read"
)
OF_EXPERTS = "mxfp4"
"""The method that stores routed experts in few bits, and nothing else (gpt-oss)."""
_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files that describe a quantised checkpoint where ``config.json`` does not, with the method that writes each."""
_DENSE = {"F64", "F32", "F16", "BF16", "BOOL", "I64", "float64", "float32", "float16", "bfloat16", "bool", "int64"}
"""Dtypes that dense checkpoints have, as safetensors and PyTorch call them; indices are in 64 bits."""
_CAUSAL_MASK = re.compile(r"\.(attn|attention)\.bias$")
"""Buffers of 8 bits in old checkpoints of GPT-2 and Pythia, which are no weights; transformers does not read them."""
ACTIVATIONS = re.compile(r"(input|output|activation|[qkv])_(scale|zero_point|global_scale)$")
"""Names of tensors by which quantisers keep what belongs to inputs, outputs and the KV cache, and to no weight."""


def quantisation(config: Any, folder: Path) -> dict[str, Any]:
    """The quantisation that a transformers config, or a file in its ``folder``, states; empty if there is none."""
    stated = getattr(config, "quantization_config", None)
    stated = stated or getattr(config.get_text_config(decoder=True), "quantization_config", None)
    if stated:
        return dict(stated if isinstance(stated, Mapping) else stated.to_dict())
    for name, method in _FILES.items():
        if (path := folder / name).is_file():
            fields = read_model_json(path, "a quantisation config", ModelError)
            inner = fields.get("quantization")
            return {"quant_method": method} | (inner if isinstance(inner, dict) else {}) | fields
    return {}


def dequantising(stated: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The ``quantization_config`` with which transformers dequantises a checkpoint as it reads it.

    A ModelError says if no exact dequantisation of what is ``stated`` (by ``quantisation``) is known.
    """
    method, transforms = stated.get("quant_method"), stated.get("transform_config")
    if method not in ("fp8", OF_EXPERTS) and (
        method != "compressed-tensors" or len(_schemes(stated)) != 1 or transforms
    ):
        raise ModelError(f"{name} is quantised: {described(stated)}", _EXPECTED, ORIGINAL)
    logger.info("%s is quantised (%s): its weights are dequantised as they are read", name, described(stated))
    return {**stated, "dequantize": True}


def described(stated: Mapping[str, Any]) -> str:
    """Method, kind, bits and producer of a quantisation, as far as they are stated."""
    producer = stated.get("producer")
    names = {key: stated.get(key) for key in ("quant_algo", "format", "bits", "w_bit", "version")}
    parts = [str(stated.get("quant_method") or "by an unnamed method")]
    parts += [f"{key} {value}" for key, value in names.items() if isinstance(value, str | int)]
    if "config_groups" in stated:
        parts.append(f"{len(_schemes(stated))} schemes")
    if stated.get("transform_config"):
        parts.append("inputs that are transformed (transform_config)")
    if isinstance(producer, Mapping):
        parts.append(f"by {producer.get('name')} {producer.get('version', '')}".strip())
    return ", ".join(parts)


def _schemes(stated: Mapping[str, Any]) -> Mapping[str, Any]:
    schemes = stated.get("config_groups")
    return schemes if isinstance(schemes, Mapping) else {}


def check_stored(folder: Path, stated: Mapping[str, Any], name: str) -> None:
    """Refuse low-bit weights that transformers would not dequantise exactly.

    A ModelError says if no quantisation is ``stated``, a weight has no scale, or blocks do not divide it.
    """
    tensors = {tensor: (dtype, shape) for tensor, dtype, shape in stored(folder)}
    block = (stated.get("weight_block_size", (128, 128)) or ()) if stated.get("quant_method") == "fp8" else ()
    narrow = (tensor for tensor, (dtype, _) in tensors.items() if dtype not in _DENSE)
    for tensor in (tensor for tensor in narrow if not _CAUSAL_MASK.search(tensor)):
        if not stated:
            scales = sum(bool(SCALES.search(other)) for other in tensors)
            problem = f"{name} stores {tensor} in {tensors[tensor][0]}, has {scales} tensors of scales"
            raise ModelError(f"{problem}, and no config says how it is quantised", _EXPECTED, ORIGINAL)
        stem = tensor.removesuffix("_packed")
        if not stem.endswith(".weight"):
            continue
        scale = tensors.get(f"{stem}_scale_inv", tensors.get(f"{stem}_scale"))
        if scale is None:
            raise ModelError(f"{name} stores {tensor} in {tensors[tensor][0]}, without a scale", _EXPECTED, ORIGINAL)
        shape, grid = tensors[tensor][1], scale[1]
        sizes = zip(shape, grid, block, strict=False)
        if any(length != count * size and (count > 1 or length > size) for length, count, size in sizes):
            expected = f"a multiple of {tuple(block)}: transformers does not dequantise others exactly"
            raise ModelError(f"{name} stores {tensor} of shape {tuple(shape)} in blocks", expected, ORIGINAL)


def stored(folder: Path) -> Iterator[tuple[str, str, list[int]]]:
    """Name, dtype and shape of every tensor in the files of weights that transformers reads, from their headers.

    A ModelError says if the index cannot be read, or names files elsewhere.
    """
    for file in _weight_files(folder):
        if file.endswith(".safetensors"):
            with safe_open(folder / file, framework="pt") as opened:
                for tensor in opened.keys():  # noqa: SIM118  # it cannot be iterated over
                    part = opened.get_slice(tensor)
                    yield tensor, part.get_dtype(), part.get_shape()
        else:
            for tensor, values in load_state_dict(folder / file).items():  # mapped, not read
                yield tensor, str(values.dtype).removeprefix("torch."), list(values.shape)


def _weight_files(folder: Path) -> list[str]:
    for single in ("model.safetensors", "pytorch_model.bin"):
        if (folder / single).is_file():
            return [single]
        if (index := folder / f"{single}.index.json").is_file():
            weights = read_model_json(index, "an index of weights", ModelError).get("weight_map")
            files = set(weights.values()) if isinstance(weights, dict) else set()
            if wrong := next((file for file in files if not is_plain_name(file)), None):
                raise ModelError(
                    f"{index} names the file {str(wrong)[:80]!r}", "files of this directory", "Correct it."
                )
            return sorted(files)
    return []

"""A model that GAC compressed, in plain PyTorch, for ``trust_remote_code=True``. Licence: Apache-2.0.

The key ``gac`` of ``config.json`` names the module of every compressed weight. This file builds transformers' models
with them, from torch and transformers alone. It is not fast: GAC's classes, after ``import gac``, run kernels.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from itertools import product
from math import lcm, prod
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.utils.hub import cached_file

SCHEMA = 3
DOCUMENTS = ("plan.json", "README.md")
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
HEAD_ROWS = 2**13  # rows of a quantised LM head that are in the model's dtype at a time
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes; casts of a model leave them
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # numbers of 4-bit floating point, without their sign
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of every tensor that holds a matrix, by name


# How numbers are stored: the tensors that hold a matrix (rows, columns), the matrix of them, and products with it.
def unpack(words: Tensor, bits: int, columns: int) -> Tensor:
    """Unpack int32 or uint8 ``(rows, words)`` into ``(rows, columns)``: a row is a string of bits, lowest first."""
    size = 8 * words.itemsize
    period = lcm(bits, size) // bits  # numbers after which one begins with a word again
    words = in_parts(words.long() & (1 << size) - 1, period * bits // size)
    words = words | functional.pad(words[..., 1:], (0, 1)) << size  # a number of 3 bits may end in the next word
    bit = torch.arange(period, device=words.device) * bits
    return (words[..., bit // size] >> bit % size & (1 << bits) - 1).flatten(1)[:, :columns]


def dequantise(numbers: Tensor, scale: Tensor, zero: Any, size: int, dtype: torch.dtype) -> Tensor:
    """Return ``scale * (number - zero)``, rounded once: scales ``(rows, groups)``, a zero or ``(rows, groups, 1)``."""
    values = in_parts(numbers, size).float().sub_(zero).mul_(scale.float()[..., None]).to(dtype)
    return values.flatten(1)[:, : numbers.shape[1]].contiguous()


def in_parts(values: Tensor, size: int) -> Tensor:
    """Reshape rows to ``(rows, parts, size)``, the last part padded with zeros."""
    parts = -(-values.shape[1] // size)
    return functional.pad(values, (0, parts * size - values.shape[1])).reshape(len(values), parts, size)


@dataclass(frozen=True)
class PackedIntegers:
    """``scale * (number - zero)`` as ``pack-quantized`` has it; without zero points the zero is ``2 ** (bits - 1)``."""

    bits: int
    group: int | None
    zero: bool
    linear = staticmethod(functional.linear)

    def tensors(self, rows: int, columns: int) -> Layout:
        groups = -(-columns // self.columns_of_group(columns))
        words, words_across = (-(-numbers * self.bits // 32) for numbers in (columns, rows))
        numbers, scale = ((rows, words), torch.int32), ((rows, groups), torch.float16)
        zero: Layout = {"weight_zero_point": ((words_across, groups), torch.int32)} if self.zero else {}
        return {"weight_packed": numbers, "weight_scale": scale, "weight_shape": ((2,), torch.int64)} | zero

    def values(self, tensors: Mapping[str, Tensor], rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        numbers = unpack(tensors["weight_packed"], self.bits, columns)
        zero = unpack(tensors["weight_zero_point"].T, self.bits, rows).T[..., None] if self.zero else 1 << self.bits - 1
        return dequantise(numbers, tensors["weight_scale"], zero, self.columns_of_group(columns), dtype)

    def columns_of_group(self, columns: int) -> int:
        return max(min(self.group or columns, columns), 1)


@dataclass(frozen=True)
class Integers8:
    """``scale * number`` with int8 numbers and a scale a row; inputs are quantised likewise, token by token."""

    number, scale, largest, divisor = torch.int8, torch.float16, 127, 128  # divided, no sum leaves float16's range
    block: ClassVar[int | None] = None  # rows and columns of a weight with one scale; None: those of a row
    nearest: ClassVar[Any] = staticmethod(Tensor.round_)

    def tensors(self, rows: int, columns: int) -> Layout:
        scales = (-(-rows // self.block), -(-columns // self.block)) if self.block else (rows, min(columns, 1))
        return {"weight": ((rows, columns), self.number), "weight_scale": (scales, self.scale)}

    def values(self, tensors: Mapping[str, Tensor], rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        scale = tensors["weight_scale"].repeat_interleave(self.block or 1, 0)[:rows]
        return dequantise(tensors["weight"].float(), scale, 0, self.block or max(columns, 1), dtype)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        numbers, scale = self.quantise(x)
        y = (functional.linear(numbers, weight) * scale).to(x.dtype)
        return y if bias is None else y + bias

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return numbers in the dtype of x ``(..., features)``, and a scale a token ``(..., 1)``."""
        wide = x.float()
        scale = (wide.abs().amax(-1, keepdim=True) / self.largest).clamp_min(2.0**-126)
        return self.nearest(wide / scale).div_(self.divisor).to(x.dtype), scale * self.divisor


class Floats8(Integers8):
    """The same with numbers in 8-bit floating point (e4m3), and scales in bfloat16."""

    number, scale, largest, divisor = torch.float8_e4m3fn, torch.bfloat16, 448, 512

    def nearest(self, x: Tensor) -> Tensor:
        # An eighth of the power of two below. PyTorch's own conversion gives the same, and is slow on a CPU.
        step = (x.view(torch.int32) & 0x7F800000).view(torch.float32).div_(8).clamp_min_(2**-9)
        return x.div_(step).round_().mul_(step)


class Floats8Blocks(Floats8):
    """The same with a float32 scale for each block; inputs are quantised in groups of as many columns."""

    scale, block = torch.float32, 128

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the quantised x in its dtype, multiplied by its scales, and a scale of 1 a token."""
        numbers, scale = super().quantise(in_parts(x.reshape(-1, x.shape[-1]), self.block))
        return (numbers * scale).to(x.dtype).flatten(1)[:, : x.shape[-1]].reshape(x.shape), torch.ones_like(x[..., :1])


@dataclass(frozen=True)
class Floats4:
    """4-bit floating point (e2m1): MXFP4, with scales that are powers of two, or NVFP4, with e4m3 times a number."""

    group: int
    power: bool
    linear = staticmethod(functional.linear)

    def tensors(self, rows: int, columns: int) -> Layout:
        packed, scale = ((rows, -(-columns // size)) for size in (2, self.group))
        kind = torch.uint8 if self.power else torch.float8_e4m3fn
        tensors: Layout = {"weight_packed": (packed, torch.uint8), "weight_scale": (scale, kind)}
        return tensors | ({} if self.power else {"weight_global_scale": ((rows, min(columns, 1)), torch.float32)})

    def values(self, tensors: Mapping[str, Tensor], rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return dequantise(*self.numbers_and_scale(tensors, columns), 0, self.group, dtype)

    def numbers_and_scale(self, tensors: Mapping[str, Tensor], columns: int) -> tuple[Tensor, Tensor]:
        packed, scale = tensors["weight_packed"], tensors["weight_scale"].float()
        numbers = torch.tensor([*E2M1, *(-number for number in E2M1)], device=packed.device)
        scale = torch.exp2(scale - 127) if self.power else scale * tensors["weight_global_scale"]
        return numbers[unpack(packed, 4, columns)], scale


STORAGES: dict[str, Any] = {cls.__name__: cls for cls in (PackedIntegers, Integers8, Floats8, Floats8Blocks, Floats4)}


class Matrix(nn.Module):
    """``y = W x + bias``: W is the parameter ``weight``, or lies in buffers that a storage describes, never cast."""

    def __init__(self, shape: tuple[int, ...], storage: Any, bias: bool = False, **where: Any) -> None:
        super().__init__()
        self.shape, self.storage = shape, storage
        self.bias = nn.Parameter(torch.empty(prod(shape[:-1]), **where)) if bias else None
        if storage is None:
            self.weight = nn.Parameter(torch.empty(shape, **where))
        else:
            for name, (size, dtype) in storage.tensors(prod(shape[:-1]), shape[-1]).items():
                self.register_buffer(name, torch.zeros(size, dtype=dtype, device=where["device"]))

    def values(self, dtype: torch.dtype, rows: Any = slice(None)) -> Tensor:
        """Return the matrix, or some rows of it where rows are stored apart, which they are without zero points."""
        if self.storage is None:
            return self.weight
        tensors = {name: tensor[rows] for name, tensor in self._buffers.items() if name != "weight_shape"}
        return self.storage.values(tensors, len(next(iter(tensors.values()))), self.shape[-1], dtype)

    def forward(self, x: Tensor) -> Any:
        return (self.storage or functional).linear(x, self.values(x.dtype), self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        stored = {id(tensor) for tensor in self.buffers(recurse=False)}

        def move(tensor: Tensor) -> Tensor:
            return fn(tensor.view(INTEGERS[tensor.itemsize])).view(tensor.dtype) if id(tensor) in stored else fn(tensor)

        return super()._apply(move, recurse)


# What a weight is replaced by. x has shape (..., in_features).
def linear(in_features: int, out_features: int, bias: bool = False, storage: Any = None, **where: Any) -> nn.Module:
    """Make an ``nn.Linear``, or a quantised one. Its values, and its bias, are read from files."""
    if storage is None:
        return nn.Linear(in_features, out_features, bias, **where)
    return Matrix((out_features, in_features), storage, bias, **where)


def low_rank(in_features: int, rank: int, out_features: int, bias: bool, **how: Any) -> nn.Module:
    """Make ``y = B (A x) + bias``: A (rank, in) is ``first``, B (out, rank) and the bias are ``second``."""
    first, second = linear(in_features, rank, **how), linear(rank, out_features, bias, **how)
    return nn.Sequential(OrderedDict(first=first, second=second))


def latent(in_features: int, groups: int, rank: int, out_features: int, bits: Any = None, **how: Any) -> nn.Module:
    """Make a pair for each group of key or value heads; ``first(x)`` is the latent that GAC's classes cache."""
    first = linear(in_features, groups * rank, **how | {"bias": False})
    second = BlockLinear((groups, out_features // groups, rank), bits, **how)
    return nn.Sequential(OrderedDict(first=first, second=second))


class BlockLinear(Matrix):
    """``y_g = B_g z_g`` for every group g of latents z, which are quantised to ``bits`` before, and the bias."""

    def __init__(self, shape: tuple[int, ...], bits: int | None, storage: Any = None, **how: Any) -> None:
        super().__init__(shape, storage, **how)
        self.bits = bits

    def forward(self, x: Tensor) -> Tensor:
        if self.bits is not None:
            x = torch.mul(*quantise_latents(x, self.shape[0], self.bits)).flatten(-2).to(x.dtype)
        return multiply_blocks(x, self.values(x.dtype).view(self.shape), self.bias)


def multiply_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the products of each block of x ``(..., blocks * rank)`` with its weight, ``(blocks, rows, rank)``."""
    blocks, rows, rank = weight.shape
    y = torch.bmm(x.reshape(-1, blocks, rank).transpose(0, 1), weight.transpose(1, 2))
    y = y.transpose(0, 1).reshape(*x.shape[:-1], blocks * rows)
    return y if bias is None else y + bias


def quantise_latents(x: Tensor, groups: int, bits: int) -> tuple[Tensor, Tensor]:
    """Return integers ``(..., groups, rank)`` of x ``(..., groups * rank)``, and a bfloat16 scale a token and group."""
    parts, largest = x.reshape(*x.shape[:-1], groups, -1).float(), (1 << bits - 1) - 1
    scale = (parts.abs().amax(-1, keepdim=True) / largest).to(torch.bfloat16).float()
    return (parts / scale.clamp_min(2.0**-126)).round().clamp(-largest, largest), scale


class Heads:
    """The output of a v_proj with shorter heads: attentions call ``v_proj(x).view(*leading, -1, head_dim)``."""

    def __init__(self, features: Tensor, length: int) -> None:
        self.features, self.length = features, length

    def view(self, *shape: Any) -> Tensor:
        return self.features.view(*(shape[0] if len(shape) == 1 else shape)[:-1], self.length)  # not the head_dim given


class ValueLinear(Matrix):
    """A v_proj with ``heads`` value heads of ``length``."""

    def __init__(self, in_features: int, heads: int, length: int, storage: Any = None, **how: Any) -> None:
        super().__init__((heads * length, in_features), storage, **how)
        self.length = length

    def forward(self, x: Tensor) -> Heads:
        return Heads(super().forward(x), self.length)


class Absent(nn.Module):
    """A weight of a skipped block: zeros ``(..., out)``, and no parameters."""

    def __init__(self, in_features: int, out_features: int, **how: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.out_features)


class Constant(Absent):
    """The output weight of a skipped block, which writes the same ``bias (out,)`` for every token."""

    def __init__(self, in_features: int, out_features: int, bias: bool, storage: Any = None, **where: Any) -> None:
        super().__init__(in_features, out_features)
        self.bias = nn.Parameter(torch.empty(out_features, **where))

    def forward(self, x: Tensor) -> Tensor:
        return self.bias.expand(*x.shape[:-1], -1)


class SkippedBlock(nn.Module):
    """An attention or MLP that returns what its output weight writes, zeros or a constant, and caches nothing."""

    def __init__(self, block: nn.Module, output: str, attention: bool) -> None:
        super().__init__()
        kept = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "training")
        vars(self).update({name: vars(block)[name] for name in kept}, output=output, attention=attention)

    def forward(self, *args: Any, **named: Any) -> Any:
        y = self.get_submodule(self.output)(args[0] if args else named["hidden_states"])
        return (y, None) if self.attention else y  # attentions return their weights too


def resize(dense: Any, experts: int, width: int | None = None) -> None:
    """Give a router, or routed experts, room for fewer of them, of ``width`` neurons. Values are read from files."""
    transposed, count = getattr(dense, "is_transposed", False), dense.num_experts
    neurons = 1 if width is None else dense.down_proj.shape[1 if transposed else -1]
    for part, kind in product((dense, *dense._modules.values()), ("_parameters", "_buffers")):
        rows = vars(part)[kind] = dict(vars(part)[kind])
        for name, old in ((name, old) for name, old in rows.items() if old is not None):
            shape, down = [*old.shape], name.startswith("down_proj")
            shape[shape.index(count)] = experts
            if width is not None and name != "down_proj_bias":
                axis = 1 if down == transposed else -1
                shape[axis] = old.shape[axis] * width // neurons
            rows[name] = nn.Parameter(old.new_empty(shape)) if kind == "_parameters" else old.new_zeros(shape)
    dense.num_experts = experts


class StoredExperts(nn.Module):
    """Routed experts whose matrices, one above the other, lie in a storage: they run on the values of a layer."""

    kind: Any = Matrix

    def __init__(self, storage: Any, dense: Any) -> None:
        super().__init__()
        self.plain, self.is_transposed = (copy(dense),), getattr(dense, "is_transposed", False)  # no submodule
        for name, old in dense._parameters.items():
            if old.dim() < 3:
                self.register_parameter(name, old)
            else:
                shape = tuple((old.mT if self.is_transposed else old).shape)
                self.add_module(name, self.kind(shape, storage, device=old.device))
        vars(self.plain[0])["_parameters"] = {name: old.to("meta") for name, old in dense._parameters.items()}
        self.train(dense.training)

    def forward(self, x: Tensor, *routing: Any, **options: Any) -> Any:
        matrices: Any = self._modules.items()
        values = {name: matrix.values(x.dtype).view(matrix.shape) for name, matrix in matrices}
        values = {name: each.mT.contiguous() for name, each in values.items()} if self.is_transposed else values
        vars(experts := copy(self.plain[0]))["_parameters"] = {**self._parameters, **values}
        return experts(x, *routing, **options)


class StoredEmbedding(Matrix):
    """A quantised embedding. Gemma's multiply what they look up by a number."""

    def __init__(self, storage: Any, dense: Any) -> None:
        super().__init__(tuple(dense.weight.shape), storage, device=dense.weight.device)
        self.dtype, self.factor = dense.weight.dtype, float(getattr(dense, "scalar_embed_scale", 1.0))

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.values(self.dtype, ids.flatten()).view(*ids.shape, -1)
        return rows * torch.tensor(self.factor, dtype=rows.dtype, device=rows.device)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=next(self.buffers()).device)).dtype
        return super()._apply(fn, recurse)


class StoredHead(Matrix):
    """A quantised LM head, with a matrix of its own or the embedding's. Some of its rows are computed at a time."""

    def __init__(self, storage: Any, dense: nn.Linear, embedding: StoredEmbedding | None) -> None:
        if embedding is None:
            super().__init__(tuple(dense.weight.shape), storage, device=dense.weight.device)
        else:
            nn.Module.__init__(self)
        self.bias, self.out_features, self._tied = dense.bias, dense.out_features, (embedding,)  # a tuple: no submodule

    def forward(self, x: Tensor) -> Tensor:
        matrix, parts = self._tied[0] or self, []
        for rows in (slice(start, start + HEAD_ROWS) for start in range(0, self.out_features, HEAD_ROWS)):
            bias = None if self.bias is None else self.bias[rows]
            parts.append(matrix.storage.linear(x, matrix.values(x.dtype, rows).to(x.device), bias))
        return torch.cat(parts, -1)


MODULES: dict[str, Any] = {"Linear": linear, "LowRankLinear": low_rank, "LatentLinear": latent}
MODULES |= {"RoundedLatentLinear": latent, "ValueLinear": ValueLinear, "Absent": Absent, "Constant": Constant}
MODULES["RoundedLinear"] = lambda bits, **how: linear(**how)  # GAC's classes cache its outputs in so many bits


# The model: transformers' own architecture, in which the modules above replace linear layers.
def storage_of(described: dict[str, Any]) -> Any:
    """Return what stores the numbers of a module; None: the module itself does, in the model's dtype."""
    return STORAGES[described["storage"]](**described["options"]) if "storage" in described else None


def skip_block(model: Any, block: str, output: str, attention: bool, norms: Iterable[str]) -> None:
    """Skip an attention or MLP, and the norms that only it reads; all keep their parameters."""
    model.set_submodule(block, SkippedBlock(model.get_submodule(block), output, attention))
    for name in norms:
        identity = nn.Identity()
        identity._parameters.update(model.get_submodule(name)._parameters)
        model.set_submodule(name, identity)


class CompressedConfig:
    """A config that renames ``quantization_config``, which is for other readers: transformers must not read it."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        values, layout = dict(config_dict), config_dict.get("quantization_config")
        if isinstance(layout, dict) and layout.get("quant_method") == "compressed-tensors":
            values["compression_config"] = values.pop("quantization_config")
        if (manager := sys.modules.get("transformers.cli.serving.model_manager")) is not None:
            names = values.get("architectures")  # `transformers serve` looks for them in transformers
            for name in (each for each in (names if isinstance(names, list) else ()) if str(each).startswith("Gac")):
                setattr(manager.transformers, name, getattr(sys.modules[cls.__module__], name))
        return super().from_dict(values, **options)

    def to_dict(self) -> dict[str, Any]:
        return {key.replace("compression_config", "quantization_config"): of for key, of in super().to_dict().items()}


class CompressedModel:
    gac_files: dict[str, str]  # the texts of its plan and its card, by the names of their files
    is_custom_code = staticmethod(lambda: False)  # so that transformers computes the buffers that no file has

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        if config._attn_implementation == "vllm":
            raise ValueError("attention of vLLM; expected one in transformers. Or pip install gpu-aligned-compression.")
        super().__init__(config, *args, **options)
        if getattr(config, "gac", None) is not None:
            self._replace_modules(config.gac)

    def _replace_modules(self, header: dict[str, Any]) -> None:
        if header.get("schema_version") != SCHEMA:
            raise ValueError(f"config.json, key gac: schema_version {header.get('schema_version')}; expected {SCHEMA}.")
        prefix = f"{self.base_model_prefix}." if self.base_model is self else ""  # of names in a causal LM
        for name, described in header["modules"].items():
            path, dense = name.removeprefix(prefix), self.get_submodule(name.removeprefix(prefix))
            if described["module"] in ("Router", "Experts"):
                resize(dense, **described["sizes"])
                if "storage" in described:
                    self.set_submodule(path, StoredExperts(storage_of(described), dense))
                continue
            how = {"bias": dense.bias is not None, "device": dense.weight.device, "dtype": dense.weight.dtype}
            make = MODULES[described["module"]]
            self.set_submodule(path, make(**described["sizes"], storage=storage_of(described), **how))
            self.get_submodule(path.rpartition(".")[0])._is_hf_initialized = True  # GPT-2 initialises weights by name
        if (described := header.get("head")) is not None:
            names = {module: name for name, module in self.named_modules()}
            dense, head, storage = self.get_input_embeddings(), self.get_output_embeddings(), storage_of(described)
            self.set_submodule(names[dense], embedding := StoredEmbedding(storage, dense))
            if head is not None:
                self.set_submodule(names[head], StoredHead(storage, head, embedding if described["tied"] else None))
        for block in header.get("skipped", ()):
            norms = [name.removeprefix(prefix) for name in block["norms"]]
            skip_block(self, block["block"].removeprefix(prefix), block["output"], block["attention"], norms)

    @classmethod
    def from_pretrained(cls, source: Any, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """Load a checkpoint; missing weights are an error, not random numbers."""
        if options.get("tp_plan") is not None:
            raise ValueError("tp_plan needs GAC: install gpu-aligned-compression, and import gac.")
        model, report = super().from_pretrained(source, *args, output_loading_info=True, **options)
        if wrong := sorted(map(str, report["missing_keys"] | report["mismatched_keys"])):
            raise ValueError(f"{source}: {wrong[0]} is missing or of another shape than config.json describes.")
        model.gac_files = read_documents(source, options)
        return (model, report) if output_loading_info else model

    def save_pretrained(self, directory: Any, *args: Any, **options: Any) -> None:
        """Save the model with its plan, its card and this file; tensors have the names of its modules."""
        names = {auto: str(name).rpartition("--")[2] for auto, name in getattr(self.config, "auto_map", {}).items()}
        self.config.auto_map = {auto: name for auto, name in names.items() if name.startswith("modeling_gac.")}
        super().save_pretrained(directory, *args, **{"save_original_format": False} | options)
        if not getattr(self, "_hf_peft_config_loaded", False):  # then transformers saves the adapter alone
            self._write_companions(Path(directory))

    def _write_companions(self, directory: Path) -> None:
        for name, text in getattr(self, "gac_files", {}).items():
            Path(directory, name).write_text(text, encoding="utf-8")
        Path(directory, "modeling_gac.py").write_bytes(Path(__file__).read_bytes())
        Path(directory, "gac_digests.json").unlink(missing_ok=True)  # GAC writes digests; old ones are of other files

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        reads_itself = (getattr(self.config, "gac", None) or {}).get("head") is not None  # a quantised head does
        return {} if reads_itself else super().get_expanded_tied_weights_keys(all_submodels)


def read_documents(source: Any, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of those ``DOCUMENTS`` that a checkpoint has, by name."""
    hub = {key: options[key] for key in HUB_OPTIONS if key in options}
    paths = {name: cached_file(source, name, **hub, _raise_exceptions_for_missing_entries=False) for name in DOCUMENTS}
    return {name: Path(path).read_text("utf-8") for name, path in paths.items() if path is not None}


def __getattr__(name: str) -> Any:
    """Make ``GacLlamaConfig``, ``GacLlamaModel``, ``GacLlamaModelOfExaoneConfig``, and their like."""
    dense_name, *other = name.removeprefix("Gac").split("Of")  # a class has its own config, unless it is named
    dense: Any = getattr(transformers, dense_name, None) if name.startswith("Gac") else None
    config: Any = getattr(transformers, other[0], None) if other else getattr(dense, "config_class", dense)
    if not getattr(config, "model_type", None):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    mixin, body = CompressedConfig, {"model_type": f"gac_{config.model_type}"}
    if config is not dense:
        mixin, body = CompressedModel, {"config_class": getattr(sys.modules[__name__], f"Gac{config.__name__}")}
    return globals().setdefault(name, type(name, (mixin, dense), body | {"__module__": __name__}))

"""The key ``gac`` of ``config.json``: the modules that it describes, built in the place of dense weights."""

from collections.abc import Sequence
from typing import Any

import msgspec
from torch import nn
from transformers.pytorch_utils import Conv1D

from gac.runtime.contract import SCHEMA
from gac.runtime.finish import Description, QuantisedInputs, Skipped
from gac.runtime.fusion.shared_gemm import can_share
from gac.runtime.modules import KINDS, resized
from gac.runtime.plain.modeling_gac import Absent
from gac.runtime.storage.base import Storage
from gac.runtime.storage.embeddings import replace_embeddings
from gac.runtime.storage.experts import StoredExperts
from gac.runtime.storage.modules import STORAGES, store_in

HEAD = "head"  # the member that says how embedding and head are quantised, where they are

QUANTISED_INPUTS = "rounded"  # the member that says which norms make the inputs of weights that quantise them


class Stored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The storage of a module's numbers: its name and its options."""

    scheme: str = ""
    storage: str | None = None
    options: dict[str, int | bool | str | None] = {}


class Module(Stored, frozen=True, kw_only=True):
    """The module of a weight, and its sizes; form, dim and scheme are those of the plan."""

    form: str = ""
    dim: int = 0
    module: str = ""
    sizes: dict[str, int] = {}


class Head(Stored, frozen=True, kw_only=True):
    """Embedding and LM head; tied: they have one matrix."""

    tied: bool


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The key; ``plan`` and ``digest`` are those of ``gac.checkpoint.header``."""

    schema_version: int
    plan: str = ""
    digest: str = ""
    decode_kernel: Any = None  # written by every version; none reads it since the option is gone
    modules: dict[str, Module]
    fused: list[list[str]] = []
    skipped: list[Skipped] = []
    rounded: list[QuantisedInputs] = []
    head: Head | None = None


def header_of(config: Any) -> Header | None:
    """Read the key of a config; None where it has none. A ValueError names a member that is wrong, or its version."""
    header = getattr(config, "gac", None)
    if header is None:
        return None
    version = header.get("schema_version") if isinstance(header, dict) else header
    if version != SCHEMA:
        raise _wrong(f"schema_version is {version!r}", f"{SCHEMA}. Open it with the version of GAC that wrote it")
    try:
        return msgspec.convert(header, Header)
    except msgspec.ValidationError as failure:
        raise ValueError(f"config.json, key gac: {str(failure).lower()}.") from failure


def replace_weights(model: Any, config: Any) -> None:
    """Put the modules that the config describes in the place of dense weights.

    A ValueError names a member that is wrong, or a weight that the model does not have.
    """
    header = header_of(config)
    if header is None:
        return
    modules = dict(model.named_modules())
    for name, described in header.modules.items():
        name = name_in(model, name)
        dense: Any = modules.get(name)
        routes = described.module in ("Router", "Experts")
        if not (hasattr(dense, "num_experts") if routes else isinstance(dense, nn.Linear | Conv1D)):
            raise _wrong(
                f"modules names {name!r}", f"{'routed experts' if routes else 'a linear weight'} of this model"
            )
        holder, _, attribute = name.rpartition(".")
        setattr(modules[holder], attribute, _module(name, dense, described))
        # Some architectures (GPT-2) initialise a weight through the module that holds it, which no longer finds it.
        modules[holder]._is_hf_initialized = True
    if header.head is not None:
        storage = storage_of(HEAD, header.head)
        if storage is None:
            raise _wrong(f"{HEAD} has no storage", f"one of {', '.join(STORAGES)}")
        for name, module in replace_embeddings(model, storage, header.head.tied).items():
            model.set_submodule(name, module)


def description_of(model: Any, config: Any) -> Description:
    """Return how the config says that a model with its modules runs; a ValueError names one that is wrong."""
    header = header_of(config)
    if header is None:
        return Description()
    modules = dict(model.named_modules())
    fused = [_names_in(model, names) for names in header.fused]
    for names in fused:
        if not names or not can_share([modules.get(name) for name in names]):
            raise _wrong(f"fused has {names!r}", "lists of names of linear weights in one storage")
    for block in header.skipped:
        block["block"], block["norms"] = name_in(model, block["block"]), _names_in(model, block["norms"])
        module = modules.get(block["block"])
        weights = [child for child in module.children() if hasattr(child, "in_features")] if module else []
        is_absent = bool(weights) and all(
            isinstance(weight, Absent) for weight in [*weights, getattr(module, block["output"], None)]
        )
        if not is_absent or not all(name in modules for name in block["norms"]):
            raise _wrong(f"skipped has {block!r}", "an attention or MLP whose weights are Absent, and its norms")
    for norm in header.rounded:
        norm["by"], norm["readers"] = name_in(model, norm["by"]), _names_in(model, norm["readers"])
        readers = [modules.get(name) for name in norm["readers"]]
        if norm["by"] not in modules or not readers or not all(hasattr(reader, "in_features") for reader in readers):
            raise _wrong(f"{QUANTISED_INPUTS} has {norm!r}", "names of a norm and of linear weights")
    return Description(fused, header.skipped, header.rounded)


def name_in(model: Any, name: str) -> str:
    """Return a module's name in this model, of its name in the causal LM."""
    return name.removeprefix(f"{model.base_model_prefix}.") if model.base_model is model else name


def _names_in(model: Any, names: Sequence[str]) -> list[str]:
    return [name_in(model, name) for name in names]


def _module(name: str, dense: Any, described: Module) -> nn.Module:
    if described.module not in KINDS:
        raise _wrong(f"{name}.module is {described.module!r}", f"one of {', '.join(KINDS)}")
    kind, names = KINDS[described.module]
    _check_members(f"{name}.sizes", described.sizes, names)
    routes = kind is resized
    largest = max(dense.num_experts, *next(dense.parameters()).shape) if routes else max(dense.weight.shape)
    for size, value in described.sizes.items():
        if not 1 <= value <= largest:
            raise _wrong(f"{name}.sizes.{size} is {value!r}", f"an integer from 1 to {largest}")
    if routes:
        module: nn.Module = kind(dense, **described.sizes)
    else:
        where = {"device": dense.weight.device, "dtype": dense.weight.dtype}
        module = kind(**described.sizes, bias=dense.bias is not None, **where)
    storage = storage_of(name, described)
    # A random model has values; weights that are read from files are on the meta device until then.
    if not next(dense.parameters()).is_meta:
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.02)
    if storage is None or not routes:
        return module if storage is None else store_in(storage, module)
    if described.module != "Experts":
        raise _wrong(f"{name}.storage is {described.storage!r}", "none: a router has its numbers as they are")
    return StoredExperts(storage, module)


def storage_of(name: str, described: Stored) -> Storage | None:
    """Return what holds the matrices of a module; None: the module itself."""
    if described.storage is None:
        return None
    if described.storage not in STORAGES:
        raise _wrong(f"{name}.storage is {described.storage!r}", f"one of {', '.join(STORAGES)}")
    kind, names = STORAGES[described.storage]
    _check_members(f"{name}.options", described.options, names)
    try:
        return kind(**described.options)
    except ValueError as failure:
        value = f"{name}.options is {described.options!r}, {failure}"
        raise _wrong(value, f"options of {described.storage}") from failure


def _check_members(name: str, members: dict[str, Any], names: Sequence[str]) -> None:
    if {*members} != {*names}:
        raise _wrong(f"{name} is {members!r}", f"an object with {', '.join(names)}")


def _wrong(value: str, expected: str) -> ValueError:
    return ValueError(f"config.json, key gac: {value}; expected {expected}.")

"""The key ``gac`` of ``config.json``: the modules that it describes, built in the place of dense weights."""

from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from .contract import SCHEMA, VLLM
from .ends import store_ends
from .modules import KINDS, Absent
from .shared_gemm import can_share
from .storage import Storage
from .stored import STORAGES, store_in

HEAD = "head"
"""The member that says how embedding and head are stored, where they are not as they were loaded."""

ROUNDED = "rounded"
"""The member that says what makes the inputs of weights that round them."""


def replace_weights(model: Any, config: Any) -> list[str]:
    """Put the modules that the config describes in the place of dense weights, and return their names in the model.

    vLLM puts layers of its own in the place of linear weights, which hold what is stored: there all are left plain.
    """
    modules, names = dict(model.named_modules()), []
    prefix, stores = _own_prefix(model), model.config._attn_implementation != VLLM
    for name, described in weights_of(config).items():
        name = name.removeprefix(prefix)
        if not isinstance(dense := modules.get(name), nn.Linear | Conv1D):
            raise _wrong(f"modules names {name!r}", "a linear weight of this model")
        module = _replacement(name, dense, described, stores)
        holder, _, attribute = name.rpartition(".")
        setattr(modules[holder], attribute, module)
        # Some architectures (GPT-2) initialise a weight through the module that holds it, which no longer finds it.
        modules[holder]._is_hf_initialized = True
        names.append(name)
    for name, module in _ends(model, config).items():
        model.set_submodule(name, module)
        names.append(name)
    return names


def _ends(model: Any, config: Any) -> dict[str, nn.Module]:
    """Embedding and head as the config describes them, by name; none where it says nothing of them."""
    described = header_value(config, HEAD)
    if described is None:
        return {}
    if not isinstance(described, dict) or not isinstance(described.get("tied"), bool):
        raise _wrong(f"{HEAD} is {described!r}", "an object with storage, options and tied, a truth value")
    storage = storage_of(HEAD, described)
    if storage is None:
        raise _wrong(f"{HEAD} has no storage", f"one of {', '.join(STORAGES)}")
    return store_ends(model, storage, described["tied"])


def weights_of(config: Any) -> dict[str, Any]:
    """By module name, what ``config.json`` says of every weight that is no longer dense."""
    header = getattr(config, "gac", None)
    if header is None:
        return {}
    if not isinstance(header, dict) or header.get("schema_version") != SCHEMA:
        version = header.get("schema_version") if isinstance(header, dict) else header
        raise _wrong(f"schema_version is {version!r}", f"{SCHEMA}. Open it with the version of GAC that wrote it")
    if not isinstance(header.get("modules"), dict):
        raise _wrong(f"modules is {header.get('modules')!r}", "an object with a member for every weight that changed")
    modules: dict[str, Any] = header["modules"]
    return modules


def check_run(model: Any, config: Any) -> None:
    """The names of what shares a GEMM are those of linear weights, blocks can be skipped."""
    groups = header_value(config, "fused") or []
    modules = dict(model.named_modules()) if groups else {}
    for names in groups if isinstance(groups, list | tuple) else [groups]:
        named = [str(name) for name in names] if isinstance(names, list | tuple) else []
        if not named or not can_share([modules.get(own_name(model, name)) for name in named]):
            raise _wrong(f"fused has {names!r}", "lists of names of linear weights in one storage")
    skipped_blocks(model)
    rounded_inputs(model)


def rounded_inputs(model: Any) -> list[dict[str, Any]]:
    """What makes inputs that are rounded, by the names in the model, as ``round_before`` takes it.

    Raises:
        ValueError: one of them is no module of the model, or what reads it is no linear weight.
    """
    described = header_value(model.config, ROUNDED) or []
    modules, found = dict(model.named_modules()) if described else {}, []
    for one in described if isinstance(described, list | tuple) else [described]:
        if (
            not isinstance(one, dict)
            or not {"by", "readers"} <= set(one)
            or not isinstance(one["readers"], list | tuple)
        ):
            raise _wrong(f"{ROUNDED} has {one!r}", "objects with by, and with readers, which is a list")
        by, readers = own_name(model, str(one["by"])), [own_name(model, str(name)) for name in one["readers"]]
        if by not in modules or not readers or not all(hasattr(modules.get(name), "in_features") for name in readers):
            raise _wrong(f"{ROUNDED} has {one!r}", "names of a norm and of linear weights")
        found.append({"by": by, "readers": readers})
    return found


def skipped_blocks(model: Any) -> list[dict[str, Any]]:
    """The blocks that the config says are skipped, by their names in the model, as ``skip_blocks`` takes them.

    Raises:
        ValueError: one of them is none, or its weights do something.
    """
    described = header_value(model.config, "skipped") or []
    modules, found = dict(model.named_modules()) if described else {}, []
    for one in described if isinstance(described, list | tuple) else [described]:
        if not _is_skipped(model, modules, one):
            raise _wrong(
                f"skipped has {one!r}", "an attention or MLP whose weights are Absent or Constant, and its norms"
            )
        norms = [own_name(model, name) for name in one["norms"]]
        found.append({**one, "block": own_name(model, one["block"]), "norms": norms})
    return found


def _is_skipped(model: Any, modules: dict[str, nn.Module], one: Any) -> bool:
    if not isinstance(one, dict) or set(one) != {"block", "output", "norms", "attention"}:
        return False
    block = modules.get(own_name(model, str(one["block"])))
    norms = one["norms"] if isinstance(one["norms"], list | tuple) else [None]
    weights = [module for module in block.children() if hasattr(module, "in_features")] if block else []
    return (
        bool(weights)
        and all(isinstance(weight, Absent) for weight in weights)
        and isinstance(one["attention"], bool)
        and isinstance(getattr(block, str(one["output"]), None), Absent)
        and all(own_name(model, str(name)) in modules for name in norms)
    )


def header_value(config: Any, key: str) -> Any:
    return (getattr(config, "gac", None) or {}).get(key)


def own_name(model: Any, name: str) -> str:
    return name.removeprefix(_own_prefix(model))


def _own_prefix(model: Any) -> str:
    """What a causal LM puts before the names of this model's modules; empty for a causal LM itself."""
    return f"{model.base_model_prefix}." if model.base_model is model else ""


def _replacement(name: str, dense: Any, described: Any, stores: bool) -> nn.Module:
    """The module that ``described`` names, its parameters allocated beside those of the dense one.

    Args:
        stores: whether its matrices go into the storage that is described.
    """
    (kind, sizes), storage = _checked(name, dense, described), storage_of(name, described)
    weight: nn.Parameter = dense.weight
    module: nn.Module = kind(**sizes, bias=dense.bias is not None, device=weight.device, dtype=weight.dtype)
    if not weight.is_meta:  # a random model: weights that are read from files are on the meta device until then
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.02)
    return store_in(storage, module) if stores and storage is not None else module


def storage_of(name: str, described: dict[str, Any]) -> Storage | None:
    """What holds the matrices of a module that was checked; None: the module itself."""
    if "storage" not in described:
        return None
    if not isinstance(asked := described["storage"], str) or asked not in STORAGES:
        raise _wrong(f"{name}.storage is {asked!r}", f"one of {', '.join(STORAGES)}")
    kind, names = STORAGES[asked]
    options = described.get("options")
    if not isinstance(options, dict) or set(options) != set(names):
        raise _wrong(f"{name}.options is {options!r}", f"an object with {', '.join(names)}")
    try:
        return kind(**options)
    except ValueError as failure:
        raise _wrong(f"{name}.options is {options!r}, {failure}", f"options of {asked}") from failure


def _checked(name: str, dense: Any, described: Any) -> tuple[Any, dict[str, int]]:
    """The class and its sizes: integers from 1 to the dense weight's largest."""
    described = described if isinstance(described, dict) else {}
    if described.get("module") not in KINDS:
        raise _wrong(f"{name}.module is {described.get('module')!r}", f"one of {', '.join(KINDS)}")
    kind, names = KINDS[described["module"]]
    sizes = described.get("sizes")
    if not isinstance(sizes, dict) or set(sizes) != set(names):
        raise _wrong(f"{name}.sizes is {sizes!r}", f"an object with {', '.join(names)}")
    largest = max(dense.weight.shape)
    for size, value in sizes.items():
        if type(value) is not int or not 1 <= value <= largest:
            raise _wrong(f"{name}.sizes.{size} is {value!r}", f"an integer from 1 to {largest}")
    return kind, sizes


def _wrong(given: str, expected: str) -> ValueError:
    return ValueError(f"config.json, key gac: {given}; expected {expected}.")

"""What a compressed model adds to its architecture in transformers.

It runs without GAC too, so what is wrong with a checkpoint is a ``ValueError``, as everywhere in transformers.
"""

import copy
import gc
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.utils.hub import cached_file

from .contract import SCHEMA
from .decode import use_decode_kernel
from .modules import KINDS
from .serving import prepare_for_vllm
from .shared_gemm import share_gemm

DOCUMENTS = ("plan.json", "README.md")
CODE = (
    "modeling_gac.py",
    "classes.py",
    "compressed.py",
    "contract.py",
    "decode.py",
    "decode_kernel.py",
    "modules.py",
    "serving.py",
    "shared_gemm.py",
)
COMPANIONS = (*DOCUMENTS, *CODE)
"""Files of a checkpoint that transformers knows nothing of; they are written wherever the model is saved."""
DECODE_KERNELS = ("torch", "triton")
_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
_logger = logging.getLogger("gac")


class CompressedConfig:
    """A config with the key ``gac``; a mixin before the dense class.

    Transformers copies the config of a model several times and writes it out for its log. Hundreds of entries would
    take longer than reading the weights, so the copies share them, the log goes without, and nothing walks over them.
    """

    @classmethod
    def from_dict(cls: Any, config_dict: dict[str, Any], **options: Any) -> Any:
        """As of any transformers config."""
        parent: Any = super()
        dense = {name: value for name, value in config_dict.items() if name != "gac"}
        config, unused = parent.from_dict(dense, **options | {"return_unused_kwargs": True})
        if "gac" in config_dict:
            header = config_dict["gac"]
            config.gac = _Shared(header) if isinstance(header, dict) else header
        return (config, unused) if options.get("return_unused_kwargs") else config

    def to_dict(self: Any) -> dict[str, Any]:
        """As of any transformers config."""
        dense = copy.copy(self)
        header = vars(dense).pop("gac", None)
        found: dict[str, Any] = super(CompressedConfig, dense).to_dict()  # type: ignore[misc]
        return found if header is None else found | {"gac": header}


class _Shared(dict[str, Any]):
    """What a copy of its holder shares."""

    def __deepcopy__(self, memo: Any) -> "_Shared":
        return self


class CompressedModel:
    """The architecture with the modules that the key ``gac`` of its config names; a mixin before the dense class.

    Construction replaces the dense weights, so transformers loads shards, dtypes, device maps and quantised weights
    as for any model. A config without the key makes the dense model.
    """

    gac_files: dict[str, str]

    # self has no annotation: vLLM would take it for that of the config, and check it.
    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        with _uninitialised():
            super().__init__(config, *args, **options)  # type: ignore[call-arg]
        names = _replace_weights(self, config)
        _check_run(self, config)
        prepare_for_vllm(self, names)

    @classmethod
    def from_pretrained(cls: Any, source: Any, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """As of any transformers model; weights that are missing are an error, not random numbers."""
        _check_whole(options)
        load: Any = super()
        with uncollected():
            model, report = load.from_pretrained(source, *args, output_loading_info=True, **options)
        _check_loaded(source, report)
        model.gac_files = _documents(source, {key: options[key] for key in _HUB_OPTIONS if key in options})
        _fuse_where_possible(model)
        if _of_header(model.config, "decode_kernel") == "triton":
            use_decode_kernel(model)
        return (model, report) if output_loading_info else model

    def save_pretrained(self: Any, directory: Any, *args: Any, **options: Any) -> None:
        """As of any transformers model, with the plan, the card and the code beside the weights."""
        auto_map = getattr(self.config, "auto_map", {})
        self.config.auto_map = {auto: found.rpartition("--")[2] for auto, found in auto_map.items()}
        super().save_pretrained(directory, *args, **options)  # type: ignore[misc]
        if not getattr(self, "_hf_peft_config_loaded", False):  # of which transformers saves the adapter alone
            self._write_companions(directory)

    def _upload_modified_files(self: Any, working_dir: Any, *args: Any, **options: Any) -> Any:
        """What transformers pushes to the hub; it would put a card of its own in the place of ours."""
        self._write_companions(working_dir)
        return super()._upload_modified_files(working_dir, *args, **options)  # type: ignore[misc]

    def _write_companions(self, directory: Any) -> None:
        for name, text in getattr(self, "gac_files", {}).items():
            Path(directory, name).write_text(text, encoding="utf-8")
        for name in CODE:
            shutil.copyfile(Path(__file__).with_name(name), Path(directory, name))


def _replace_weights(model: Any, config: Any) -> list[str]:
    """Put the modules that the config describes in the place of dense weights, and return their names in the model."""
    modules, names = dict(model.named_modules()), []
    prefix = _own_prefix(model)
    for name, described in _weights_of(config).items():
        name = name.removeprefix(prefix)
        module = _replacement(name, _dense_at(modules, name), described)
        holder, _, attribute = name.rpartition(".")
        setattr(modules[holder], attribute, module)
        # Some architectures (GPT-2) initialise a weight through the module that holds it, which no longer finds it.
        modules[holder]._is_hf_initialized = True
        names.append(name)
    return names


@contextmanager
def uncollected() -> Iterator[None]:
    """Leave the garbage collector off: it would walk everything that Python has loaded, and all that is new stays.

    So that it does not walk all of that at once when it is on again, what is new is counted among what is old: frozen
    and released, which moves lists and looks at no object. Not where somebody keeps objects frozen, which stay so.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@contextmanager
def _uninitialised() -> Iterator[None]:
    """Leave out the initialisation of linear weights on the meta device: they have no values, and it takes its time.

    Whatever other threads build meanwhile is not on that device, or has no values either.
    """
    initialise = nn.Linear.reset_parameters

    def reset_parameters(self: nn.Linear) -> None:
        if not self.weight.is_meta:
            initialise(self)

    nn.Linear.reset_parameters = reset_parameters  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Linear.reset_parameters = initialise  # type: ignore[method-assign]


def _weights_of(config: Any) -> dict[str, Any]:
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


def _check_run(model: Any, config: Any) -> None:
    """The names of what shares a GEMM are those of linear weights, and the decode kernel is known."""
    if (kernel := _of_header(config, "decode_kernel")) not in (None, *DECODE_KERNELS):
        raise _wrong(f"decode_kernel is {kernel!r}", " or ".join(map(repr, DECODE_KERNELS)))
    groups = _of_header(config, "fused") or []
    modules = dict(model.named_modules()) if groups else {}
    for names in groups if isinstance(groups, list | tuple) else [groups]:
        named = [str(name) for name in names] if isinstance(names, list | tuple) else []
        if not named or not all(hasattr(modules.get(_own_name(model, name)), "in_features") for name in named):
            raise _wrong(f"fused has {names!r}", "lists of names of linear weights")


def _of_header(config: Any, key: str) -> Any:
    return (getattr(config, "gac", None) or {}).get(key)


def _own_name(model: Any, name: str) -> str:
    return name.removeprefix(_own_prefix(model))


def _own_prefix(model: Any) -> str:
    """What names have in a causal LM and not in this model, where it is the one within."""
    return f"{model.base_model_prefix}." if model.base_model is model else ""


def _dense_at(modules: Mapping[str, Any], name: str) -> Any:
    dense = modules.get(name)
    if not isinstance(dense, nn.Linear | Conv1D):
        raise _wrong(f"modules names {name!r}", "a linear weight of this model")
    return dense


def _replacement(name: str, dense: Any, described: Any) -> nn.Module:
    """The module that ``described`` names, its parameters allocated beside those of the dense one."""
    kind, sizes = _checked(name, dense, described)
    weight: nn.Parameter = dense.weight
    module: nn.Module = kind(**sizes, bias=dense.bias is not None, device=weight.device, dtype=weight.dtype)
    if not weight.is_meta:  # a random model: weights that are read from files are on the meta device until then
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.02)
    return module


def _checked(name: str, dense: Any, described: Any) -> tuple[Any, dict[str, int]]:
    """The class and its sizes, all of them there, whole, positive and no larger than the dense weight's."""
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


def _check_whole(options: dict[str, Any]) -> None:
    """No tensor parallelism: its plans name the dense weights, and would split what the others do not expect."""
    distributed = options.get("distributed_config")
    for name in ("tp_plan", "tp_size"):
        if (options.get(name) or getattr(distributed, name, None)) is not None:
            raise ValueError(f"{name} was given; expected whole weights of a compressed model. Use device_map instead.")


def _check_loaded(source: Any, report: Any) -> None:
    """Every weight was in the files; transformers would make up what is missing."""
    for problem in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, report[problem])):
            raise ValueError(
                f"{source}: {names[0]} is {problem.removesuffix('_keys')} ({len(names)} in all); expected every weight "
                "that config.json describes."
            )


def _documents(source: Any, options: dict[str, Any]) -> dict[str, str]:
    """The text of those documents that lie beside the weights; ``source`` is a directory or a hub id."""
    if source is None:
        return {}
    paths = {
        name: cached_file(source, name, _raise_exceptions_for_missing_entries=False, **options) for name in DOCUMENTS
    }
    return {name: Path(path).read_text(encoding="utf-8") for name, path in paths.items() if path is not None}


def _fuse_where_possible(model: Any) -> None:
    """Let the weights that were planned so share their first GEMM.

    Quantised or offloaded weights cannot be put into one; by themselves they compute the same.
    """
    groups = _of_header(model.config, "fused")
    if not groups:
        return
    weights = [model.get_submodule(_own_name(model, name)) for names in groups for name in names]
    if getattr(model, "hf_quantizer", None) or any(one.is_meta for weight in weights for one in weight.parameters()):
        _logger.warning("weights that read the same input run by themselves: they are quantised or offloaded")
        return
    for names in groups:
        share_gemm(model, [_own_name(model, name) for name in names])

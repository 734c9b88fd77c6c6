"""Load a model from a directory, a hub id or a package, or take a loaded one."""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, StrictDataclassError
from huggingface_hub.utils._validators import validate_repo_id
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel, ProcessorMixin

from gac.core.distributed import launch
from gac.core.errors import GacError, ModelError, did_you_mean, first_line, one_line, printable
from gac.core.progress import has_bars
from gac.core.untrusted import check_model_files, read_model_json
from gac.models.config_fields import check_config, check_content, check_generation_config
from gac.models.packaged import AUTO_CONFIG, AUTO_TOKENIZER, PACKAGED
from gac.models.quantised import ACTIVATIONS, OF_EXPERTS, ORIGINAL, SCALES, check_stored, dequantising, quantisation
from gac.models.shapes import SHAPES
from gac.models.streaming import placed, spread
from gac.models.threads import LOADING
from gac.runtime.architectures import factory_of

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_ROTARY_CACHE = re.compile(r"\.rotary_emb\.(cos|sin)_cached$")
"""Rotary tables in old checkpoints; they follow from the config."""
logger = logging.getLogger("gac")
# A hostile config makes transformers fail in any of these ways, far from where the field was read.
UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, AssertionError),
    ImportError,  # of a quantiser or a kernel that is not installed
    SafetensorError,
    StrictDataclassError,
)
_logging: Any = transformers.utils.logging


@dataclass(frozen=True, eq=False)
class Loaded:
    """A causal LM, its name, and its tokenizer or the source from which that is read on first use.

    ``on_grid``: its weights were stored in few bits, and dequantised as they were read.
    """

    model: PreTrainedModel
    name: str
    reader: Any
    on_grid: bool = False

    @cached_property
    def tokenizer(self) -> Any:
        if isinstance(self.reader, str | Path):
            return load_tokenizer(str(self.reader))
        return self.reader.tokenizer if isinstance(self.reader, ProcessorMixin) else self.reader


def load_model(
    model: PreTrainedModel | str | Path,
    tokenizer: Any = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    stream: bool = False,
    dequantise: bool = False,
) -> Loaded:
    """Load a causal language model, in eval mode, or take a loaded one as it is; code that comes with it is not run.

    Args:
        model: a transformers causal LM, a local directory, a hub id, or the name of a packaged one, such as
            ``"smollm2"``.
        tokenizer: a tokenizer, or the directory or hub id to read it from; None takes the model's own.
        device: where to put it; None takes the GPU if there is one, all GPUs if it is too large for one, and leaves a
            loaded model where it is.
        dtype: to read the weights in; None keeps the checkpoint's own (float32 for packaged ones). A loaded model
            keeps its own: casting it would round its rotary frequencies too.
        stream: leave one that is read and is too large for its GPU in host memory, see ``gac.models.streaming``.
        dequantise: read a quantised checkpoint as the weights that it stands for, or refuse it.

    Raises:
        ModelError: nothing of this name, no causal LM, missing or unexpected weights, a missing package, or a loaded
            model of another dtype.
    """
    if isinstance(model, str | Path):
        name = str(model)
        with LOADING:
            read, on_grid = _read(name, dtype, dequantise)
            loaded: Any = read.eval()
        where = torch.device(device or default_device())
        loaded = placed(loaded, where) if stream else spread(loaded, where)
    else:
        if not isinstance(model, PreTrainedModel) or not model.can_generate():
            expected = "a causal language model of transformers, or the name of one"
            raise ModelError(f"a {type(model).__name__}", expected, "Load it with AutoModelForCausalLM.")
        if key := next((key for key, values in model.named_parameters() if values.is_inference()), None):
            expected = "weights made outside of torch.inference_mode, which can be measured by gradients"
            remedy = "Load the model outside of torch.inference_mode; torch.no_grad will do."
            raise ModelError(f"{key} was made in torch.inference_mode", expected, remedy)
        if dtype not in (None, model.dtype):
            raise ModelError(f"a model loaded in {model.dtype}", str(dtype), f"Load it with dtype={dtype}.")
        name = model.config.name_or_path or f"{type(model).__name__} in memory"
        on_grid = name in PACKAGED
        loaded = model if device is None else model.to(device)  # type: ignore[arg-type]  # as its wrapper is annotated
    return Loaded(loaded, one_line(name), tokenizer or name, on_grid)


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a directory (a compressed one too), a hub id, or a packaged model; a ModelError if none."""
    if name in PACKAGED:
        with LOADING, quiet_transformers():
            return PACKAGED[name].tokenizer()
    expected = "a tokenizer, or the name of one"
    remedy = "Pass tokenizer= (--tokenizer): a directory or hub id with its files."
    if not name or not (os.path.isdir(name) or _is_hub_id(name)):
        model = f"the model {name!r}" if name else "a model in memory"
        raise ModelError(f"{model} came without a tokenizer", expected, remedy)
    _check_name(name)
    no_files = f"{name} has no files of a tokenizer, such as {', '.join(TOKENIZER_FILES[:3])}"
    try:
        with LOADING:
            tokenizer = AUTO_TOKENIZER.from_pretrained(name, trust_remote_code=False)
            tokens = set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
    except UNREADABLE as failure:
        is_bare = os.path.isdir(name) and not _has_files(name, TOKENIZER_FILES)
        problem = no_files if is_bare else f"no tokenizer can be read from {name!r} ({first_line(failure)})"
        raise ModelError(problem, expected, remedy) from failure
    named = [*getattr(tokenizer, "vocab_files_names", {}).values()]
    if not tokens or (named and not _has_files(name, (*TOKENIZER_FILES, *named))):  # transformers makes an empty one
        raise ModelError(no_files, expected, remedy)
    return tokenizer


def _has_files(name: str, files: Iterable[str]) -> bool:
    if os.path.isdir(name):
        return any(os.path.isfile(os.path.join(name, file)) for file in files)
    return any(isinstance(try_to_load_from_cache(name, file), str) for file in files)


def load_config(model: PreTrainedModel | str | Path) -> Any:
    """The dims of a model without its weights: ``Shapes`` for a name in ``SHAPES``, else a transformers config.

    A ModelError says if there is nothing of this name, or if its config cannot be read.
    """
    if not isinstance(model, str | Path):
        return model.config
    name = str(model)
    if name in SHAPES:
        return SHAPES[name]
    if name in PACKAGED:
        with LOADING:
            return PACKAGED[name].config()
    _check_name(name)
    with LOADING, _reading(name):
        config = AUTO_CONFIG.from_pretrained(name, trust_remote_code=False)
        check_config(config)
    return config


def is_checkpoint(path: str | Path) -> bool:
    try:
        return "gac" in read_model_json(Path(path) / "config.json", "a config", ModelError)
    except ModelError:
        return False


def default_device() -> str:
    """The GPU if there is one; of several processes each has its own."""
    if not torch.cuda.is_available():
        return "cpu"
    return "cuda" if launch.processes() == 1 else f"cuda:{launch.local_rank()}"


def usable_device(name: torch.device | str | None) -> torch.device:
    """The device of this name, None being the GPU if there is one; a ModelError if there is no such device here."""
    gpus = torch.cuda.device_count()
    expected, remedy = f"cpu, or one of the {gpus} GPUs here", "Correct it, or leave it out."
    refusal = ModelError(f"device {str(name)!r}", expected, remedy)
    try:
        device = torch.device(default_device() if name is None else name)
    except RuntimeError as failure:
        raise refusal from failure
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise refusal
    return device


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars of transformers in files and pipes; on a terminal they stay."""
    if has_bars() or not _logging.is_progress_bar_enabled():
        yield
        return
    _logging.disable_progress_bar()
    try:
        yield
    finally:
        _logging.enable_progress_bar()


@contextlib.contextmanager
def reading(error: Callable[[str], GacError]) -> Iterator[None]:
    """Turn errors of transformers for unreadable files into ``error`` of their first line; its log is safe to print."""
    handlers = logging.getLogger("transformers").handlers
    for handler in handlers:
        handler.addFilter(_escape)
    try:
        yield
    except torch.OutOfMemoryError:  # not an error of the files
        raise
    except UNREADABLE as failure:
        cause = failure.__cause__ if isinstance(failure, StrictDataclassError) else None
        raise error(first_line(cause or failure)) from failure
    finally:
        for handler in handlers:
            handler.removeFilter(_escape)


def _escape(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), ()
    return True


def _read(name: str, dtype: torch.dtype | None, dequantise: bool) -> tuple[Any, bool]:
    """Return the model, and ``Loaded.on_grid``."""
    if name in PACKAGED:
        return PACKAGED[name].read(dtype or torch.float32), True
    _check_name(name)
    if is_checkpoint(name):
        raise ModelError(f"{name} was compressed by GAC", "a dense model", "Open it with gac.load.")
    folder, options = Path(name), dict[str, Any]()
    with _reading(name):
        config = AUTO_CONFIG.from_pretrained(name, trust_remote_code=False)
        check_config(config)
        stated = quantisation(config, folder)
    if stated and dequantise:
        config.quantization_config = dequantising(stated, name)
        options["config"] = config
    with _reading(name), quiet_transformers():
        if folder.is_dir() and (dequantise or not stated):
            check_stored(folder, stated, name)
        model, report = factory_of(type(config)).from_pretrained(
            name,
            dtype=dtype or "auto",
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report, with their names
            **options,
        )
        if getattr(model, "hf_quantizer", None) is None:
            if not folder.is_dir():
                folder = Path(str(try_to_load_from_cache(name, "config.json"))).parent
            check_stored(folder, stated, name)
    _check_report(model, report, name, bool(options))
    return model, bool(options) and stated.get("quant_method") != OF_EXPERTS


def _check_report(model: Any, report: Any, name: str, dequantised: bool) -> None:
    kind, missing = type(model).__name__, report["missing_keys"]
    spine = _spine(model)
    unexpected = sorted(key for key in report["unexpected_keys"] if not (dequantised and ACTIVATIONS.search(key)))
    inside = [key for key in unexpected if _owner(model, key) not in spine and not _ROTARY_CACHE.search(key)]
    if inside:
        scales = sum(bool(SCALES.search(key)) for key in inside)
        raise ModelError(
            f"{name} has {inside[0]}, for which a {kind} has no place ({len(inside)} such tensors, {scales} of scales)",
            "the weights of its layers, and no others",
            ORIGINAL if scales else "Correct config.json, or use the checkpoint of another model.",
        )
    if unexpected:
        message = "%s: %d tensors that a %s does not have are left out: %s"
        logger.warning(message, name, len(unexpected), kind, unexpected[0])
    for key, stored, shape in sorted(report["mismatched_keys"]):
        expected, remedy = f"{tuple(shape)}, as config.json says", "Use the config that belongs to the weights."
        raise ModelError(f"{name} has {key} of shape {tuple(stored)}", expected, remedy)
    if missing:
        problem = f"{name} has no {min(missing)} ({len(missing)} missing)"
        raise ModelError(problem, f"every weight of a {kind}", "Use a whole checkpoint of a causal language model.")


def _spine(model: nn.Module) -> set[str]:
    lists = (name for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    parts = next(lists, "").split(".")
    return {".".join(parts[:count]) for count in range(len(parts))}


def _owner(model: nn.Module, key: str) -> str:
    modules = dict(model.named_modules())
    parts = key.split(".")
    return next(name for end in reversed(range(len(parts))) if (name := ".".join(parts[:end])) in modules)


def _check_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as failure:
        expected = "a name in UTF-8, which plans and cards can hold"
        raise ModelError(f"model {name!a}", expected, "Rename the directory.") from failure
    if os.path.isdir(name):
        check_model_files(Path(name), ModelError)
        return
    meant, is_file = _nearly_known(name), os.path.isfile(name)
    if name.endswith(".gguf"):
        meant = ORIGINAL
    if meant or os.path.exists(name) or not _is_hub_id(name):
        raise ModelError(
            f"model {name!r}: {'a file' if is_file else 'no such directory'}",
            f"a directory with a config.json, a hub id like org/name, or a packaged model ({', '.join(PACKAGED)})",
            meant or "Check the path.",
        )
    _check_hub(name)


def _is_hub_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _check_hub(name: str) -> None:
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        HfApi().model_info(name, timeout=10)
    except HfHubHTTPError:
        return  # reachable; transformers explains the error of the name
    except Exception as failure:  # of whatever client the hub's library uses
        raise ModelError(
            f"model {name!r}: no such directory, and the hub cannot be reached ({first_line(failure)})",
            f"a directory with a config.json, a hub id and a network, or a packaged model ({', '.join(PACKAGED)})",
            "Check the path, or the network.",
        ) from failure


def _nearly_known(name: str) -> str:
    if name in SHAPES:
        return f"Of {name} the shapes alone are known: name a directory or a hub id that holds its weights."
    return "" if "/" in name else did_you_mean(name, (*PACKAGED, *SHAPES), "", cutoff=0.8)


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    with reading(lambda reason: _unreadable(name, reason)):
        if os.path.isfile(config := os.path.join(name, "config.json")):
            check_content(read_model_json(Path(config), "the config of a model", ModelError))
            check_generation_config(Path(name), ModelError)
        yield


def _unreadable(name: str, reason: str) -> ModelError:
    for part, problem, expected, remedy in _REASONS:
        if part in reason:
            return ModelError(f"model {name!r} {problem}", expected, _made_from(name) or remedy)
    remedy = "Check the name and the network; packaged models need none: " + f"{', '.join(PACKAGED)}."
    return ModelError(
        f"model {name!r} cannot be loaded: {reason}",
        "a directory or hub id of a causal language model that transformers can read",
        "Check the files in it." if os.path.isdir(name) else remedy,
    )


def _made_from(name: str) -> str:
    if os.path.exists(os.path.join(name, "adapter_config.json")):
        return "This is an adapter: merge it into its base model (merge_and_unload of peft), and save that."
    return ORIGINAL if os.path.isdir(name) and any(Path(name).glob("*.gguf")) else ""


_WEIGHTS = ("has no weights", "model.safetensors, its index, or pytorch_model.bin", "Fetch the whole checkpoint.")
_CUSTOM_CODE = "Load it with transformers (trust_remote_code=True), and pass the model."
_UNKNOWN = "has a model_type in config.json that transformers does not know"
_VERSION = f"an architecture of transformers {transformers.__version__}"
_NO_TYPE = "has no config.json with a model_type"
_DECODER = "a decoder that AutoModelForCausalLM loads"
_REASONS = (  # problem, expectation and remedy by a part of transformers' message
    ("custom code", "needs code of its own", "an architecture that transformers has", _CUSTOM_CODE),
    ("does not recognize this architecture", _UNKNOWN, _VERSION, "Correct config.json, or update transformers."),
    ("Unrecognized model in", _NO_TYPE, "the config of a causal language model", "Fetch the whole checkpoint."),
    ("Unrecognized configuration class", "is no causal language model", _DECODER, "Use another model."),
    ("Error no file named", *_WEIGHTS),
    ("does not appear to have a file named model", *_WEIGHTS),
    ("does not appear to have a file named pytorch_model", *_WEIGHTS),
)

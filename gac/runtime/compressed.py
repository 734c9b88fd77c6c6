"""What a compressed model adds to its architecture in transformers.

It runs without GAC too, so what is wrong with a checkpoint is a ``ValueError``, as everywhere in transformers.
"""

import copy
import gc
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

from torch import nn
from transformers.utils.hub import cached_file

from .contract import COMPRESSED_TENSORS, DIGESTS, LAYOUT, QUANTIZATION, chooses_code
from .header import HEAD, check_run, header_value, own_name, replace_weights, rounded_inputs, skipped_blocks
from .latents import cache_latents, caches_latents
from .one_launch import run_in_one_launch
from .ranks import Ranks, SplitError, ranks_asked_for
from .round_before import round_before
from .serving import not_paged, prepare_for_vllm
from .shared_gemm import share_gemm
from .skipped import skip_blocks
from .splitting import split
from .stored import stored_modules

DOCUMENTS = ("plan.json", "README.md")
CODE = tuple(sorted(path.name for path in Path(__file__).parent.glob("*.py") if path.name != "__init__.py"))
COMPANIONS = (*DOCUMENTS, *CODE)
"""Files of a checkpoint that transformers knows nothing of; they are written wherever the model is saved."""
_WEIGHTS = "model.safetensors"
_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
_logger = logging.getLogger("gac")
_CONSTRUCTING = RLock()


class CompressedConfig:
    """A config with the key ``gac``; a mixin before the dense class.

    Transformers copies the config of a model several times and writes it to its log. Copying hundreds of entries would
    take longer than reading the weights, so all copies share them, and the log leaves them out.

    What the file says of compressed-tensors' layout is for other readers: transformers would put layers of that
    package in the place of these modules. So it is kept under another name, and written under its own.
    """

    @classmethod
    def from_dict(cls: Any, config_dict: dict[str, Any], **options: Any) -> Any:
        """As for any transformers config."""
        parent: Any = super()
        dense = {name: value for name, value in config_dict.items() if name != "gac" and not chooses_code(name)}
        if is_layout(dense.get(QUANTIZATION)):
            dense[LAYOUT] = _Shared(dense.pop(QUANTIZATION))
        config, unused = parent.from_dict(dense, **options | {"return_unused_kwargs": True})
        if "gac" in config_dict:
            header = config_dict["gac"]
            config.gac = _Shared(header) if isinstance(header, dict) else header
        return (config, unused) if options.get("return_unused_kwargs") else config

    def to_dict(self: Any) -> dict[str, Any]:
        """As for any transformers config."""
        dense = copy.copy(self)
        header, layout = (vars(dense).pop(name, None) for name in ("gac", LAYOUT))
        found: dict[str, Any] = super(CompressedConfig, dense).to_dict()  # type: ignore[misc]
        found |= {} if header is None else {"gac": header}
        return found if layout is None else {QUANTIZATION: layout} | found


def is_layout(quantiser: Any) -> bool:
    """Whether a ``quantization_config`` says how compressed-tensors lays weights out."""
    return isinstance(quantiser, dict) and quantiser.get("quant_method") == COMPRESSED_TENSORS


class _Shared(dict[str, Any]):
    """A dictionary that is shared by the copies of its holder."""

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
        with uninitialised():
            super().__init__(config, *args, **options)  # type: ignore[call-arg]
        names = replace_weights(self, config)
        check_run(self, config)
        prepare_for_vllm(self, names)

    def get_expanded_tied_weights_keys(self: Any, all_submodels: bool = False) -> dict[str, str]:
        """As for any transformers model; none where embedding and head are stored, for they tie themselves."""
        if header_value(self.config, HEAD) is not None:
            return {}
        found: dict[str, str] = super().get_expanded_tied_weights_keys(all_submodels)  # type: ignore[misc]
        return found

    @classmethod
    def from_pretrained(cls: Any, source: Any, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """As for any transformers model, but missing weights are an error, not random numbers.

        ``tp_plan="auto"`` splits it over the processes of torchrun, see ``gac.runtime.splitting``.
        """
        ranks = ranks_asked_for(options)
        load: Any = super()
        options["ignore_mismatched_sizes"] = True  # so that they are reported, and refused below
        with uncollected():
            model, report = load.from_pretrained(source, *args, output_loading_info=True, **options)
        _check_loaded(source, model, report)
        model.finish(source, ranks, **{key: options[key] for key in _HUB_OPTIONS if key in options})
        return (model, report) if output_loading_info else model

    def finish(self: Any, source: Any, ranks: Ranks | None = None, **hub: Any) -> None:
        """Make a model that has its tensors ready to run: they are checked, and what its config describes begins.

        Args:
            source: the directory or hub id that it was read from.
            ranks: the processes that it is split over; None: it is whole.
            hub: options of ``from_pretrained`` that say where ``source`` is.
        """
        _check_stored(source, self)
        self.gac_files = _documents(source, hub)
        if ranks is not None:
            _split(source, self, ranks)
        _share_where_possible(self)
        skip_blocks(self, skipped_blocks(self))
        run_in_one_launch(self)
        round_before(self, rounded_inputs(self))
        cache_latents(self)

    def resize_token_embeddings(self: Any, *args: Any, **options: Any) -> Any:
        """As for any transformers model, but where embedding and head are stored: they have no rows to add to."""
        if (head := header_value(self.config, HEAD)) is not None:
            raise ValueError(
                f"embedding and head are in {head.get('scheme')}; expected them in 16 or 32 bits to resize them. "
                "Resize the dense model, and compress that."
            )
        return super().resize_token_embeddings(*args, **options)  # type: ignore[misc]

    def save_pretrained(self: Any, directory: Any, *args: Any, **options: Any) -> None:
        """As for any transformers model, with the plan, the card and the code beside the weights."""
        if self.tp_size is not None:
            raise SplitError(f"a model that is split over {self.tp_size} processes", "a whole one", "Load it whole.")
        names = {auto: str(found).rpartition("--")[2] for auto, found in getattr(self.config, "auto_map", {}).items()}
        self.config.auto_map = {auto: name for auto, name in names.items() if name.startswith("modeling_gac.")}
        super().save_pretrained(directory, *args, **options)  # type: ignore[misc]
        if not getattr(self, "_hf_peft_config_loaded", False):  # then transformers saves the adapter alone
            self._write_companions(directory)

    def _get_static_cache_init_shape(self: Any) -> Any:
        """None where the model is split, or keeps latents: its attentions have other keys and values."""
        if self.tp_size is not None or caches_latents(self):
            return None
        return super()._get_static_cache_init_shape()  # type: ignore[misc]

    def init_continuous_batching(self: Any, *args: Any, **options: Any) -> Any:
        """As for any transformers model; refused where its paged cache has no room for the model's keys and values."""
        if (wrong := not_paged(self)) is not None:
            raise ValueError("{}; expected {}. {}".format(*wrong))
        return super().init_continuous_batching(*args, **options)  # type: ignore[misc]

    def _upload_modified_files(self: Any, working_dir: Any, *args: Any, **options: Any) -> Any:
        """What transformers pushes to the hub, with our card and not the one that it would write."""
        self._write_companions(working_dir)
        return super()._upload_modified_files(working_dir, *args, **options)  # type: ignore[misc]

    def _write_companions(self, directory: Any) -> None:
        for name, text in getattr(self, "gac_files", {}).items():
            Path(directory, name).write_text(text, encoding="utf-8")
        write_code(Path(directory))
        Path(directory, DIGESTS).unlink(missing_ok=True)  # of what was there before; GAC writes new ones
        if Path(directory, _WEIGHTS).exists():  # transformers leaves the index of shards that it has removed
            Path(directory, f"{_WEIGHTS}.index.json").unlink(missing_ok=True)


def write_code(directory: Path) -> None:
    """Write these files beside a checkpoint's weights."""
    for name in CODE:
        shutil.copyfile(Path(__file__).with_name(name), directory / name)


@contextmanager
def uncollected() -> Iterator[None]:
    """Leave the garbage collector off: it would walk every object of the process, and all new objects stay anyway.

    Afterwards new objects are moved to the oldest generation, by freezing and unfreezing, so that the collector does
    not walk all of them at once. This is left out where somebody keeps objects frozen, which stay frozen.
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
def uninitialised() -> Iterator[None]:
    """Leave out the initialisation of linear weights on the meta device: they have no values, and it takes time.

    Other threads are not disturbed: weights that are not on that device are initialised as always. One thread at a
    time does this, so that what it finds is PyTorch's own and stays so.
    """
    with _CONSTRUCTING:
        yield from _uninitialised()


def _uninitialised() -> Iterator[None]:
    initialise = nn.Linear.reset_parameters

    def reset_parameters(self: nn.Linear) -> None:
        if not self.weight.is_meta:
            initialise(self)

    nn.Linear.reset_parameters = reset_parameters  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Linear.reset_parameters = initialise  # type: ignore[method-assign]


def _check_loaded(source: Any, model: Any, report: Any) -> None:
    """Refuse files that lack a weight, whose values transformers would make up, or hold a stored one twice."""
    if names := sorted(map(str, report["missing_keys"])):
        raise ValueError(
            f"{source}: {names[0]} is missing ({len(names)} in all); expected every weight that config.json describes."
        )
    if others := sorted(report["mismatched_keys"]):
        name, found, expected = others[0]
        raise ValueError(
            f"{source}: {name} has shape {tuple(found)} ({len(others)} such in all); expected {tuple(expected)}, as "
            "config.json describes it."
        )
    stored = stored_modules(model) if report["unexpected_keys"] else {}
    for key in sorted(map(str, report["unexpected_keys"])):
        if own_name(model, key).rpartition(".")[0] in stored:
            raise ValueError(f"{source}: {key} is unexpected; expected tensors as config.json describes the weight.")


def _check_stored(source: Any, model: Any) -> None:
    """Refuse tensors of a storage that stand for no matrix."""
    for name, one in stored_modules(model).items():
        if not any(held.is_meta for held in one.held.values()) and (said := one.storage.flaw(one.held, *one.matrix)):
            raise ValueError(f"{source}: {name}.{said}.")


def _split(source: Any, model: Any, ranks: Ranks) -> None:
    """Leave of a model, loaded whole on the CPU, what this process has of it."""
    if getattr(model, "hf_quantizer", None) is not None:
        raise SplitError(
            f"{source} in {model.hf_quantizer.quantization_config.quant_method} with tp_plan",
            "weights as GAC wrote them",
            "Leave the quantiser out.",
        )
    ranks.check_alike(header_value(model.config, "digest"), "files of digest")
    split(model, ranks)


def _documents(source: Any, options: dict[str, Any]) -> dict[str, str]:
    """The text of those documents that lie beside the weights; ``source`` is a directory or a hub id."""
    if source is None:
        return {}
    paths = {
        name: cached_file(source, name, _raise_exceptions_for_missing_entries=False, **options) for name in DOCUMENTS
    }
    return {name: Path(path).read_text(encoding="utf-8") for name, path in paths.items() if path is not None}


def _share_where_possible(model: Any) -> None:
    """Let the weights that the plan fused share their first GEMMs.

    Quantised or offloaded weights cannot share one; they run by themselves, with the same outputs.
    """
    groups = header_value(model.config, "fused")
    if not groups:
        return
    weights = [model.get_submodule(own_name(model, name)) for names in groups for name in names]
    tensors = (one for weight in weights for one in (*weight.parameters(), *weight.buffers()))
    if getattr(model, "hf_quantizer", None) or any(one.is_meta for one in tensors):
        _logger.warning("weights that read the same input run by themselves: they are quantised or offloaded")
        return
    for names in groups:
        share_gemm(model, [own_name(model, name) for name in names])

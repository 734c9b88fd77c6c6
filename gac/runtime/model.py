"""The transformers classes of compressed models: ``GacLlamaForCausalLM`` and its like, made when first used.

What is wrong with a checkpoint is a ``ValueError``, as everywhere in transformers.
"""

import shutil
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from transformers import CONFIG_MAPPING, AutoConfig

from gac.runtime.architectures import generating_class, known_by
from gac.runtime.contract import COMPRESSED, chooses_code
from gac.runtime.finish import finish
from gac.runtime.header import description_of, header_of, name_in, replace_weights
from gac.runtime.latents.attention import caches_latents
from gac.runtime.parallel.ranks import Ranks, SplitError, ranks_asked_for
from gac.runtime.parallel.splitting import split
from gac.runtime.plain import modeling_gac
from gac.runtime.plain.modeling_gac import Absent, read_documents
from gac.runtime.storage.modules import stored_modules

CODE = "modeling_gac.py"
"""The one Python file of a checkpoint, by which transformers opens it where GAC is not installed."""
_WEIGHTS = "model.safetensors"


class CompressedConfig(modeling_gac.CompressedConfig):
    """A config with the key ``gac``; a mixin before the dense class."""

    @classmethod
    def from_dict(cls: Any, config_dict: dict[str, Any], **options: Any) -> Any:
        """Read a config without the keys that choose code."""
        safe = {name: value for name, value in config_dict.items() if not chooses_code(name)}
        return super().from_dict(safe, **options)


class CompressedModel(modeling_gac.CompressedModel):
    """The architecture with the modules that the key ``gac`` of its config names; a mixin before the dense class.

    Construction replaces the dense weights, so transformers loads shards, dtypes, device maps and quantised weights
    as for any model. A config without the key makes the dense model.
    """

    def _replace_modules(self: Any, header: Any) -> None:
        replace_weights(self, self.config)
        description_of(self, self.config)  # refused here, before weights are read

    @classmethod
    def from_pretrained(cls: Any, source: Any, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """As for any transformers model, but missing weights are an error, and ``tp_plan="auto"`` splits it."""
        ranks = ranks_asked_for(options)
        dense: Any = super(modeling_gac.CompressedModel, cls)
        options["ignore_mismatched_sizes"] = True  # so that they are reported, and refused below
        model, report = dense.from_pretrained(source, *args, output_loading_info=True, **options)
        _check_loaded(source, model, report)
        model.finish_loading(source, read_documents(source, options), ranks)
        return (model, report) if output_loading_info else model

    def finish_loading(self: Any, source: Any, files: dict[str, str], ranks: Ranks | None = None) -> None:
        """Check the tensors that were read, split the model, and make it run as its config describes.

        ``source`` is the directory or hub id, ``files`` the texts of its plan and its card by name, ``ranks`` the
        processes that it is split over, if any.
        """
        for name, module in stored_modules(self).items():
            is_read = not any(tensor.is_meta for tensor in module.tensors.values())
            if is_read and (flaw := module.storage.flaw(module.tensors, *module.matrix)):
                raise ValueError(f"{source}: {name}.{flaw}.")
        self.gac_files = files
        if ranks is not None:
            if getattr(self, "hf_quantizer", None) is not None:
                method = self.hf_quantizer.quantization_config.quant_method
                problem = f"{source} in {method} with tp_plan"
                raise SplitError(problem, "weights as GAC wrote them", "Leave the quantiser out.")
            header = header_of(self.config)
            ranks.check_alike(header and header.digest, "files of digest")
            split(self, ranks)
        finish(self, description_of(self, self.config))

    def resize_token_embeddings(self: Any, *args: Any, **options: Any) -> Any:
        """As for any transformers model; refused where embedding and head are quantised: they cannot get more rows."""
        header = header_of(self.config)
        if header is not None and header.head is not None:
            raise ValueError(
                f"embedding and head are in {header.head.scheme}; expected them in 16 or 32 bits to resize them. "
                "Resize the dense model, and compress that."
            )
        return super().resize_token_embeddings(*args, **options)  # type: ignore[misc]

    def save_pretrained(self: Any, directory: Any, *args: Any, **options: Any) -> None:
        """As for any transformers model, with the plan, the card and the code beside the weights."""
        if self.tp_size is not None:
            raise SplitError(f"a model that is split over {self.tp_size} processes", "a whole one", "Load it whole.")
        super().save_pretrained(directory, *args, **options)

    def _get_static_cache_init_shape(self: Any) -> Any:
        if self.tp_size is not None or caches_latents(self):
            return None
        return super()._get_static_cache_init_shape()  # type: ignore[misc]

    def init_continuous_batching(self: Any, *args: Any, **options: Any) -> Any:
        """As for any transformers model; refused where its paged cache has no room for the model's keys and values."""
        if (problem := _not_paged(self)) is not None:
            raise self._refusal(*problem)
        return super().init_continuous_batching(*args, **options)  # type: ignore[misc]

    def _refusal(self, value: str, expected: str, remedy: str) -> Exception:
        return ValueError(f"{value}; expected {expected}. {remedy}")

    def _upload_modified_files(self: Any, working_dir: Any, *args: Any, **options: Any) -> Any:
        self._write_companions(Path(working_dir))
        return super()._upload_modified_files(working_dir, *args, **options)  # type: ignore[misc]

    def _write_companions(self, directory: Path) -> None:
        super()._write_companions(directory)
        if (directory / _WEIGHTS).exists():  # transformers leaves the index of shards that it has removed
            (directory / f"{_WEIGHTS}.index.json").unlink(missing_ok=True)


def write_code(directory: Path) -> None:
    shutil.copyfile(modeling_gac.__file__, directory / CODE)


def _not_paged(model: Any) -> tuple[str, str, str] | None:
    """Why transformers' paged cache, which has the same heads in every layer, does not fit the model, as an error."""
    config = model.config.get_text_config()
    heads, remedy = config.num_key_value_heads, "Use generate, whose caches take each layer as it is."
    if model.tp_size is not None:
        return f"continuous batching of a model split over {model.tp_size} processes", "a whole model", remedy
    header = header_of(model.config)
    for name in header.modules if header else ():
        attention, _, projection = name_in(model, name).rpartition(".")
        if projection not in ("k_proj", "v_proj"):
            continue
        length = model.get_submodule(attention).head_dim
        module = model.get_submodule(f"{attention}.{projection}")
        head_length = getattr(module, "length", length)
        sizes = module.out_features // head_length, head_length
        if sizes != (heads, length) and not isinstance(module, Absent):
            value = "continuous batching of a model in which {} writes {} heads of {} numbers".format(name, *sizes)
            return value, f"{heads} of {length} in every layer, which is all that its paged cache holds", remedy
    return None


def _check_loaded(source: Any, model: Any, report: Any) -> None:
    if names := sorted(map(str, report["missing_keys"])):
        raise ValueError(
            f"{source}: {names[0]} is missing ({len(names)} in all); expected every weight that config.json describes."
        )
    if mismatched := sorted(report["mismatched_keys"]):
        name, shape, expected = mismatched[0]
        raise ValueError(
            f"{source}: {name} has shape {tuple(shape)} ({len(mismatched)} such in all); expected {tuple(expected)}, "
            "as config.json describes it."
        )
    stored = stored_modules(model) if report["unexpected_keys"] else {}
    for key in sorted(map(str, report["unexpected_keys"])):
        if name_in(model, key).rpartition(".")[0] in stored:
            raise ValueError(f"{source}: {key} is unexpected; expected tensors as config.json describes the weight.")


class Classes(NamedTuple):
    """The classes of one architecture's compressed models, each a subclass of the dense one."""

    config: Any
    base: Any  # None where transformers has none
    causal_lm: Any  # or the multimodal model around one
    factories: dict[str, Any]  # each class by the names of the factories of transformers that make it


@cache
def make_classes(model_type: str, mixin: type, module: str) -> Classes:
    """Make the classes of an architecture's compressed models, which transformers' factories know from then on.

    ``model_type`` is the dense config's, ``mixin`` ``CompressedModel`` or a subclass, ``module`` the name of the module
    in which pickle finds them: its ``__getattr__`` is ``class_named``.
    """
    config = config_class(model_type, module)
    dense: Any = CONFIG_MAPPING[model_type]
    factories = known_by(dense)
    made = {model: _subclass(model, mixin, module, dense, config_class=config) for model in {*factories.values()}}
    AutoConfig.register(config.model_type, config, exist_ok=True)
    for name, model in factories.items():
        getattr(transformers, name).register(config, made[model], exist_ok=True)
    by_name = {"AutoConfig": config} | {name: made[model] for name, model in factories.items()}
    return Classes(config, by_name.get("AutoModel"), made[generating_class(dense)], by_name)


@cache
def config_class(model_type: str, module: str) -> Any:
    """Make the config class of an architecture's compressed models; arguments as for ``make_classes``."""
    dense = CONFIG_MAPPING[model_type]
    return _subclass(dense, CompressedConfig, module, dense, model_type=COMPRESSED + model_type)


def class_named(name: str, mixin: type, module: str) -> Any:
    """Return the compressed class of this name; arguments as for ``make_classes``.

    An AttributeError says if transformers has no class for it.
    """
    plain = getattr(modeling_gac, name, None)
    config: Any = getattr(plain, "config_class", plain)
    if model_type := getattr(config, "model_type", None):
        for made in make_classes(model_type.removeprefix(COMPRESSED), mixin, module).factories.values():
            if made.__name__ == name:
                return made
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _subclass(dense: Any, mixin: type, module: str, config: Any, **body: Any) -> Any:
    other = f"Of{config.__name__}" if getattr(dense, "config_class", config) is not config else ""
    return type(f"Gac{dense.__name__}{other}", (mixin, dense), {"__module__": module, **body})

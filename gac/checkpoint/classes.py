"""The classes of compressed models, by architecture: ``GacLlamaForCausalLM`` and its like, made when first asked for.

A checkpoint's ``model_type`` is the dense one after ``gac_``. ``register`` tells transformers' factories, which
``import gac`` brings about (see ``gac.checkpoint.registration``).
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from gac.models.families import COMPRESSED, supported


@dataclass(frozen=True)
class Names:
    """What transformers calls the classes of an architecture; ours have ``Gac`` before that.

    Attributes:
        model_type: of a compressed config.
        config: the dense config.
        base: the dense model without a head.
        causal_lm: the dense model.
    """

    model_type: str
    config: str
    base: str
    causal_lm: str


@dataclass(frozen=True)
class Classes:
    """The classes of one architecture's compressed models."""

    config: Any
    base: Any
    causal_lm: Any


def names_of(model_type: str) -> Names:
    """The names of an architecture's classes, none of which are imported.

    Args:
        model_type: of the dense config, one of ``supported()``.
    """
    from transformers.models.auto import configuration_auto, modeling_auto

    configs: Any = vars(configuration_auto)["CONFIG_MAPPING_NAMES"]
    bases: Any = modeling_auto.MODEL_MAPPING_NAMES
    causal_lms: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return Names(COMPRESSED + model_type, configs[model_type], bases[model_type], causal_lms[model_type])


@cache
def classes_of(model_type: str) -> Classes:
    """The classes of an architecture's compressed models, which transformers' factories know from then on.

    Args:
        model_type: of the dense config, one of ``supported()``.
    """
    import transformers
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from gac.checkpoint.attach import PlannedModel
    from gac.runtime.modeling import CompressedConfig

    names = names_of(model_type)
    config = _subclass(
        names.config, (CompressedConfig, getattr(transformers, names.config)), model_type=names.model_type
    )
    base, causal_lm = (
        _subclass(name, (PlannedModel, getattr(transformers, name)), config_class=config)
        for name in (names.base, names.causal_lm)
    )
    AutoConfig.register(names.model_type, config, exist_ok=True)
    AutoModel.register(config, base, exist_ok=True)
    AutoModelForCausalLM.register(config, causal_lm, exist_ok=True)
    return Classes(config, base, causal_lm)


def register() -> None:
    """Tell transformers' ``AutoConfig`` of every compressed architecture; its classes are made when one is opened."""
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.models.auto.configuration_auto import AutoConfig

    class Opening(PreTrainedConfig):  # type: ignore[no-untyped-call]
        """Stands for the config of an architecture until one is read."""

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
            return classes_of(cls.model_type.removeprefix(COMPRESSED)).config.from_dict(config_dict, **options)

    for model_type in supported():
        name = COMPRESSED + model_type
        AutoConfig.register(name, _subclass("Config", (Opening,), model_type=name))


def __getattr__(name: str) -> Any:
    """A class by its name, so that models can be pickled and copied to other processes."""
    for model_type in supported() if name.startswith("Gac") else ():
        names = names_of(model_type)
        if name[3:] in (names.config, names.base, names.causal_lm):
            found = classes_of(model_type)
            return {names.config: found.config, names.base: found.base, names.causal_lm: found.causal_lm}[name[3:]]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _subclass(name: str, bases: tuple[Any, ...], **body: Any) -> Any:
    return type(f"Gac{name}", bases, {"__module__": __name__, **body})

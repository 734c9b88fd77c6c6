"""The classes of compressed models where GAC is installed, and how transformers' factories learn of them."""

from typing import Any

from gac.models.families import supported
from gac.runtime.contract import COMPRESSED


def classes_of(model_type: str) -> Any:
    """The ``Classes`` of an architecture's compressed models, which transformers' factories know from then on.

    Args:
        model_type: of the dense config, one of ``supported()``.
    """
    from gac.checkpoint.planned import PlannedModel
    from gac.runtime.classes import make_classes

    return make_classes(model_type, PlannedModel, __name__)


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
        AutoConfig.register(name, type("GacConfig", (Opening,), {"__module__": __name__, "model_type": name}))


def __getattr__(name: str) -> Any:
    """A class by its name, so that models can be pickled and copied to other processes."""
    if not name.startswith("Gac"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gac.checkpoint.planned import PlannedModel
    from gac.runtime.classes import class_named

    return class_named(name, PlannedModel, __name__)

"""The classes of compressed models where GAC is installed, and how transformers' factories learn of them.

``import gac`` loads this module, so transformers and all that needs it are imported when they are first needed.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from gac.runtime.contract import COMPRESSED

_FACTORIES = "transformers.models.auto.configuration_auto"


def classes_of(model_type: str) -> Any:
    """The ``Classes`` of a dense ``model_type``'s compressed models, which transformers' factories then know."""
    from gac.checkpoint.planned import PlannedModel
    from gac.runtime.model import make_classes

    return make_classes(model_type, PlannedModel, __name__)


def auto_map(classes: Any) -> dict[str, str]:
    """Return where the factories of transformers find these classes beside a checkpoint's weights."""
    return {factory: f"modeling_gac.{result.__name__}" for factory, result in classes.factories.items()}


def register_with_transformers() -> None:
    """Register the compressed architectures with ``AutoConfig``: now, or as soon as something loads it.

    transformers has no entry point for plugins, and loading it takes seconds. So what waits is a finder that lets
    Python find the one module that holds the registry, and registers when that has been executed.
    """
    if _FACTORIES in sys.modules:
        register()
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


def register() -> None:
    """Tell ``AutoConfig`` of every compressed architecture; its classes are made when one is opened."""
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.models.auto.configuration_auto import AutoConfig

    from gac.models.families import supported, wrappers

    class Opening(PreTrainedConfig):  # type: ignore[no-untyped-call]
        """Stands for the config of an architecture until one is read."""

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
            return classes_of(cls.model_type.removeprefix(COMPRESSED)).config.from_dict(config_dict, **options)

    for model_type in (*supported(), *wrappers()):
        name = COMPRESSED + model_type
        AutoConfig.register(name, type("GacConfig", (Opening,), {"__module__": __name__, "model_type": name}))


class _Waiting(MetaPathFinder):
    """Finds nothing but the one module, and that only to be told when it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == _FACTORIES else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def __getattr__(name: str) -> Any:
    """A class by its name, so that models can be pickled and copied to other processes."""
    if not name.startswith("Gac"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gac.checkpoint.planned import PlannedModel
    from gac.runtime.model import class_named

    return class_named(name, PlannedModel, __name__)

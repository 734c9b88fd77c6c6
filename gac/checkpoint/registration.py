"""``import gac`` makes transformers open compressed checkpoints, without loading transformers."""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_FACTORIES = "transformers.models.auto.configuration_auto"


def register_with_transformers() -> None:
    """Register the compressed architectures with ``AutoConfig``: now, or as soon as something loads it.

    transformers has no entry point for plugins, and loading it takes seconds. So what waits is a finder that lets
    Python find the one module that holds the registry, and registers when that has been executed.
    """
    if _FACTORIES in sys.modules:
        _register()
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


def _register() -> None:
    importlib.import_module("gac.checkpoint.classes").register()


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
                _register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec

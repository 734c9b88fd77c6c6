"""``import gac`` makes transformers open compressed checkpoints, without loading transformers."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
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

    def __init__(self) -> None:
        self._asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _FACTORIES or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader, self)
        return spec


class _ThenRegister(Loader):
    """The module's own loader, which steps back into its place, and then the registration."""

    def __init__(self, loader: Loader, waiting: _Waiting) -> None:
        self._loader, self._waiting = loader, waiting

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        if self._waiting in sys.meta_path:
            sys.meta_path.remove(self._waiting)
            _register()

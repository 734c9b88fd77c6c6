"""The code that a checkpoint carries, so that transformers alone can open it: written from GAC's own, never by hand."""

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from textwrap import indent

import gac
from gac.checkpoint.classes import Names, names_of
from gac.runtime.serving import show_to_serve

FILE = "modeling_gac"
_ROOT = "gac.runtime.modeling"
_HEADER = '''"""A model that GAC {version} compressed, for transformers' trust_remote_code=True. Licence: Apache-2.0.

Written by GAC from its own modules. Where GAC is imported, transformers uses those and not this file.
"""
'''
_ASKED = "from transformers.utils import is_torch_available"
_CONDITION = """
# Always so. Each time that transformers opens this file it searches it for imports, but not below this line.
if is_torch_available():
"""


def auto_map(model_type: str) -> dict[str, str]:
    """What ``config.json`` says of the file: the class for each of transformers' factories."""
    names = names_of(model_type)
    found = {"AutoConfig": names.config, "AutoModel": names.base, "AutoModelForCausalLM": names.causal_lm}
    return {auto: f"{FILE}.Gac{name}" for auto, name in found.items()}


def source_for(model_type: str) -> str:
    """One Python file, without imports of GAC: the classes of a compressed model of this architecture.

    Args:
        model_type: of the dense config.
    """
    imports, definitions = _collected()
    names = names_of(model_type)
    theirs = sorted({"AutoModel", "AutoModelForCausalLM", names.config, names.base, names.causal_lm})
    head = sorted({*imports, f"from transformers import {', '.join(theirs)}", _ASKED})
    body = indent("\n\n\n".join([*definitions, _classes(names)]), "    ")
    return "\n".join([_HEADER.format(version=gac.__version__), *head, _CONDITION + body, ""])


def _classes(names: Names) -> str:
    return f'''class Gac{names.config}(CompressedConfig, {names.config}):
    model_type = "{names.model_type}"


class Gac{names.base}(CompressedModel, {names.base}):
    config_class = Gac{names.config}


class Gac{names.causal_lm}(CompressedModel, {names.causal_lm}):
    config_class = Gac{names.config}


# As transformers would, once it has looked through this file for the model as it did for the config: so it need not.
for auto, model in ((AutoModel, Gac{names.base}), (AutoModelForCausalLM, Gac{names.causal_lm})):
    auto.register(Gac{names.config}, model, exist_ok=True)
    model.register_for_auto_class(auto.__name__)
show_to_serve(Gac{names.causal_lm})'''


@cache
def _collected() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Import statements, and definitions, each after those it uses."""
    found = _Collector()
    for name in _Module(_ROOT).definitions:
        found.add(_ROOT, name)
    found.add(show_to_serve.__module__, show_to_serve.__name__)
    return tuple(found.imports), tuple(found.definitions.values())


class _Module:
    """The top level of a module's source: what it defines and what it imports, by name."""

    def __init__(self, name: str) -> None:
        self.text = inspect.getsource(import_module(name))
        self.definitions: dict[str, ast.stmt] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        for node in ast.parse(self.text).body:
            for defined in _defined(node):
                self.definitions[defined] = node
            if isinstance(node, ast.ImportFrom):
                self.imports |= {alias.asname or alias.name: (node.module or "", alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                self.imports |= {alias.asname or alias.name: ("", alias.name) for alias in node.names}

    def source(self, name: str) -> str:
        node = self.definitions[name]
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        return "\n".join(self.text.splitlines()[first - 1 : node.end_lineno])


class _Collector:
    """Definitions that are needed, from whichever module of GAC, and the imports of everything else."""

    def __init__(self) -> None:
        self.imports: dict[str, None] = {}
        self.definitions: dict[str, str] = {}
        self._homes: dict[str, str] = {}
        self._modules: dict[str, _Module] = {}

    def add(self, home: str, name: str) -> None:
        """A definition, after those that it uses."""
        if name in self._homes:
            assert self._homes[name] == home, f"{name} is defined in {home} and in {self._homes[name]}"
            return
        self._homes[name] = home
        module = self._modules.setdefault(home, _Module(home))
        for used in sorted(_used(module.definitions[name])):
            if used in module.definitions:
                self.add(home, used)
            elif used in module.imports:
                self._import(*module.imports[used])
        self.definitions[name] = module.source(name)

    def _import(self, module: str, name: str) -> None:
        if module.partition(".")[0] == "gac":
            self.add(module, name)
        else:
            self.imports[f"from {module} import {name}" if module else f"import {name}"] = None


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _used(node: ast.stmt) -> set[str]:
    return {found.id for found in ast.walk(node) if isinstance(found, ast.Name)}

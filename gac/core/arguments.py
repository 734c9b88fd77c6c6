"""What public functions are given, looked over by their type hints before anything is done."""

import builtins
import os
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache, wraps
from inspect import Parameter, signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from gac.core.errors import GacError

P = ParamSpec("P")
R = TypeVar("R")
_SHOWN = 80


@dataclass(frozen=True)
class Least:
    """In a hint, ``Annotated[int, Least(1)]``: the smallest number that is taken."""

    number: int


@dataclass(frozen=True)
class Most:
    """In a hint: the largest number that is taken."""

    number: int


_MOST = Most(10**12)  # nothing that is counted here ends within a year beyond it
Count = Annotated[int, Least(1), _MOST]
"""A whole number, 1 or more."""
CountOrZero = Annotated[int, Least(0), _MOST]
"""A whole number, 0 or more."""


def is_whole(value: object) -> bool:
    """Whether it is one integer, of Python, NumPy or torch; True and False are none."""
    return hasattr(value, "__index__") and _is_single(value)


def is_number(value: object) -> bool:
    """Whether it is one real number, of Python, NumPy or torch; True and False are none."""
    return hasattr(value, "__float__") and _is_single(value)


def _is_single(value: object) -> bool:
    return not isinstance(value, bool) and not getattr(value, "shape", ())


def plain(value: Any) -> Any:
    """A single value of NumPy or torch as Python's own, which JSON holds; anything else as it is."""
    return value.item() if hasattr(value, "item") and getattr(value, "shape", None) == () else value


def checked(call: Callable[P, R]) -> Callable[P, R]:
    """Refuse arguments of a function that its type hints do not allow.

    Looked at are classes, unions, literals, the entries of collections and mappings, and ``Least``. Iterables may be
    read but once, so their entries are not. Names that only type checkers know allow anything. Single values of NumPy
    and torch become Python's own.

    Raises:
        GacError: by the function, naming the argument.
    """
    known = signature(call)

    @wraps(call)
    def looked_over(*args: P.args, **options: P.kwargs) -> R:
        hints = _hints(call)
        bound = known.bind(*args, **options)
        for name, value in bound.arguments.items():
            bound.arguments[name] = value = plain(value)
            if name in hints and known.parameters[name].kind is not Parameter.VAR_KEYWORD:
                _check(name, value, hints[name], call.__name__, GacError)
        return call(*bound.args, **bound.kwargs)

    return looked_over


def check_fields(record: Any, error: type[GacError] = GacError) -> None:
    """Refuse a dataclass whose fields are not what its hints allow.

    Raises:
        GacError: of the class ``error``, naming the field.
    """
    kind: Any = type(record)
    for one in fields(record):
        _check(one.name, getattr(record, one.name), _hints(kind)[one.name], kind.__name__, error)


def _check(name: str, value: object, hint: Any, where: str, error: type[GacError]) -> None:
    if not _allows(hint, value):
        shown = f"={value!r}" if len(repr(value)) <= _SHOWN else f" of type {type(value).__name__}"
        raise error(f"{where}({name}{shown})", _described(hint), "Correct it.")


class _Names(dict[str, Any]):
    """The names of a module; those that it imports for type checkers alone allow anything."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, object)


@cache
def _hints(owner: Hashable) -> dict[str, Any]:
    return get_type_hints(owner, localns=_Names(vars(sys.modules[owner.__module__])), include_extras=True)


def _allows(hint: Any, value: Any) -> bool:
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(_allows(one, value) for one in inner)
    if kind is Literal:
        return any(value == one and type(value) is type(one) for one in inner)
    if kind is Annotated:
        return _allows(inner[0], value) and all(
            value >= limit.number if isinstance(limit, Least) else value <= limit.number for limit in inner[1:]
        )
    if kind is not None:
        return _allows_each(kind, inner, value)
    if hint in (int, float, Path):
        return {int: is_whole, float: is_number, Path: _is_path}[hint](value)
    return hint is Any or not isinstance(hint, type) or isinstance(value, hint)


def _allows_each(kind: Any, inner: tuple[Any, ...], value: Any) -> bool:
    """Of a hint such as ``Mapping[str, Plan]``: a string is no collection of strings."""
    if not isinstance(kind, type):
        return True
    taken: Any = (tuple, list) if kind is tuple else kind
    if not isinstance(value, taken) or isinstance(value, (str, bytes)):
        return False
    if isinstance(value, Mapping):
        return issubclass(kind, Mapping) and all(
            _allows(inner[0], key) and _allows(inner[1], value[key]) for key in value
        )
    if kind is tuple and inner[-1] is not Ellipsis and len(inner) != len(value):
        return False
    return not isinstance(value, Collection) or all(_allows(inner[0], one) for one in value)


def _is_path(value: object) -> bool:
    return isinstance(value, os.PathLike)


_WORDS = {
    NoneType: "None",
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    Path: "a path",
}


def _described(hint: Any) -> str:
    """``a Plan, a string or a path``."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        *others, last = dict.fromkeys(map(_described, inner))
        return f"{', '.join(others)} or {last}" if others else last
    if kind is Literal:
        return " or ".join(map(repr, inner))
    if kind is Annotated:
        limits = [f"{limit.number:,}" for limit in inner[1:]]
        last = "up to {}" if isinstance(inner[1], Most) else "{} or more"
        return f"{_described(inner[0])}, {' to '.join(limits) if len(limits) > 1 else last.format(*limits)}"
    if kind is not None and issubclass(kind, Mapping):
        return f"a mapping from {_described(inner[0])} to {_described(inner[1])}"
    if kind is not None and issubclass(kind, Iterable):
        return f"several (each {_described(inner[0])})"
    return _WORDS[hint] if hint in _WORDS else f"{'an' if hint.__name__[0] in 'AEIOU' else 'a'} {hint.__name__}"

"""Check the arguments of public functions by their type hints."""

import builtins
import os
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache, wraps
from inspect import BoundArguments, Parameter, signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Le

from gac.core.errors import GacError

P = ParamSpec("P")
R = TypeVar("R")
_SHOWN = 80
_signature = cache(signature)

Most = Le
_MOST = Most(10**12)  # a loop over more would take years
Count = Annotated[int, Ge(1), _MOST]  # an integer, 1 or more
CountOrZero = Annotated[int, Ge(0), _MOST]  # an integer, 0 or more


def is_whole(value: object) -> bool:
    """True for a single integer of Python, NumPy or torch, but not for True and False."""
    return hasattr(value, "__index__") and _is_single(value)


def is_number(value: object) -> bool:
    """True for a single real number of Python, NumPy or torch, but not for True and False."""
    return hasattr(value, "__float__") and _is_single(value)


def _is_single(value: object) -> bool:
    return not isinstance(value, bool) and not getattr(value, "shape", ())


def plain(value: Any) -> Any:
    """Convert a single value of NumPy or torch to Python's type; return anything else as it is."""
    return value.item() if hasattr(value, "item") and getattr(value, "shape", None) == () else value


def checked(call: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function to refuse arguments that its type hints do not allow, see ``check_arguments``."""

    @wraps(call)
    def validated(*args: P.args, **options: P.kwargs) -> R:
        bound = check_arguments(call, args, options)
        return call(*bound.args, **bound.kwargs)

    return validated


def check_arguments(call: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> BoundArguments:
    """Bind a function's arguments; a GacError names the first that its type hints do not allow.

    Classes, unions, literals, entries of collections and mappings, and limits are checked; iterables, which may be
    read only once, are not read. Names that only type checkers know allow anything. Single values of NumPy and torch
    become Python's. (pydantic's ``validate_call`` copies collections, coerces, and reports each member of a union.)
    """
    hints, bound = _hints(call), _signature(call).bind(*args, **options)
    for name, value in bound.arguments.items():
        bound.arguments[name] = value = plain(value)
        if name in hints and bound.signature.parameters[name].kind is not Parameter.VAR_KEYWORD:
            _check(name, value, hints[name], call.__name__, GacError)
    return bound


def check_fields(record: Any, error: type[GacError] = GacError) -> None:
    """Make a dataclass's values ``plain``; raise ``error``, naming the field, where its hints do not allow one."""
    kind: Any = type(record)
    for field in fields(record):
        value = plain(getattr(record, field.name))
        object.__setattr__(record, field.name, value)
        _check(field.name, value, _hints(kind)[field.name], kind.__name__, error)


def _check(name: str, value: object, hint: Any, where: str, error: type[GacError]) -> None:
    if not _allows(hint, value):
        shown = f"={value!r}" if len(repr(value)) <= _SHOWN else f" of type {type(value).__name__}"
        raise error(f"{where}({name}{shown})", _described(hint), "Correct it.")


class _Names(dict[str, Any]):
    """The names of a module; unknown ones, imported for type checkers alone, allow anything."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, object)


@cache
def _hints(owner: Hashable) -> dict[str, Any]:
    return get_type_hints(owner, localns=_Names(vars(sys.modules[owner.__module__])), include_extras=True)


def _allows(hint: Any, value: Any) -> bool:
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(_allows(option, value) for option in inner)
    if kind is Literal:
        return any(value == option and type(value) is type(option) for option in inner)
    if kind is Annotated:
        return _allows(inner[0], value) and all(
            value >= limit.ge if isinstance(limit, Ge) else value <= limit.le for limit in inner[1:]
        )
    if kind is not None:
        return _allows_each(kind, inner, value)
    if hint in (int, float):
        return is_whole(value) if hint is int else is_number(value)
    if hint is Path:
        return isinstance(value, os.PathLike)
    return hint is Any or not isinstance(hint, type) or isinstance(value, hint)


def _allows_each(kind: Any, inner: tuple[Any, ...], value: Any) -> bool:
    if not isinstance(kind, type):
        return True
    accepted: Any = (tuple, list) if kind is tuple else kind
    if not isinstance(value, accepted) or isinstance(value, (str, bytes)):
        return False
    if isinstance(value, Mapping):
        return issubclass(kind, Mapping) and all(
            _allows(inner[0], key) and _allows(inner[1], value[key]) for key in value
        )
    if kind is tuple and inner[-1] is not Ellipsis and len(inner) != len(value):
        return False
    return not isinstance(value, Collection) or all(_allows(inner[0], entry) for entry in value)


_WORDS = {str: "a string", int: "a whole number", float: "a number", bool: "True or False", Path: "a path"}
_WORDS |= {NoneType: "None"}


def _described(hint: Any) -> str:
    """``a Plan, a string or a path``."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        *others, last = dict.fromkeys(map(_described, inner))
        return f"{', '.join(others)} or {last}" if others else last
    if kind is Literal:
        return " or ".join(map(repr, inner))
    if kind is Annotated:
        limits = [f"{limit.ge if isinstance(limit, Ge) else limit.le:,}" for limit in inner[1:]]
        last = "up to {}" if isinstance(inner[1], Most) else "{} or more"
        return f"{_described(inner[0])}, {' to '.join(limits) if len(limits) > 1 else last.format(*limits)}"
    if kind is not None and issubclass(kind, Mapping):
        return f"a mapping from {_described(inner[0])} to {_described(inner[1])}"
    if kind is not None and issubclass(kind, Iterable):
        return f"several (each {_described(inner[0])})"
    return _WORDS[hint] if hint in _WORDS else f"{'an' if hint.__name__[0] in 'AEIOU' else 'a'} {hint.__name__}"

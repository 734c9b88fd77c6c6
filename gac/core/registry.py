"""Registries of forms, schemes, methods, rules and operators: by name or as an object.

Shipped objects are named by their place, ``module:attribute``, and imported when they are first used. So names can be
listed without torch, and rooms that the core does not import can still be found by name. Objects of other packages can
be found likewise, by entry points.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gac.core.errors import GacError, did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z][\w.+:-]*", re.ASCII)


class Registry(Generic[T]):
    """The objects of one kind (the ``seam``: ``form``) by name; ``check`` refuses those that break the contract.

    A name may have a parameter after a colon (``asvd:0.5``): the object of the name before the colon makes the one
    with that parameter, by its method ``with_parameter(text)``.

    Installed packages add objects, or classes without arguments, by entry points of the ``group``, where there is one.
    A package's code runs when its name is first asked for.
    """

    def __init__(
        self,
        seam: str,
        shipped: Mapping[str, str],
        check: Callable[[Any], None],
        error: type[GacError] = GacError,
        group: str | None = None,
    ) -> None:
        self._seam, self._shipped, self.check, self._error = seam, dict(shipped), check, error
        self._group, self._known = group, dict[str, T]()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self._shipped, *self._known)))

    def __iter__(self) -> Iterator[T]:
        return map(self.get, self.names)

    def get(self, name: str | T, also: Iterable[str] = ()) -> T:
        """Return the object of this name; an object is registered first if it is not yet.

        The error for an unknown name lists ``also`` further names that the caller accepts.
        """
        if not isinstance(name, str):
            return self.register(name)
        kind, colon, parameter = name.partition(":")
        if kind not in self.names:
            self._register_installed(kind)
        if name in self._known:
            return self._known[name]
        if name in self._shipped:
            shipped: Any = resolve_name(self._shipped[name])
            self._known[name] = shipped() if isinstance(shipped, type) else shipped
            return self._known[name]
        if colon and kind in self.names and (make := getattr(self.get(kind), "with_parameter", None)):
            parametrised: T = make(parameter)
            return parametrised
        names = dict.fromkeys((*self.names, *self._installed(), *also))
        remedy = did_you_mean(name, names, f"Correct the name, or register your own {self._seam} (docs/extending.md).")
        raise self._error(f"{self._seam} {name!r} is unknown", f"one of {', '.join(names)}", remedy)

    def _installed(self) -> "dict[str, EntryPoint]":
        if self._group is None:
            return {}
        from importlib.metadata import entry_points  # takes longer than the rest of this module

        return {point.name: point for point in entry_points(group=self._group)}

    def _register_installed(self, name: str) -> None:
        if (point := self._installed().get(name)) is None:
            return
        source = f"{self._seam} {name!r} of an installed package, {point.value}"
        try:
            loaded: Any = point.load()
            entry = loaded() if isinstance(loaded, type) else loaded
        except (ImportError, AttributeError, TypeError) as failure:
            expected = f"an object, or a class without arguments, for the entry point of {self._group}"
            raise self._error(f"{source}: {failure}", expected, "Repair or uninstall the package.") from failure
        self.check(entry)
        if entry.name != name:
            problem, expected = f"{source}, which calls itself {entry.name!r}", "the same name in both places"
            raise self._error(problem, expected, "Rename the entry point or the object.")
        self.register(entry)

    def name(self, entry: str | T) -> str:
        """Return the name under which ``get`` finds this again; raises as it does."""
        return str(self.get(entry).name)  # type: ignore[attr-defined]

    def register(self, entry: T) -> T:
        """Register an object under its ``name``, for this process, in place of an earlier one of the same class.

        Returns it; a GacError says if it breaks the contract, or if another one has that name.
        """
        self.check(entry)
        name: str = entry.name  # type: ignore[attr-defined]
        kind, colon, _ = name.partition(":")
        if colon and kind in self.names:  # looked up by its kind
            return entry
        # A class that is defined again, as in a notebook, is the same one.
        if name in self.names and _place(self.get(name)) != _place(entry):
            problem, remedy = f"{self._seam} {name!r} is registered already", f"taken are {', '.join(self.names)}."
            raise self._error(problem, "a name of its own", f"Rename it; {remedy}")
        self._known[name] = entry
        return entry


def _place(known: object) -> tuple[str, str]:
    return type(known).__module__, type(known).__qualname__


def check_contract(seam: str, entry: object, members: Iterable[str], base: type) -> None:
    """Raise GacError for an object that is no ``base``, or that lacks a member or a valid name (for files, options)."""
    missing = [member for member in ("name", *members) if not hasattr(entry, member)]
    if isinstance(entry, type) or missing or not isinstance(entry, base):
        lacks = f", which lacks {', '.join(missing)}" if missing else ""
        what = f"the class {entry.__name__}" if isinstance(entry, type) else f"a {type(entry).__name__}"
        raise GacError(
            f"{what} as a {seam}{lacks}",
            f"an instance of a subclass of {base.__module__}.{base.__name__}",
            f"See docs/extending.md; gac.testing checks the whole contract of a {seam}.",
        )
    name = entry.name  # type: ignore[attr-defined]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        expected = "letters, digits and . _ - + : alone, beginning with a letter"
        raise GacError(f"a {seam} with the name {name!r}", expected, "Rename it.")

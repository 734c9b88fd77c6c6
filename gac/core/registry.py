"""Names of what can be exchanged: forms, schemes, methods, rules. A registry takes a name or an object.

What GAC ships is named by where it is, ``module:attribute``, and imported when it is first asked for. So names can be
listed without torch, and rooms that nothing of the core imports can still be asked for by name.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar

from gac.core.errors import GacError, did_you_mean

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z][\w.+:-]*", re.ASCII)


class Registry(Generic[T]):
    """The objects of one seam by name.

    A name may carry a parameter after a colon (``asvd:0.5``): the object of the name before the colon makes the one
    with that parameter, by its method ``with_parameter(text)``.

    Args:
        seam: what one of them is called in errors, ``form`` for example.
        shipped: the names of those that come with GAC, and where they are.
        check: refuses an object that breaks the contract of the seam; raises ``GacError``.
        error: raised for names that are unknown.
    """

    def __init__(
        self,
        seam: str,
        shipped: Mapping[str, str],
        check: Callable[[Any], None],
        error: type[GacError] = GacError,
    ) -> None:
        self._seam, self._shipped, self.check, self._error = seam, dict(shipped), check, error
        self._known: dict[str, T] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """All that are known, those of GAC first."""
        return tuple(dict.fromkeys((*self._shipped, *self._known)))

    def __iter__(self) -> Iterator[T]:
        return map(self.get, self.names)

    def get(self, asked: str | T, beside: Iterable[str] = ()) -> T:
        """The object of this name; an object is registered first where it is not yet.

        Args:
            beside: names that the caller takes too, for the error to list.

        Raises:
            GacError: the name is unknown, its parameter is none, or the object breaks the contract of the seam.
        """
        if not isinstance(asked, str):
            return self.register(asked)
        if asked in self._known:
            return self._known[asked]
        kind, colon, parameter = asked.partition(":")
        if asked in self._shipped:
            found: Any = resolve_name(self._shipped[asked])
            self._known[asked] = found() if isinstance(found, type) else found
            return self._known[asked]
        if colon and kind in self.names and (make := getattr(self.get(kind), "with_parameter", None)):
            made: T = make(parameter)
            return made
        names = (*self.names, *beside)
        remedy = did_you_mean(asked, names, f"Correct the name, or register your own {self._seam}.")
        raise self._error(f"{self._seam} {asked!r} is unknown", f"one of {', '.join(names)}", remedy)

    def name(self, asked: str | T) -> str:
        """The name under which ``get`` finds this again; raises as it does."""
        return str(self.get(asked).name)  # type: ignore[attr-defined]

    def register(self, own: T) -> T:
        """Make an object known under its ``name``, for this process, in place of an earlier one of the same class.

        Returns:
            The object itself.

        Raises:
            GacError: it breaks the contract of the seam (names what is missing), or another one has that name.
        """
        self.check(own)
        name: str = own.name  # type: ignore[attr-defined]
        kind, colon, _ = name.partition(":")
        if colon and kind in self.names:  # found by its kind
            return own
        if name in self.names and _place(self.get(name)) != _place(own):
            raise self._error(
                f"{self._seam} {name!r} is registered already",
                "a name of its own",
                f"Rename it; taken are {', '.join(self.names)}.",
            )
        self._known[name] = own
        return own


def _place(known: object) -> tuple[str, str]:
    """Where the class is: a class that is defined again, as in a notebook, is the same one."""
    return type(known).__module__, type(known).__qualname__


def check_contract(seam: str, own: object, members: Iterable[str], base: type) -> None:
    """Refuse an object that is no ``base``, or that lacks a member or a name; names go into files and options.

    Raises:
        GacError: names what is missing.
    """
    missing = [member for member in ("name", *members) if not hasattr(own, member)]
    if isinstance(own, type) or missing or not isinstance(own, base):
        lacks = f", which lacks {', '.join(missing)}" if missing else ""
        what = f"the class {own.__name__}" if isinstance(own, type) else f"a {type(own).__name__}"
        raise GacError(
            f"{what} as a {seam}{lacks}",
            f"an instance of a subclass of {base.__module__}.{base.__name__}",
            f"See docs/extending.md; gac.testing checks the whole contract of a {seam}.",
        )
    name = own.name  # type: ignore[attr-defined]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        expected = "letters, digits and . _ - + : alone, beginning with a letter"
        raise GacError(f"a {seam} with the name {name!r}", expected, "Rename it.")

"""How the numbers of a weight are stored and multiplied: one folder a scheme."""

from gac.core.errors import PlanError
from gac.core.registry import Registry, check_contract
from gac.schemes.base import Scheme, StorageSpec

__all__ = ["DEFAULT_SCHEME", "SCHEMES", "Scheme", "StorageSpec", "scheme_named", "scheme_timed_as"]

SCHEMES: Registry[Scheme] = Registry(
    "scheme",
    {
        "bf16": "gac.schemes.bf16.spec:Bf16",
        "fp8": "gac.schemes.float8.spec:Float8",
        "w8a8": "gac.schemes.int8.spec:Int8",
        "w8a16": "gac.schemes.integers.spec:W8A16",
        "w4a16": "gac.schemes.integers.spec:W4A16",
        "w3a16": "gac.schemes.integers.spec:W3A16",
        "w2a16": "gac.schemes.integers.spec:W2A16",
    },
    lambda own: check_contract("scheme", own, ("dtype", "bits"), Scheme),
    PlanError,
)
"""Every scheme by name."""

DEFAULT_SCHEME = "bf16"
"""How numbers are stored where nothing else is asked for: as they were loaded, counted as 16 bits."""


def scheme_named(name: str) -> Scheme:
    """The scheme of this name.

    Raises:
        PlanError: there is no such scheme.
    """
    return SCHEMES.get(name)


def scheme_timed_as(dtype: str) -> Scheme | None:
    """The scheme with a storage that latency tables call so; None where none is known.

    Where schemes have a parameter, their dtype ends in it as their name does: ``w4a16:64``.

    Raises:
        PlanError: the parameter is none.
    """
    kind, colon, parameter = dtype.partition(":")
    stored = {one.dtype: one for one in SCHEMES if one.storage is not None}
    if colon and dtype not in stored:
        make = getattr(stored.get(kind), "with_parameter", None)
        found: Scheme | None = None if make is None else make(parameter)
        return found
    return stored.get(dtype)

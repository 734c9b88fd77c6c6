"""Number formats of weights: how they are stored and multiplied."""

from gac.core.errors import PlanError
from gac.core.registry import Registry, check_contract
from gac.models.sites import Weight
from gac.schemes.base import Scheme, StorageSpec

__all__ = ["DEFAULT_SCHEME", "SCHEMES", "Scheme", "StorageSpec", "scheme_named", "scheme_of", "scheme_timed_as"]

SCHEMES: Registry[Scheme] = Registry(
    "scheme",
    {
        "bf16": "gac.schemes.base:Bf16",
        "fp8": "gac.schemes.eight_bits:Float8",
        "fp8_block": "gac.schemes.eight_bits:Float8Blocks",
        "w8a8": "gac.schemes.eight_bits:Int8",
        "w8a16": "gac.schemes.integers:W8A16",
        "w4a16": "gac.schemes.integers:W4A16",
        "w3a16": "gac.schemes.integers:W3A16",
        "w2a16": "gac.schemes.integers:W2A16",
        "nvfp4a16": "gac.schemes.floats4:NVFP4A16",
        "mxfp4a16": "gac.schemes.floats4:MXFP4A16",
    },
    lambda scheme: check_contract("scheme", scheme, ("dtype", "bits"), Scheme),
    PlanError,
)
"""Every scheme by name."""

DEFAULT_SCHEME = "bf16"
"""The scheme of weights by default: numbers as they were loaded, counted as 16 bits."""


scheme_named = SCHEMES.get
"""The scheme of a name; PlanError if there is none."""


def scheme_of(scheme: Scheme, weight: Weight) -> Scheme:
    """The scheme of a weight in a site in this scheme: a router, which no other takes, stays in 16 bits."""
    return scheme_named(DEFAULT_SCHEME) if weight.is_routed and not weight.experts else scheme


def scheme_timed_as(dtype: str) -> Scheme | None:
    """The scheme with a storage that has this name in latency tables; None: there is none.

    A scheme with a parameter has it in its dtype too: ``w4a16:64``.
    """
    kind, colon, parameter = dtype.partition(":")
    stored = {scheme.dtype: scheme for scheme in SCHEMES if scheme.storage is not None}
    if colon and dtype not in stored and (make := getattr(stored.get(kind), "with_parameter", None)):
        scheme: Scheme = make(parameter)
        return scheme
    return stored.get(dtype)

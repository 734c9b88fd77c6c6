"""The key ``gac`` of a checkpoint's ``config.json``: every module that is no longer dense, as the plan decided."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gac.compression.modules import planned_sites, shared_names
from gac.errors import CheckpointError
from gac.forms import form_named
from gac.io import from_json
from gac.models.sites import Site
from gac.plan import Plan, WeightChoice
from gac.runtime.contract import SCHEMA
from gac.schemes import DEFAULT_SCHEME

_STRICT = {"extra": "forbid"}


@dataclass(frozen=True)
class Module:
    """What one weight became: the plan's form, dim and scheme, and the module that runs it with its sizes."""

    form: str
    dim: int
    module: str
    sizes: dict[str, int]
    scheme: str = DEFAULT_SCHEME
    __pydantic_config__ = _STRICT

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in sorted(self.sizes.items()))
        return f"{self.form} with dim {self.dim}, {self.module}({sizes})"


@dataclass(frozen=True)
class Header:
    """All of them by name, the names of those that share their first GEMM, and the SHA-256 of ``plan.json``.

    ``decode_kernel``: what runs GEMMs of one row. ``digest``: see ``gac.checkpoint.digest``; empty in a header that was
    just made.
    """

    schema_version: int
    modules: dict[str, Module]
    fused: tuple[tuple[str, ...], ...]
    plan: str
    decode_kernel: Literal["torch", "triton"] = "torch"
    digest: str = ""
    __pydantic_config__ = _STRICT


def header_of(plan: Plan, sites: Sequence[Site], digest: str = "") -> Header:
    """What the plan makes of a model with its family's ``sites``; ``digest`` is that of the plan's file."""
    modules = {choice.name: _module(choice) for choice in plan.weights if choice.changed}
    fused = shared_names(planned_sites(plan, sites))
    return Header(SCHEMA, modules, fused, digest, plan.recipe.deployment.decode_kernel)


def read_header(content: Any, where: str) -> Header:
    """The key as it stands in a file, strictly.

    Args:
        content: the value of the key.
        where: how to name it in an error.

    Raises:
        CheckpointError: it is of another schema version, or no such header.
    """
    check_version(content, where)
    return from_json(Header, json.dumps(content), where, CheckpointError)


def check_version(content: Any, where: str) -> None:
    """Refuse a key of another schema version; whatever else is wrong with it is seen when it is read.

    Args:
        content, where: as for ``read_header``.

    Raises:
        CheckpointError: it is of another one.
    """
    version = content.get("schema_version") if isinstance(content, dict) else SCHEMA
    if isinstance(version, int) and version != SCHEMA:
        raise CheckpointError(
            f"{where}: schema version {version}",
            f"version {SCHEMA}",
            "Open it with the version of GAC that wrote it, or compress the model again with its plan.json.",
        )


def _module(choice: WeightChoice) -> Module:
    spec = form_named(choice.form).module(choice.weight, choice.dim)
    return Module(choice.form, choice.dim, spec.module, dict(spec.sizes), choice.scheme)

"""Whether the files of a checkpoint belong together: its plan, the key ``gac`` of its config, and the dims in that."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gac.checkpoint.header import Header, header_of, read_header
from gac.errors import CheckpointError, GacError
from gac.models.families import family_of
from gac.models.sites import Site
from gac.plan import Plan


def digest_of(text: str | bytes) -> str:
    """SHA-256 of a plan's file."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def agreed_plan(read: Callable[[], Plan], config: Any, source: Any, where: str) -> Plan:
    """The plan of a checkpoint, with which the key ``gac`` of its config and the dims in it agree.

    Args:
        read: reads the plan.
        source: how to name the checkpoint in an error.
        where: how to name the key.

    Raises:
        CheckpointError: they do not, or one of them is damaged.
    """
    header = read_header(getattr(config, "gac", None), where)
    plan = own_plan(read)
    check_agrees(header, plan, family_of(config).sites(config), source)
    return plan


def own_plan(read: Callable[[], Plan]) -> Plan:
    """What ``read`` reads, the plan of a checkpoint.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return read()
    except GacError as failure:
        raise CheckpointError(failure.given, failure.expected, "Save the model again.") from failure


def check_digest(source: Any, text: str | None, digest: Any) -> None:
    """Refuse a ``plan.json`` that is missing, or not the one whose digest ``config.json`` has.

    Args:
        source: how to name the checkpoint in an error.

    Raises:
        CheckpointError: it is.
    """
    if text is None:
        raise CheckpointError(f"{source} has no plan.json", "every file that gac.save wrote", "Copy it whole.")
    if digest_of(text) != digest:
        raise contradiction(
            source, f"plan.json has digest {digest_of(text)[:12]}", f"{str(digest)[:12]}, as config.json says"
        )


def check_agrees(header: Header, plan: Plan, sites: Sequence[Site], source: Any) -> None:
    """The plan's weights are weights of the config, with its dims, and the modules that the config names the plan's.

    Args:
        header: what the config says.
        sites: those of its family.
        source: how to name what both were read from.

    Raises:
        CheckpointError: names the first that is not.
    """
    _check_against_family(source, sites, plan)
    planned = replace(header_of(plan, sites, header.plan), digest=header.digest)
    if header == planned:
        return
    stated, due = header.modules, planned.modules
    names = sorted(name for name in {*stated, *due} if stated.get(name) != due.get(name))
    given, expected = (
        f"{names[0]} {one.modules.get(names[0], 'dense')}"
        if names
        else f"fused {list(one.fused)}, decode_kernel {one.decode_kernel}"
        for one in (header, planned)
    )
    raise contradiction(source, f"config.json has {given}", f"{expected}, as plan.json says")


def _check_against_family(source: Any, sites: Sequence[Site], plan: Plan) -> None:
    weights = {weight.name: weight for site in sites for weight in site.weights}
    for choice in plan.weights:
        theirs, ours = choice.weight, weights.get(choice.name)
        if ours is None:
            raise contradiction(source, f"plan.json names the weight {choice.name}", "a weight that config.json has")
        if theirs != ours:
            raise contradiction(
                source,
                f"plan.json has {theirs.name} {theirs.out_features} x {theirs.in_features}",
                f"{ours.out_features} x {ours.in_features}, as config.json says",
            )


def contradiction(source: Any, given: str, expected: str) -> CheckpointError:
    """The error for files of a checkpoint that do not belong together."""
    return CheckpointError(f"{source}: {given}", expected, "Save the model again; these files were changed.")

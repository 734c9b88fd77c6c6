"""The key ``gac`` of a checkpoint's ``config.json``: every module that is no longer dense, as the plan decided.

It has a digest over itself, the dims of its config and its plan: whether they are as they were written. That shows
what was changed or mixed up by accident, without a comparison. Whoever writes all files can write a digest that fits:
so the model is built as strictly with it, and the plan is read and compared when it is first asked for.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from gac.compression.apply import planned_sites, rounded_inputs, shared_names, skipped_blocks
from gac.core.errors import CheckpointError, GacError
from gac.core.io import from_json
from gac.forms import form_named
from gac.forms.planned_sites import targeted_sites
from gac.models.families import family_of
from gac.plan.plan import Plan, WeightChoice
from gac.runtime.contract import SCHEMA
from gac.runtime.header import HEAD, QUANTISED_INPUTS
from gac.schemes import scheme_named


def digest_of(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def header_of(plan: Plan, config: Any, text: str | bytes) -> dict[str, Any]:
    """The key as it is written, from a plan, the ``text`` of its file, and the config of the model."""
    header = {
        "schema_version": SCHEMA,
        "modules": {choice.name: _module(choice) for choice in plan.weights if choice.changed},
        "fused": shared_names(planned_sites(plan, targeted_sites(config, plan.recipe.space.forms))),
        "skipped": skipped_blocks(config, plan.weights),
        "plan": digest_of(text),
        "decode_kernel": plan.recipe.deployment.decode_kernel,
    }
    if rounded := rounded_inputs(config, plan.weights):
        header[QUANTISED_INPUTS] = rounded
    if head := plan.measured.head:
        header[HEAD] = {"scheme": head.scheme, "tied": len(head.shapes) == 1} | _stored(head.scheme)
    return header | {"digest": _digest(header, config)}


def _module(choice: WeightChoice) -> dict[str, Any]:
    spec = form_named(choice.form).module(choice.weight, choice.dim)
    chosen = {"form": choice.form, "dim": choice.dim, "scheme": choice.scheme}
    return chosen | {"module": spec.module, "sizes": dict(spec.sizes)} | _stored(choice.scheme)


def _stored(scheme: str) -> dict[str, Any]:
    stored = scheme_named(scheme).storage
    return {"storage": stored.storage, "options": dict(stored.options)} if stored else {}


def _digest(header: Mapping[str, Any], config: Any) -> str:
    stated = {name: value for name, value in header.items() if name != "digest"}
    return digest_of(json.dumps(stated, sort_keys=True) + repr(family_of(config).sizes(config)))


def is_unchanged(header: Any, config: Any) -> bool:
    """True if the key ``gac`` as it stands in a file, and the sizes in its config, are as they were written."""
    return isinstance(header, dict) and bool(header.get("digest") == _digest(header, config))


def agreed_plan(text: str | bytes, config: Any, source: Any) -> Plan:
    """The plan in the ``text`` of its file, with which the key ``gac`` of the config and the dims in it agree."""
    try:
        plan = from_json(Plan, text, f"{source}: plan.json", CheckpointError)
    except GacError as failure:
        raise CheckpointError(failure.given, failure.expected, "Save the model again.") from failure
    _check_weights(plan, config, source)
    stated, due = _members(config.gac), _members(header_of(plan, config, text))
    if QUANTISED_INPUTS not in stated:
        due.pop(QUANTISED_INPUTS, None)  # of a checkpoint that was written before there was this
    for name in sorted({*stated, *due}):
        if stated.get(name) != due.get(name):
            result, planned = stated.get(name, "missing"), due.get(name, "none")
            raise contradiction(source, f"config.json has {name} {result}", f"{planned}, as plan.json says")
    return plan


def _members(header: Mapping[str, Any]) -> dict[str, str]:
    members = {name: value for name, value in header.items() if name not in ("plan", "digest")}
    modules = members.pop("modules", None)
    members |= {f"modules.{name}": value for name, value in modules.items()} if isinstance(modules, dict) else {}
    return {name: json.dumps(value, sort_keys=True) for name, value in members.items()}


def _check_weights(plan: Plan, config: Any, source: Any) -> None:
    sites = targeted_sites(config, plan.recipe.space.forms)
    weights = {weight.name: weight for site in sites for weight in site.weights}
    for weight in (choice.weight for choice in plan.weights):
        if (ours := weights.get(weight.name)) != weight:
            raise contradiction(
                source,
                f"plan.json has {weight.name} {weight.out_features} x {weight.in_features}",
                f"{ours.out_features} x {ours.in_features}, as config.json says" if ours else "a weight of config.json",
            )


def contradiction(source: Any, value: str, expected: str) -> CheckpointError:
    """The error for files of a checkpoint that do not belong together."""
    return CheckpointError(f"{source}: {value}", expected, "Save the model again; these files were changed.")

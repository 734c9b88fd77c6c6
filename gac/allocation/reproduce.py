"""The command that makes a plan again."""

from collections.abc import Iterator, Mapping
from shlex import join
from typing import Any

from gac.plan import Plan

_NAMES = {"budget": "--budget", "text": "--calibration", "forms": "--form", "workloads": "--workload"}


def allocate_command(plan: Plan, profile: str | None = None) -> str:
    """All that was asked for, and what was chosen where nothing was; two lines, its words quoted for a shell.

    Args:
        profile: the name of the latency table; None takes the recipe's.
    """
    text = plan.measured.calibration
    asked = plan.recipe.flat() | {"text": f"{text.text}:{text.windows}x{text.window_tokens}"}
    if profile is not None:
        asked["profile"] = profile
    second: dict[str, Any] = {
        name: asked.pop(name) for name in ("workloads", "profile", "text", "seed", "shots") if name in asked
    }
    return (
        f"gac allocate {join([plan.measured.model, *_words(asked)])} \\\n  {join([*_words(second), '-o', 'plan.json'])}"
    )


def rule_of(plan: Plan) -> str | None:
    """The rule that made it; None for the exact choice."""
    return None if plan.recipe.rule == "loss" else plan.recipe.rule


def _words(options: Mapping[str, Any]) -> Iterator[str]:
    """Options and their values as the command line has them."""
    for name, value in options.items():
        option = _NAMES.get(name, f"--{name.replace('_', '-')}")
        if name == "align":
            yield from ("--align-to", str(value)) if value else ("--no-align",)
        elif value is True or value == "auto":
            yield option if value is True else f"{option}-where-faster"
        else:
            for one in _several(value):
                yield from (option, one)


def _several(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [f"{workload}={fraction!r}" for workload, fraction in value.items()]
    return [*value] if isinstance(value, tuple) else [value if isinstance(value, str) else repr(value)]

"""The model card of a compressed checkpoint: what it is, what it was made from, how to make it again."""

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from gac.core.errors import escaped
from gac.plan.plan import Plan
from gac.plan.summary import allocate_command, apply_commands, what_is_kept

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_MARKUP = re.compile(r"([\\`*_\[\]|~$]|(?<!\w)www\.|:)")


def model_card(plan: Plan, itemsize: int = 2) -> str:
    """README.md for the directory of a compressed model; ``itemsize``: bytes of a number that no scheme stores."""
    measured = plan.measured
    if not measured.predicted:
        return _filled(plan, text=None)
    return _filled(
        plan,
        text=_words(measured.calibration),
        itemsize=itemsize,
        version=_words(plan.gac_version),
        profile=measured.profile,
        gpu=_words(measured.profile.gpu),
        documents=plan.documents,  # the command line cannot say which were given in memory
        commands=_without_tags("\n".join([allocate_command(plan), *apply_commands(plan)])),
    )


def export_card(plan: Plan, way: str | None = None) -> str:
    """README.md for an exported model; ``way`` is the option of ``gac.export`` that was used, if any."""
    return _filled(plan, exported=True, way=way)


def _filled(plan: Plan, exported: bool = False, **content: Any) -> str:
    environment = Environment(  # of Markdown: names are escaped before
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    template = environment.from_string(Path(__file__).with_name("card.md").read_text(encoding="utf-8"))
    model = plan.measured.model
    return template.render(
        base_model=model if _HUB_ID.fullmatch(model) else None,
        model=_words(model),
        kept=what_is_kept(plan),
        summary=_without_tags(plan.summary()),
        exported=exported,
        **content,
    )


def _words(text: object) -> str:
    return _MARKUP.sub(r"\\\1", _without_tags(" ".join(str(text).split())).replace(">", "&gt;"))


def _without_tags(text: str) -> str:
    return escaped(text).replace("&", "&amp;").replace("<", "&lt;")

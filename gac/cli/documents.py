"""Results as JSON documents for machines, and what the files of plans are called for people."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gac.cli.verb import note
from gac.io import to_json, whole_file

if TYPE_CHECKING:
    from gac.plan import Plan


def plan_document(plan: "Plan") -> dict[str, Any]:
    """A plan without its sites, and with the fractions and counts that follow from them."""
    document: dict[str, Any] = json.loads(to_json(plan))
    del document["sites"]
    document |= {"kept": plan.budget.kept, "kept_of_model": plan.kept_of_model}
    return document | {"alignment": plan.alignment, "aligned_fraction": plan.aligned_fraction}


def write_document(document: dict[str, Any], output: Path) -> None:
    """Write what ``--json`` would print to a file too."""
    with whole_file(output, "document") as temporary:
        temporary.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    note(f"saved as {output}")


def names_of(files: Sequence[Path]) -> list[str]:
    """Files without folder and ending, where that tells them apart."""
    short = len({file.stem for file in files}) == len(files)
    return [file.stem if short else str(file) for file in files]

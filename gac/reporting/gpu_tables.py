"""The known profiles as a table."""

from collections.abc import Mapping, Sequence
from typing import Any

from gac.core.display import Table


def profiles_table(entries: Sequence[Mapping[str, Any]]) -> Table:
    """The known profiles: ``name``, ``where``, and either their content or their ``problem``."""
    names, right = ("name", "", "GPU", "shapes", "operators", "date", "digest"), {"shapes", "operators"}
    rows = []
    for entry in entries:
        if "problem" in entry:
            content = [entry["problem"], "", "", "", ""]
        else:
            counts = f"{entry['shapes']:,}", str(len(entry["operators"]))
            content = [entry["gpu"], *counts, entry["date"], entry["digest"][:12]]
        rows.append([entry["name"], entry["where"], *content])
    return Table([(name, ">" if name in right else "<") for name in names], rows)

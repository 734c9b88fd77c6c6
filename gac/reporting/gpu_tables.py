"""The known profiles as a table, and the contents of one."""

from collections.abc import Mapping, Sequence
from typing import Any

from gac.core.display import Table
from gac.profiling.contents import ModelRows, ModelSteps


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


def contents_tables(models: Sequence[ModelRows], steps: Sequence[ModelSteps]) -> list[Table]:
    """The models of which a profile has every weight, and those of which it has whole steps; no empty table."""
    of_weights = Table(
        [("model", "<"), ("scheme", "<"), ("rows of input", "<")],
        [(row.model, row.scheme, ", ".join(f"{rows:,}" for rows in row.rows)) for row in models],
        "weights of known models",
        "all dense weights of these models are measured; other shapes are interpolated or modelled. decode:B@C has B "
        "rows of input, prefill:BxS has B x S",
    )
    of_steps = Table(
        [("model", "<"), ("scheme", "<"), ("workloads", "<")],
        [(row.model, row.scheme, " ".join(row.workloads)) for row in steps],
        "whole steps in vLLM",
        "for plans with --engine vllm",
    )
    return [table for table in (of_weights, of_steps) if table.rows]

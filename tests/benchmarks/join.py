"""One file of the rows that several runs of a study measured side by side.

    python tests/benchmarks/join.py precision-joint-*.json --output precision.json

The files are of one study: equal in all that is said but their commands and rows, and in the dense perplexity.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from gac.core.io import atomic_path
from tests.benchmarks.prediction import CORRELATION, correlation

ROWS = "rows"
OWN = ("command", ROWS, CORRELATION)
"""What files of one study may differ in."""
OWN_SETTINGS = ("first",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args()
    found = [json.loads(path.read_text(encoding="utf-8")) for path in asked.files]
    for path, one in zip(asked.files, found, strict=True):
        if differ := [name for name, value in shared(one).items() if shared(found[0]).get(name) != value]:
            raise SystemExit(f"{path} and {asked.files[0]} differ in {', '.join(differ)}")
    rows = [row for one in found for row in one[ROWS]]
    joined = found[0] | {"command": [one["command"] for one in found], ROWS: rows}
    joined |= {CORRELATION: correlation(rows)} if CORRELATION in joined else {}
    with atomic_path(asked.output) as temporary:
        temporary.write_text(json.dumps(joined, indent=1) + "\n", encoding="utf-8")
    print(f"{len(rows)} rows of {len(found)} files")


def shared(record: dict[str, Any]) -> dict[str, Any]:
    """What has to be the same in all files."""
    found = {name: value for name, value in record.items() if name not in OWN}
    settings = found.get("settings", {})
    return found | {"settings": {name: value for name, value in settings.items() if name not in OWN_SETTINGS}}


if __name__ == "__main__":
    main()

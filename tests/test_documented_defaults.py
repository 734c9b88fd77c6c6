"""The defaults that texts name are those of the code."""

from pathlib import Path

from click.testing import CliRunner

import gac
from gac.allocation.decide import SLACK
from gac.cli import main

DOCS = Path(gac.__file__).parents[1] / "docs"


def test_the_slack_is_named_rightly_everywhere() -> None:
    assert f"None: {SLACK} " in (gac.Recipe.__doc__ or "")
    told = " ".join(CliRunner().invoke(main, ["allocate", "--help"]).output.split())
    assert f"Default: {SLACK}, and 0 with a limit" in told
    assert f"at most {100 * SLACK:g} % more" in (DOCS / "limits.md").read_text()
    assert f"slack=None,  # {SLACK} (0 with a limit of latency)" in (DOCS / "allocate.md").read_text()

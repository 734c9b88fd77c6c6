import pytest

from gac.lab.studies import published
from gac.lab.studies.readings import percent, times
from gac.lab.studies.records import Band


@pytest.mark.parametrize("table", [name for name in published.TABLES if name != "about"])
def test_a_table_names_its_content_and_source_and_is_complete(table: str) -> None:
    entry = published.TABLES[table]
    assert entry["shows"]
    assert entry["source"]
    assert {len(row) for row in entry["rows"]} == {len(entry["columns"])}


def test_a_factor_is_graded_against_the_published_band() -> None:
    graded = [Band(1.25, 2.0, 1.05).finding(factor, ()).verdict for factor in (1.04, 1.1, 1.25, 2.0, 2.1)]
    assert graded == ["did not hold", "other", "held", "held", "other"]


def test_a_figure_has_digits_enough_to_differ_from_its_edges_and_is_never_minus_zero() -> None:
    assert [percent(share) for share in (0.584, -1e-9, -0.03)] == ["58 %", "0 %", "-3 %"]
    assert [percent(share, 0.10) for share in (0.09869, 0.0999, 0.10, 0.12)] == ["9.9 %", "9.99 %", "10 %", "12 %"]
    assert [times(factor, 1.25, 2.5) for factor in (2.42, 2.4996, 2.5)] == ["2.42x", "2.4996x", "2.50x"]

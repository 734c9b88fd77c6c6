"""The table of a study: headings, figures, verdict."""

from dataclasses import replace

from gac_extensions.lab.studies import Column, StudyResult
from gac_extensions.lab.tables import study_table
from tests.reporting.rendering import shown

RESULT = StudyResult(
    "gemm-k",
    "misaligned K costs 25-60 %",
    "somebody, A100",
    (Column("K"), Column("here", "ms"), Column("A100", "ms"), Column("kernel", side="<")),
    ((107, 0.08912, 0.089, "align1"), (112, 0.05, None, "nvjet"), (4096, 12345.6, 1.0, "nvjet")),
    "held",
    "Holds on this GPU: 1.78x.",
    ("rule: 1.25x to 1.60x",),
)


def test_a_study_is_its_table_its_verdict_the_claim_and_the_rule() -> None:
    lines = shown(study_table(RESULT))
    assert lines[:3] == ["gemm-k", "here A100", "K (ms) (ms) kernel"]
    assert lines[4:] == [
        "107 0.08912 0.089 align1",
        "112 0.05 - nvjet",
        "4096 12,346 1 nvjet",
        "Holds on this GPU: 1.78x.",
        "published: misaligned K costs 25-60 % (somebody, A100)",
        "rule: 1.25x to 1.60x",
    ]


def test_a_long_heading_takes_several_lines_and_keeps_its_table_narrow() -> None:
    result = replace(RESULT, columns=(Column("over next multiple of 8", "x"), *RESULT.columns[1:]))
    assert shown(study_table(result))[1:4] == ["over next", "multiple of 8 here A100", "(x) (ms) (ms) kernel"]

"""Tables of profiles and cliffs: what is in them, and that they fit into 100 columns."""

import numpy as np
import pytest
from rendering import shown

from gac.profiling.cliffs import find_cliffs
from gac.profiling.records import Launch
from gac.profiling.table import Sweep
from gac.reporting.gpu_tables import ExplainedSweep, alignment_table, cliffs_table, points_table, profiles_table
from gac_extensions.lab.mechanisms.causes import Cause

ALIGN1 = "cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>"


@pytest.fixture
def explained() -> ExplainedSweep:
    """Ranks 960 to 1088, odd ones five times and even ones 2.5 times as slow; the cause of the first is not known."""
    dims = np.arange(960, 1089)
    ns = 3e4 * np.where(dims % 8 == 0, 1.0, np.where(dims % 2, 5.0, 2.5))
    launches = tuple((Launch(ALIGN1, (64, 1, 1), (128, 1, 1), 0),) for _ in dims)
    fixed = (("m", 1024), ("k", 4096), ("n", 4096))
    sweep = Sweep("low_rank", "bf16", "cold", "r", fixed, dims, ns, 0.002 * ns, launches)
    cliffs = find_cliffs(sweep)
    cause = Cause("alignment tier", "evidence", "slow", "fast")
    return ExplainedSweep(sweep, cliffs, (None, *[cause] * (len(cliffs.collapsed) - 1)), ())


def test_unknown_causes_and_no_cliffs(explained: ExplainedSweep) -> None:
    lines = shown(cliffs_table("a GPU", [explained]))
    assert "low_rank bf16 m=1024 k=4096 n=4096, r 129 112 961 -> 968, 5.00x 8 0" in lines
    assert lines[-1] == "causes of the 112 collapsed dims: alignment tier 99.1%, the record does not tell 0.9%"
    row = "961 150.0 0.1 5.00x 968 ? cutlass_75_tensorop_bf1...x128_tn_align1"
    assert row in shown(points_table(explained, 961, 968))
    explained.sweep.ns[:] = 3e4
    lines = shown(cliffs_table("a GPU", [ExplainedSweep(explained.sweep, find_cliffs(explained.sweep), (), ())]))
    assert "low_rank bf16 m=1024 k=4096 n=4096, r 129 0 none 1 0" in lines
    assert lines[-1] == "no dim is collapsed"


def test_the_longest_label_fits(explained: ExplainedSweep) -> None:
    sizes = (("b", 4), ("h", 32), ("kv", 32), ("s", 2048), ("t", 2048))
    old = explained.sweep
    long = Sweep("sdpa_efficient_causal", "bf16", "hot", "d", sizes, old.dims, old.ns, old.iqr, old.launches)
    sweeps = [ExplainedSweep(long, explained.cliffs, (), ())]
    for table in (cliffs_table("a GPU", sweeps), alignment_table(sweeps)):
        assert not any("…" in line for line in shown(table))


def test_profiles_show_what_is_wrong_with_one() -> None:
    good = {"name": "a", "where": "shipped", "gpu": "A GPU", "shapes": 1234, "operators": ["linear", "sdpa"]}
    entries = [good | {"date": "d", "digest": "0123456789abcdef"}, {"name": "b", "where": "saved", "problem": "torn"}]
    assert shown(profiles_table(entries))[2:] == ["a shipped A GPU 1,234 2 d 0123456789ab", "b saved torn"]

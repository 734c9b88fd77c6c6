import numpy as np
import pytest

from gac.lab.mechanisms.edges import edge_causes
from gac.profiling.cliffs import find_cliffs
from gac.profiling.records import Launch
from gac.profiling.table import Profile, Sweep

LARGE = "cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_64x3_tn_align8>"
SMALL = "cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_64x64_64x3_tn_align8>"


@pytest.fixture
def causes(header):
    """The causes of the edges along m of a staircase that jumps from 33 to 34 tiles a feature block."""

    def find(before: str, after: str, shared: int = 180_000):
        dims = np.arange(4096, 4609, 128)
        jumped = dims > 4224
        ns = np.where(jumped, 60.0, 30.0)
        launches = tuple(
            (Launch(after if late else before, (4, m // 128, 1), (256, 1, 1), shared),)
            for m, late in zip(dims.tolist(), jumped.tolist(), strict=True)
        )
        sweep = Sweep("linear", "bf16", "cold", "m", (("k", 4096), ("n", 1024)), dims, ns, 0.001 * ns, launches)
        cliffs = find_cliffs(sweep)
        assert cliffs.sweet_spots.tolist() == [4224]
        return edge_causes(sweep, cliffs, header)

    return find


def test_the_same_kernel_in_more_waves(causes) -> None:
    (found,) = causes(LARGE, LARGE)
    assert (found.kind, found.slow, found.fast) == ("wave", LARGE, LARGE)
    assert found.evidence.endswith("in 2 waves of 132 instead of 1 (136 tiles instead of 132)")


def test_another_kernel_is_a_switch(causes) -> None:
    (found,) = causes(LARGE, LARGE.replace("256x128", "128x128"))
    assert found.kind == "kernel switch"


def test_waves_that_an_sm_may_hold_at_once_are_no_cause(causes) -> None:
    assert causes(LARGE, LARGE, shared=50_000) == (None,)


def test_what_was_not_recorded_has_no_cause(header) -> None:
    dims = np.arange(512, 1025, 8)
    ns = 10.0 * np.ceil(dims / 256)
    sweep = Sweep("linear", "bf16", "cold", "m", (("k", 64), ("n", 64)), dims, ns, 0.001 * ns, ((),) * len(dims))
    cliffs = find_cliffs(sweep)
    assert edge_causes(sweep, cliffs, header) == (None,) * len(cliffs.edges)
    assert len(cliffs.edges) == 2


def test_most_edges_that_an_h100_recorded_have_a_cause() -> None:
    profile = Profile.load("nvidia-h100-80gb-hbm3")
    found = [one for sweep in profile.sweeps() for one in edge_causes(sweep, find_cliffs(sweep), profile.header)]
    kinds = {one.kind for one in found if one is not None}
    assert {"kernel switch", "template", "wave"} <= kinds
    assert sum(one is not None for one in found) > 0.8 * len(found)

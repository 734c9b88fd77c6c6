"""Studies: published experiments that run again on the GPU at hand, their table beside the published one."""

from collections.abc import Mapping
from types import MappingProxyType

from gac.errors import ProfileError, did_you_mean
from gac.lab.studies.attention import SDPA_BACKENDS, SDPA_BANDWIDTH, SDPA_DENSE
from gac.lab.studies.gemms import GEMM_K, GEMM_N, GEMV
from gac.lab.studies.hardware import L2_SECTOR, TENSOR_CORE, VECTOR_WIDTH
from gac.lab.studies.heads import HEAD_DIM_132, HETEROGENEOUS_HEADS
from gac.lab.studies.int4 import INT4_REGIMES
from gac.lab.studies.kernels import FA_TEMPLATES, KERNEL_TIERS
from gac.lab.studies.records import Cell, Column, Find, Study, StudyResult, Verdict
from gac.lab.studies.repair import PADDING_RESCUE, ROUND_TO_ALIGNED
from gac.lab.studies.switches import GEMM_M

__all__ = ["STUDIES", "Cell", "Column", "Find", "Study", "StudyResult", "Verdict", "study_named"]

_ALL = (
    SDPA_DENSE,
    SDPA_BACKENDS,
    GEMM_K,
    GEMM_N,
    GEMM_M,
    GEMV,
    PADDING_RESCUE,
    ROUND_TO_ALIGNED,
    HETEROGENEOUS_HEADS,
    TENSOR_CORE,
    VECTOR_WIDTH,
    L2_SECTOR,
    SDPA_BANDWIDTH,
    KERNEL_TIERS,
    FA_TEMPLATES,
    INT4_REGIMES,
    HEAD_DIM_132,
)

STUDIES: Mapping[str, Study] = MappingProxyType({study.name: study for study in _ALL})

assert len(STUDIES) == len(_ALL), "no two studies share a name"


def study_named(name: str) -> Study:
    """The study of this name.

    Raises:
        ProfileError: there is no such study; the message names the nearest.
    """
    if name not in STUDIES:
        hint = did_you_mean(name, STUDIES, "Correct the name.")
        raise ProfileError(f"study {name!r} is unknown", f"one of {', '.join(STUDIES)}", hint)
    return STUDIES[name]

"""Studies: published experiments that run again on the GPU at hand, their table beside the published one."""

from gac.errors import GacError, ProfileError
from gac.lab.studies.records import Cell, Column, Find, Study, StudyResult, Verdict
from gac.registry import Registry

__all__ = ["STUDIES", "Cell", "Column", "Find", "Study", "StudyResult", "Verdict"]


def _check(own: object) -> None:
    if not isinstance(own, Study):
        raise GacError(f"a {type(own).__name__} as a study", "a gac.lab.studies.Study", "Make one.")


STUDIES: Registry[Study] = Registry(
    "study",
    {
        "sdpa-dense": "gac.lab.studies.attention:SDPA_DENSE",
        "sdpa-backends": "gac.lab.studies.attention:SDPA_BACKENDS",
        "gemm-k": "gac.lab.studies.gemms:GEMM_K",
        "gemm-n": "gac.lab.studies.gemms:GEMM_N",
        "gemm-m": "gac.lab.studies.switches:GEMM_M",
        "gemv": "gac.lab.studies.gemms:GEMV",
        "padding-rescue": "gac.lab.studies.repair:PADDING_RESCUE",
        "round-to-aligned": "gac.lab.studies.repair:ROUND_TO_ALIGNED",
        "heterogeneous-heads": "gac.lab.studies.heads:HETEROGENEOUS_HEADS",
        "tensor-core": "gac.lab.studies.hardware:TENSOR_CORE",
        "vector-width": "gac.lab.studies.hardware:VECTOR_WIDTH",
        "l2-sector": "gac.lab.studies.hardware:L2_SECTOR",
        "sdpa-bandwidth": "gac.lab.studies.attention:SDPA_BANDWIDTH",
        "kernel-tiers": "gac.lab.studies.kernels:KERNEL_TIERS",
        "fa-templates": "gac.lab.studies.kernels:FA_TEMPLATES",
        "int4-regimes": "gac.lab.studies.int4:INT4_REGIMES",
        "head-dim-132": "gac.lab.studies.heads:HEAD_DIM_132",
    },
    _check,
    ProfileError,
)

"""Studies: published experiments that run again on the GPU at hand, their table beside the published one."""

from gac.core.errors import GacError, ProfileError
from gac.core.registry import Registry
from gac.lab.studies.records import Cell, Column, Find, Study, StudyResult, Verdict

__all__ = ["STUDIES", "Cell", "Column", "Find", "Study", "StudyResult", "Verdict"]


def _check(own: object) -> None:
    if not isinstance(own, Study):
        raise GacError(f"a {type(own).__name__} as a study", "a gac.lab.studies.Study", "Make one.")


STUDIES: Registry[Study] = Registry(
    "study",
    {
        "sdpa-dense": "gac.lab.studies.attention:sdpa_dense",
        "sdpa-backends": "gac.lab.studies.attention:sdpa_backends",
        "gemm-k": "gac.lab.studies.gemms:gemm_k",
        "gemm-n": "gac.lab.studies.gemms:gemm_n",
        "gemm-m": "gac.lab.studies.switches:gemm_m",
        "gemv": "gac.lab.studies.gemms:gemv",
        "padding-rescue": "gac.lab.studies.repair:padding_rescue",
        "round-to-aligned": "gac.lab.studies.repair:round_to_aligned",
        "heterogeneous-heads": "gac.lab.studies.heads:heterogeneous_heads",
        "tensor-core": "gac.lab.studies.hardware:tensor_core",
        "vector-width": "gac.lab.studies.hardware:vector_width",
        "l2-sector": "gac.lab.studies.hardware:l2_sector",
        "sdpa-bandwidth": "gac.lab.studies.attention:sdpa_bandwidth",
        "kernel-tiers": "gac.lab.studies.kernels:kernel_tiers",
        "fa-templates": "gac.lab.studies.kernels:fa_templates",
        "int4-regimes": "gac.lab.studies.int4:int4_regimes",
        "head-dim-132": "gac.lab.studies.heads:head_dim_132",
    },
    _check,
    ProfileError,
)

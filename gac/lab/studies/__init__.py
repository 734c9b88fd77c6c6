"""Studies: published experiments that run again on the GPU at hand, their table beside the published one."""

from gac.core.errors import GacError, ProfileError
from gac.core.registry import Registry
from gac.lab.studies.attention import fa_templates, sdpa_backends, sdpa_bandwidth
from gac.lab.studies.hardware import kernel_tiers, l2_sector, tensor_core, vector_width
from gac.lab.studies.heads import head_dim_132, heterogeneous_heads, int4_regimes
from gac.lab.studies.misalignment import gemm_k, gemm_n, gemv, padding_rescue, round_to_aligned, sdpa_dense
from gac.lab.studies.records import Cell, Column, Find, Study, StudyResult, Verdict
from gac.lab.studies.switches import gemm_m

__all__ = ["STUDIES", "Cell", "Column", "Find", "Study", "StudyResult", "Verdict"]


def _check(study: object) -> None:
    if not isinstance(study, Study):
        raise GacError(f"a {type(study).__name__} as a study", "a gac.lab.studies.Study", "Make one.")


STUDIES: Registry[Study] = Registry("study", {}, _check, ProfileError)

for _study in (
    *(sdpa_dense, sdpa_backends, gemm_k, gemm_n, gemm_m, gemv, padding_rescue, round_to_aligned, heterogeneous_heads),
    *(tensor_core, vector_width, l2_sector, sdpa_bandwidth, kernel_tiers, fa_templates, int4_regimes, head_dim_132),
):
    STUDIES.register(_study)

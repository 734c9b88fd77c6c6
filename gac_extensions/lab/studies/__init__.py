"""Studies: published experiments that run again on the GPU at hand, their table beside the published one."""

from gac.core.errors import GacError, ProfileError
from gac.core.registry import Registry
from gac_extensions.lab.studies import attention, hardware, heads, misalignment, switches
from gac_extensions.lab.studies.records import TEXTS, Cell, Column, Find, Study, StudyResult, Verdict

__all__ = ["STUDIES", "Cell", "Column", "Find", "Study", "StudyResult", "Verdict"]


def _check(study: object) -> None:
    if not isinstance(study, Study):
        raise GacError(f"a {type(study).__name__} as a study", "a gac_extensions.lab.studies.Study", "Make one.")


STUDIES: Registry[Study] = Registry("study", {}, _check, ProfileError)

_known = (vars(module).values() for module in (attention, hardware, heads, misalignment, switches))
_studies = {value.name: value for values in _known for value in values if isinstance(value, Study)}
for _name in TEXTS:
    STUDIES.register(_studies[_name])

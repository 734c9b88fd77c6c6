"""Studies: published experiments that run again on the GPU at hand, their table beside the published one."""

from gac.core.errors import GacError, ProfileError
from gac.core.registry import Registry
from gac.lab.studies import attention, hardware, heads, misalignment, switches
from gac.lab.studies.records import TEXTS, Cell, Column, Find, Study, StudyResult, Verdict

__all__ = ["STUDIES", "Cell", "Column", "Find", "Study", "StudyResult", "Verdict"]


def _check(study: object) -> None:
    if not isinstance(study, Study):
        raise GacError(f"a {type(study).__name__} as a study", "a gac.lab.studies.Study", "Make one.")


STUDIES: Registry[Study] = Registry("study", {}, _check, ProfileError)

_modules = (attention, hardware, heads, misalignment, switches)
_every = [value for module in _modules for value in vars(module).values() if isinstance(value, Study)]
for _study in sorted(_every, key=lambda study: list(TEXTS).index(study.name)):
    STUDIES.register(_study)

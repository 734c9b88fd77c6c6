"""A weight as it is: nothing is measured or built, and it can be fitted again."""

from collections.abc import Iterator, Sequence

from gac.forms.tensors import Fit, SiteBuild, Statistics, TensorForm
from gac.models.sites import Weight


class DenseTensors(TensorForm):
    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        return iter(())

    def parameters(self, build: SiteBuild, weight: Weight, dim: int) -> None:
        return None

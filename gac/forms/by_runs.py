"""Forms that change too much for a metric: what they lose is measured by running the model with them."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from gac.forms.tensors import Fit, Statistics, TensorForm
from gac.models.sites import Weight

if TYPE_CHECKING:
    from gac.sensitivity.runs import ModelRuns


class RunForm(TensorForm):
    """The least dim or the dense weights: nothing else is measured. It is of forms with ``runs``."""

    @abstractmethod
    def modules(self, runs: "ModelRuns", together: Sequence[Weight]) -> dict[str, nn.Module]:
        """What stands in the place of weights that the form takes together, by their names."""

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        assert statistics.runs is not None, f"{self.form.name} is measured by running the model"
        for together in self.taken(weights):
            modules = self.modules(statistics.runs, together)
            loss = statistics.runs.divergence(modules)
            kept = {name: value.detach() for name, value in modules[together[-1].name].named_parameters()}
            yield Fit(together[-1], np.array([loss, 0.0]), kept)

    def taken(self, weights: Sequence[Weight]) -> Iterator[list[Weight]]:
        """The weights that the form takes together, each time those up to one that it shortens on its input."""
        together: list[Weight] = []
        for weight in filter(self.form.takes, weights):
            together.append(weight)
            if self.form.shortens(weight) == "in":
                yield together
                together = []

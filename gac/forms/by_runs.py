"""Forms that change too much for a metric: what they lose is measured by running the model with them."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from gac.forms.tensors import Fit, Statistics, TensorForm
from gac.models.sites import Weight

if TYPE_CHECKING:
    from gac.forms.base import Form
    from gac.measurement.runs import ModelRuns


def taken_together(form: "Form", weights: Sequence[Weight]) -> Iterator[list[Weight]]:
    """The weights that a form takes together, each time those up to one that it shortens on its input."""
    together: list[Weight] = []
    for weight in filter(form.takes, weights):
        together.append(weight)
        if form.shortens(weight) == "in":
            yield together
            together = []


class RunForm(TensorForm):
    """The least dim or the dense weights: nothing else is measured, and no statistics are needed."""

    @abstractmethod
    def modules(self, runs: "ModelRuns", together: Sequence[Weight]) -> dict[str, nn.Module]:
        """What stands in the place of weights that the form takes together, by their names."""

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        assert statistics.runs is not None, f"{self.form.name} is measured by running the model"
        for together in taken_together(self.form, weights):
            modules = self.modules(statistics.runs, together)
            loss = statistics.runs.divergence(modules)
            kept = {name: value.detach() for name, value in modules[together[-1].name].named_parameters()}
            yield Fit(together[-1], np.array([loss, 0.0]), kept)

"""Forms whose loss is measured by running the model with them: they change too much for a metric."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
from torch import nn

from gac.forms.base import Form
from gac.forms.tensors import Fit, ModelRuns, Statistics, TensorForm
from gac.models.sites import Weight


def joint_weights(form: Form, weights: Sequence[Weight]) -> Iterator[list[Weight]]:
    """The weights that a form takes together, each time those up to one that it shortens on its input."""
    group: list[Weight] = []
    for weight in filter(form.applies_to, weights):
        group.append(weight)
        if form.shortens(weight) == "in":
            yield group
            group = []


class RunForm(TensorForm):
    """A form with two choices, the least dim and the dense weights; it needs no statistics."""

    @abstractmethod
    def modules(self, runs: ModelRuns, group: Sequence[Weight]) -> dict[str, nn.Module]:
        """The modules that replace weights that the form takes together, by name."""

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        assert statistics.runs is not None, f"{self.form.name} is measured by running the model"
        for group in joint_weights(self.form, weights):
            modules = self.modules(statistics.runs, group)
            loss = statistics.runs.divergence(modules)
            kept = {name: value.detach() for name, value in modules[group[-1].name].named_parameters()}
            yield Fit(group[-1], np.array([loss, 0.0]), kept)

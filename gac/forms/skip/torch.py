"""An attention or an MLP that is skipped; its loss is measured by skipping it."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from gac.forms.refit import WeightRefit
from gac.forms.skip import Skip
from gac.forms.tensors import ModelRuns, RunForm, SiteBuild
from gac.models.sites import Weight
from gac.runtime.plain.modeling_gac import Absent, Constant


class SkipTensors(RunForm):
    """Keeps the mean output of the block, which replaces it."""

    form: Skip

    def refit(self, mode: str, weight: Weight) -> Callable[[WeightRefit, nn.Module], None] | None:
        return _refit_constant if mode == "residual" and self.form.adds(weight) else None

    def modules(self, runs: ModelRuns, group: Sequence[Weight]) -> dict[str, nn.Module]:
        return {weight.name: self._module(runs, weight) for weight in group}

    def parameters(self, build: SiteBuild, weight: Weight, dim: int) -> dict[str, Tensor] | None:
        if dim:
            return None
        return {"bias": build.artifacts.of(self.form, "bias", weight)} if self.form.adds(weight) else {}

    def merge(self, weight: Weight, dim: int, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if dim:
            return dict(parameters)
        like = parameters["bias"] if parameters else torch.zeros(())
        return {"weight": like.new_zeros(weight.out_features, weight.in_features)} | dict(parameters)

    def _module(self, runs: ModelRuns, weight: Weight) -> nn.Module:
        sizes = weight.in_features, weight.out_features
        if not self.form.adds(weight):
            return Absent(*sizes, bias=False)
        mean = runs.mean_output(weight)
        constant = Constant(*sizes, bias=True, device=mean.device, dtype=mean.dtype)
        constant.load_state_dict({"bias": mean})
        return constant


def _refit_constant(refit: WeightRefit, module: nn.Module) -> None:
    module.get_parameter("bias").copy_(refit.means.target if refit.bias is None else refit.means.target + refit.bias)

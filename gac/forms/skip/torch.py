"""An attention or an MLP that is left out: what that loses is measured by leaving it out."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gac.forms.by_runs import RunForm
from gac.forms.refit import WeightRefit
from gac.forms.skip.spec import Skip
from gac.forms.tensors import SiteWork
from gac.models.sites import Weight
from gac.runtime.plain.modeling_gac import Absent, Constant

if TYPE_CHECKING:
    from gac.measurement.runs import ModelRuns


class SkipTensors(RunForm):
    """What the block writes on average is kept, and stands in its place."""

    def refit(self, how: str, weight: Weight) -> Callable[[WeightRefit, nn.Module], None] | None:
        return _constant_again if how == "residual" and self._skip.adds(weight) else None

    def modules(self, runs: "ModelRuns", together: Sequence[Weight]) -> dict[str, nn.Module]:
        return {weight.name: self._module(runs, weight) for weight in together}

    def parameters(self, work: SiteWork, weight: Weight, dim: int) -> dict[str, Tensor] | None:
        if dim:
            return None
        return {"bias": work.kept.of(self.form, "bias", weight)} if self._skip.adds(weight) else {}

    def merge(self, weight: Weight, dim: int, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        zeros = own["bias"] if own else torch.zeros(())
        return dict(own) if dim else {"weight": zeros.new_zeros(weight.out_features, weight.in_features)} | dict(own)

    def _module(self, runs: "ModelRuns", weight: Weight) -> nn.Module:
        sizes = weight.in_features, weight.out_features
        if not self._skip.adds(weight):
            return Absent(*sizes, bias=False)
        mean = runs.mean_output(weight)
        constant = Constant(*sizes, bias=True, device=mean.device, dtype=mean.dtype)
        with torch.no_grad():
            constant.bias.copy_(mean)
        return constant

    @property
    def _skip(self) -> Skip:
        assert isinstance(self.form, Skip)
        return self.form


def _constant_again(refit: WeightRefit, module: nn.Module) -> None:
    """The mean of what the weight has to write."""
    module.get_parameter("bias").copy_(refit.means.target if refit.bias is None else refit.means.target + refit.bias)

"""Objects that break a contract are refused, with the reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gac.allocation.rules import RULES
from gac.allocation.weight_rules import RankRule
from gac.forms import FORMS
from gac.forms.base import KVCache, Latency
from gac.forms.head_dim import HeadDim
from gac.schemes import StorageSpec
from gac.testing import check_form, check_method, check_rule, check_scheme
from tests.extending.a_form import Picked, PickedTensors
from tests.extending.a_method import Fwsvd
from tests.extending.a_scheme import ShortMantissa


def changed(base: type, **members: Any) -> Any:
    """An object of a class with other members; its name is its own."""
    return type(base.__name__, (base,), {"name": "changed", **members})()


class Wavering(RankRule):
    """Gives one rank more every time that it is asked."""

    name = "wavering"
    asked = 0

    def ranks(self, problem: Any, weights: Any, form: Any, fraction: float, limit: int) -> dict[str, int]:
        self.asked += 1
        return {weight.name: self.asked for weight in weights}


class OtherAxis(Latency):
    """Names an axis that its operation lacks."""

    def axis(self, weight: Any) -> str:
        return "r"


class DenseCache(KVCache):
    """Counts what the cache keeps of the dense weight."""

    def numbers(self, weight: Any, dim: int) -> int:
        return weight.cached_numbers


class Lossy(PickedTensors):
    """Forgets to compensate, and half of what the features held."""

    def parameters(self, work: Any, weight: Any, dim: int) -> dict[str, Tensor]:
        parameters = super().parameters(work, weight, dim)
        return parameters | {"linear.weight": parameters["linear.weight"] / 2}


NAN = torch.full((16, 16), torch.nan, dtype=torch.float64)


@pytest.mark.parametrize(
    ("check", "plugin", "message"),
    [
        (check_method, changed(Fwsvd, two_sided=False), "two_sided is False"),
        (check_method, changed(Fwsvd, inputs=lambda self, moments: moments.inputs), "inputs are torch.float32"),
        (check_method, changed(Fwsvd, inputs=lambda self, moments: NAN[:3, :3]), r"inputs have shape \(3, 3\)"),
        (check_scheme, changed(ShortMantissa, quantised=lambda self, matrix: matrix), "lossy is True"),
        (check_scheme, changed(ShortMantissa, quantised=lambda self, matrix: 0.9 * matrix), "rounding again changes"),
        (check_scheme, changed(ShortMantissa, bytes=lambda self, rows, columns: rows * columns), "less than its 16"),
        (check_scheme, changed(ShortMantissa, storage=StorageSpec("Integers8", {})), "tables call it 'bf16'"),
        (check_form, changed(Picked, params=lambda self, weight, dim: dim), "1 parameters, its module holds 64"),
        (check_form, changed(Picked, applies_to=lambda self, weight: False), "takes no weight of a tiny Llama"),
        (check_form, changed(Picked, latency=property(OtherAxis)), "axis r is none of its operation"),
        (check_form, changed(HeadDim, cache=property(DenseCache)), "cache keeps .* of a token, not 128"),
        (check_form, changed(Picked, tensor_form=f"{__name__}:Lossy"), "at the full dim: logits differ by up to"),
        (check_rule, Wavering(), "wavering: another plan when asked again"),
    ],
)
def test_what_breaks_a_contract(
    check: Callable[[Any], None], plugin: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for registry in (FORMS, RULES):
        monkeypatch.setattr(registry, "_known", dict(registry._known))
    with pytest.raises(AssertionError, match=message):
        check(plugin)

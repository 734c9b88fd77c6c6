"""Objects that break a contract are refused, with the reason."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gac.allocation.rules import RULES
from gac.allocation.weight_rules import RankRule
from gac.forms import FORMS
from gac.forms.base import KVCache, Latency
from gac.forms.head_dim import HeadDim
from gac.runtime.plain import modeling_gac
from gac.runtime.storage.base import Storage
from gac.runtime.storage.modules import STORAGES
from gac.schemes import Scheme, StorageSpec
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


@dataclass(frozen=True)
class PlainEights:
    """Numbers in 8-bit floating point, without scales."""

    linear = staticmethod(functional.linear)

    def tensors(self, rows: int, columns: int) -> Any:
        return {"eights": ((rows, columns), torch.float8_e4m3fn)}

    def values(self, tensors: Any, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        values: Tensor = tensors["eights"].to(dtype)
        return values


class Eights(PlainEights, Storage):
    """The same with GAC."""


class Doubled(PlainEights):
    """Gives twice the numbers."""

    def values(self, *args: Any) -> Tensor:
        return 2 * super().values(*args)


class OwnStorage(Scheme):
    """Stores numbers in ``Eights``."""

    name = dtype = "own"
    bits = 8
    storage = StorageSpec("Eights", {})

    def stored(self, matrix: Tensor, inputs: Any = None, gradients: Tensor | None = None) -> dict[str, Tensor]:
        return {"eights": matrix.to(torch.float8_e4m3fn)}


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
        (check_scheme, OwnStorage(), "storage Eights is unknown; expected one of .*plain class in modeling_gac.py"),
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


def test_a_storage_of_its_own_is_checked_with_and_without_gac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STORAGES, "Eights", (Eights, ()))
    check_scheme(OwnStorage())  # outside GAC there is no plain class
    monkeypatch.setitem(modeling_gac.STORAGES, "Eights", PlainEights)
    check_scheme(OwnStorage())
    monkeypatch.setitem(modeling_gac.STORAGES, "Eights", Doubled)
    with pytest.raises(AssertionError, match="opened otherwise without GAC"):
        check_scheme(OwnStorage())

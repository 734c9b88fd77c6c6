"""Registries: methods of a user next to the shipped ones."""

import pytest
from torch import Tensor

from gac.core.errors import GacError
from gac.core.registry import Registry
from gac.forms.curvature.methods import Method
from gac.forms.curvature.metric import Moments
from gac.forms.curvature.registry import METHODS


class Custom(Method):
    name = "custom"

    def inputs(self, moments: Moments) -> Tensor:
        return moments.inputs.double()


def named(name: object) -> Method:
    method = Custom()
    method.name = name  # type: ignore[assignment]
    return method


@pytest.fixture
def methods() -> Registry[Method]:
    return Registry("method", {"kfac": "gac.forms.curvature.methods:Kfac"}, METHODS.check)


def test_an_object_is_registered_by_its_name(methods: Registry[Method]) -> None:
    custom = Custom()
    assert methods.get(custom) is methods.get("custom") is methods.get(custom) is custom
    assert methods.names == ("kfac", "custom")
    assert methods.name(custom) == methods.name("custom") == "custom"


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (3, "a int as a method, which lacks name; expected an instance of a subclass of gac.forms.curvature.methods.M"),
        (Custom, "the class Custom as a method; expected an instance of a subclass"),
        (named("kfac"), "method 'kfac' is registered already; expected a name of its own"),
        (named("a/b"), "a method with the name 'a/b'; expected letters, digits and"),
        (type("Folding", (Custom,), {"folds": True})(), "method custom, which folds; expected its own fold"),
    ],
)
def test_a_broken_contract_is_refused(methods: Registry[Method], method: Method, message: str) -> None:
    with pytest.raises(GacError, match=message):
        methods.register(method)
    assert methods.names == ("kfac",)

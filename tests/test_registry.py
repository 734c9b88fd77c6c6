"""What is exchanged by name: methods of one's own beside the shipped ones."""

import pytest
from torch import Tensor

from gac.core.errors import GacError
from gac.core.registry import Registry
from gac.forms.curvature.methods import Method
from gac.forms.curvature.metric import Moments
from gac.forms.curvature.registry import METHODS


class Own(Method):
    name = "own"

    def inputs(self, moments: Moments) -> Tensor:
        return moments.inputs.double()


def named(name: object) -> Method:
    own = Own()
    own.name = name  # type: ignore[assignment]
    return own


@pytest.fixture
def methods() -> Registry[Method]:
    """One that no other test sees."""
    return Registry("method", {"kfac": "gac.forms.curvature.methods:Kfac"}, METHODS.check)


def test_an_object_is_known_by_its_name_once_it_was_given(methods: Registry[Method]) -> None:
    own = Own()
    assert methods.get(own) is methods.get("own") is methods.get(own) is own
    assert methods.names == ("kfac", "own")
    assert methods.name(own) == methods.name("own") == "own"


def test_another_object_of_that_name_is_refused(methods: Registry[Method]) -> None:
    with pytest.raises(GacError) as caught:
        methods.register(named("kfac"))
    assert str(caught.value) == (
        "method 'kfac' is registered already; expected a name of its own. Rename it; taken are kfac."
    )


def folding() -> Method:
    return type("Folding", (Own,), {"folds": True})()


SUBCLASS = "expected an instance of a subclass of gac.forms.curvature.methods.Method"
CHECKED = "See docs/extending.md; gac.testing checks the whole contract of a method."


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (3, f"a int as a method, which lacks name; {SUBCLASS}. {CHECKED}"),
        (Own, f"the class Own as a method; {SUBCLASS}. {CHECKED}"),
        (
            named("a/b"),
            "a method with the name 'a/b'; expected letters, digits and . _ - + : alone, beginning with a letter. "
            "Rename it.",
        ),
        (folding(), "method own, which folds; expected its own fold(values, output, heads, groups). Add it."),
    ],
)
def test_what_breaks_the_contract_is_refused(methods: Registry[Method], own: Method, message: str) -> None:
    with pytest.raises(GacError) as caught:
        methods.get(own)
    assert str(caught.value) == message
    assert methods.names == ("kfac",)

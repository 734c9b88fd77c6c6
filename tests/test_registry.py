"""Registries: methods of a user next to the shipped ones."""

from pathlib import Path

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


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry[Method]:
    """A registry, and an installed package with methods for it."""
    (tmp_path / "packaged_methods.py").write_text(
        "from tests.test_registry import Custom, named\n\n"
        "parametrised, other = named('parametrised'), named('another')\n"
        "parametrised.with_parameter = lambda text: named(f'parametrised:{text}')\n"
    )
    (tmp_path / "packaged_methods-1.dist-info").mkdir()
    (tmp_path / "packaged_methods-1.dist-info" / "METADATA").write_text("Name: packaged-methods\nVersion: 1\n")
    points = ("custom = packaged_methods:Custom", "parametrised = packaged_methods:parametrised")
    wrong = ("misnamed = packaged_methods:other", "absent = packaged_methods:nothing", "number = math:pi")
    text = "\n".join(["[gac.methods]", *points, *wrong])
    (tmp_path / "packaged_methods-1.dist-info" / "entry_points.txt").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return Registry("method", {"kfac": "gac.forms.curvature.methods:Kfac"}, METHODS.check, group="gac.methods")


def test_an_installed_package_adds_objects_by_entry_points(installed: Registry[Method]) -> None:
    assert installed.names == ("kfac",)
    assert type(installed.get("custom")).__name__ == "Custom"
    assert installed.get("custom") is installed.get("custom")
    assert installed.get("parametrised:2").name == "parametrised:2"
    assert installed.names == ("kfac", "custom", "parametrised")
    with pytest.raises(GacError, match="'nothing' is unknown; expected one of kfac, custom, parametrised, misnamed, "):
        installed.get("nothing")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("misnamed", "method 'misnamed' of an installed package, packaged_methods:other, which calls itself 'another'"),
        ("absent", "method 'absent' of an installed package, packaged_methods:nothing: module .* has no attribute"),
        ("number", "a float as a method, which lacks name"),
    ],
)
def test_a_broken_entry_point_is_refused(name: str, message: str, installed: Registry[Method]) -> None:
    with pytest.raises(GacError, match=message):
        installed.get(name)
    assert installed.names == ("kfac",)

"""The methods by name; imports no torch, so that a name can be checked before anything is measured."""

from typing import TYPE_CHECKING, Any

from gac.core.errors import GacError
from gac.core.registry import Registry, check_contract

if TYPE_CHECKING:
    from gac.forms.curvature.methods import Method


def _check(method: Any) -> None:
    from gac.forms.curvature.methods import Method

    check_contract("method", method, (), Method)
    if method.folds and type(method).fold is Method.fold:
        raise GacError(f"method {method.name}, which folds", "its own fold(values, output, heads, groups)", "Add it.")


METHODS: "Registry[Method]" = Registry(
    "method",
    {
        "kfac": "gac.forms.curvature.methods:Kfac",
        "svd": "gac_extensions.baselines.methods:Svd",
        "asvd": "gac_extensions.baselines.methods:Asvd",
        "svd-llm": "gac_extensions.baselines.methods:SvdLlm",
        "palu": "gac_extensions.baselines.methods:Palu",
        "palu-fold": "gac_extensions.baselines.methods:PaluFold",
    },
    _check,
)

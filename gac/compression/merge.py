"""What the module of a weight holds, as the dense weight that does the same."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from gac.forms import form_named
from gac.plan import WeightChoice
from gac.repairs.layouts.planned import PLACES
from gac.repairs.padding import Insertion, padded

Parameters = Mapping[str, Tensor]


def merged(choice: WeightChoice, own: Parameters) -> dict[str, Tensor]:
    """The dense ``weight (out, in)``, and ``bias (out,)`` where there is one, of the same function up to rounding.

    Args:
        own: the parameters of the weight's module (``gac.runtime.modules.module_of``), by their names in it.
    """
    return _MERGED[form_named(choice.form).kind](choice, own)


def _same(choice: WeightChoice, own: Parameters) -> dict[str, Tensor]:
    return dict(own)


def _product(choice: WeightChoice, own: Parameters) -> dict[str, Tensor]:
    """W = B A of a pair, or of a pair for each group of rows, multiplied in double precision."""
    first, second = own["first.weight"].double(), own["second.weight"].double()
    if second.dim() == 3:
        first = first.reshape(len(second), -1, choice.in_features)
    product = (second @ first).reshape(choice.out_features, choice.in_features).to(own["first.weight"].dtype)
    return {"weight": product} | ({"bias": own["second.bias"]} if "second.bias" in own else {})


def _filled(choice: WeightChoice, own: Parameters) -> dict[str, Tensor]:
    """Zeros where neurons or directions of values were removed: nothing comes of them."""
    form, filled = form_named(choice.form), dict(own)
    missing = form.full(choice.weight) - choice.dim
    for place in PLACES[form.kind](choice):
        name = place.tensor.removeprefix(f"{choice.name}.")
        if name in own:
            filled[name] = padded(own[name], [Insertion(place.axis, end, missing) for end in place.ends])
    return filled


_MERGED: Mapping[str, Callable[[WeightChoice, Parameters], dict[str, Tensor]]] = MappingProxyType(
    {"dense": _same, "low_rank": _product, "grouped": _product, "narrow": _filled, "head_dim": _filled}
)

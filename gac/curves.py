"""Loss curves: what each dim of a form loses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gac.arrays import Floats
from gac.forms import Form
from gac.models.sites import Site


@dataclass(frozen=True, eq=False)
class LossCurve:
    """What each dim of one form loses: ``loss[d]`` nats a token at dim d, for d = 0 .. full.

    ``loss`` has shape ``(full + 1,)``, never rises, and is 0 at the full dim.
    """

    loss: Floats

    @property
    def full(self) -> int:
        return len(self.loss) - 1

    def scaled(self, share: float) -> "LossCurve":
        """Where only a share of each loss is expected."""
        return LossCurve(share * self.loss)


@dataclass(frozen=True, eq=False)
class SiteCurves:
    """The loss curves of one site.

    Attributes:
        low_rank: by weight name.
        grouped: likewise, of the weights that groups of heads were measured for.
        shorter: of the forms that shorten several weights together, by the name of the one they shorten on its input.
    """

    site: str
    low_rank: Mapping[str, LossCurve]
    shorter: Mapping[str, LossCurve] = field(default_factory=dict)
    grouped: Mapping[str, LossCurve] = field(default_factory=dict)

    def alone(self, form: Form) -> Mapping[str, LossCurve]:
        """Of a form that takes a weight by itself, by weight name; empty for the others."""
        return {"low_rank": self.low_rank, "grouped": self.grouped}.get(form.kind, {})


def curves_together(sites: Sequence[Site], curves: Sequence[SiteCurves], share: float = 1.0) -> tuple[SiteCurves, ...]:
    """The same curves for sites that ``as_planned`` made of the curves' own, or a share of every loss."""
    low_rank = {name: curve for one in curves for name, curve in one.low_rank.items()}
    shorter = {name: curve for one in curves for name, curve in one.shorter.items()}
    grouped = {name: curve for one in curves for name, curve in one.grouped.items()}
    found = []
    for site in sites:
        names = [weight.name for weight in site.weights]
        of_site = (
            {name: one[name].scaled(share) for name in names if name in one} for one in (low_rank, shorter, grouped)
        )
        found.append(SiteCurves(site.name, *of_site))
    return tuple(found)

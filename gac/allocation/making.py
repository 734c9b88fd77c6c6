"""All that a site may become where it is known what is fused."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gac.allocation.candidate_set import CandidateSet
from gac.allocation.combining import combined, combined_sharing, criteria_of, reduced
from gac.allocation.dims import dims_up_to, full_dim, that_run
from gac.allocation.latencies import Timing
from gac.allocation.options import of_what_is_shared, options_of, side_by_side, with_fused_gemm
from gac.allocation.rivals import Rivals
from gac.core.arrays import Ints
from gac.forms import DENSE, Form, form_named, variants_of
from gac.forms.loss_curves import LossCurve, LossCurves
from gac.models.sites import Site
from gac.plan.recipe import Space
from gac.schemes import Scheme


@dataclass(frozen=True, eq=False)
class Making:
    """What the candidates of a site are made from where it is known what is fused, and what will be limited.

    Attributes:
        limited: the cost columns in which candidates are compared.
        needed: those of them that have to be known; what they are not known of is left out at once.
    """

    site: Site
    curves: LossCurves
    space: Space
    schemes: Sequence[Scheme]
    timing: Timing
    limited: tuple[str, ...]
    needed: tuple[str, ...] = ()

    @property
    def forms(self) -> list[Form]:
        return [form_named(name) for name in self.space.forms]

    def all(self, rivals: Rivals) -> list[CandidateSet]:
        """All that the site may become, but for what the rivals, or some of it, are bound to beat.

        What its weights become each by itself is combined last, since it is most, and little of it is worth having.
        """
        own = [self._own(at) for at in range(len(self.site.weights))]
        found: list[CandidateSet] = []
        for form in self.forms:
            for scheme in self.schemes if (taken := self.site.joint_weights(form)) else ():
                (key,) = (weight for weight in self.site.weights if form.shortens(weight) == "in")
                if curve := self.curves.of(form, key, scheme.name):
                    found += self._together(form, scheme, taken, curve, own, rivals)
        rivals = rivals.joined_by(*(criteria_of(rows, self.limited) for rows in found))
        return [*self._combined(own, rivals), *found]

    def _own(self, at: int) -> CandidateSet:
        """One weight's own choices."""
        weight, dense, options = self.site.weights[at], DENSE, []
        for scheme in self.schemes:
            lost = self.curves.of(dense, weight, scheme.name)
            dims = that_run(dense, scheme, weight, full_dim(weight), self.timing.gpus)
            options.append(options_of(self.site, at, dense, scheme, dims, lost, self.timing))
            for form in (form for form in self.forms if form.applies_to(weight)):
                if not form.parent_form_name and not form.shortens(weight):
                    options += self._at_its_dims(form, scheme, at)
        return CandidateSet.joined(options)

    def _at_its_dims(self, form: Form, scheme: Scheme, at: int) -> list[CandidateSet]:
        """One weight in a form of its own; nothing where that was not measured."""
        weight = self.site.weights[at]
        if (curve := self.curves.of(form, weight, scheme.name)) is None:
            return []
        dims = self._dims(form, scheme, [at], form.max_useful_dim(weight))
        return [options_of(self.site, at, form, scheme, dims, curve, self.timing)]

    def _together(
        self,
        form: Form,
        scheme: Scheme,
        taken: Sequence[int],
        curve: LossCurve,
        own: Sequence[CandidateSet],
        rivals: Rivals,
    ) -> list[CandidateSet]:
        """One dim, below the full one, for all weights that a form takes together, beside the others' own choices."""
        dims, found = self._dims(form, scheme, taken, curve.full - 1), []
        inside = {at: self._inside(form, at) for at in taken}
        if len(taken) == len(own):  # where nothing lies inside, there is nothing to combine
            split = [one.shortening(1)[1] for forms in inside.values() for one in forms]
            whole, dims = dims[~np.isin(dims, split)], dims[np.isin(dims, split)]
            if len(whole):
                rows = side_by_side(self.site, [form] * len(own), [whole] * len(own), scheme, self.timing)
                rows = self._possible(replace(rows, loss=curve.loss[whole]))
                found += [rows] if len(rows) else []
        for dim in dims.tolist():
            options = list(own)
            for at in taken:
                options[at] = self._shortened(form, scheme, at, dim, inside[at])
            found += self._combined(options, rivals, float(curve.loss[dim]))
        return found

    def _inside(self, form: Form, at: int) -> list[Form]:
        """What a weight may have inside a form that takes it."""
        asked = (one for one in self.forms if one.parent_form_name == form.name)
        return list(variants_of(asked, self.site.weights[at]))

    def _shortened(self, form: Form, scheme: Scheme, at: int, dim: int, inside: Sequence[Form]) -> CandidateSet:
        """One weight at the dim of a form that takes it with others: as that form has it, or with one inside it."""
        options = [options_of(self.site, at, form, scheme, np.array([dim]), None, self.timing)]
        for one in (one for one in inside if one.shortening(1)[1] == dim):
            options += self._at_its_dims(one, scheme, at)
        return CandidateSet.joined(options)

    def _combined(self, options: Sequence[CandidateSet], rivals: Rivals, lost: float = 0.0) -> list[CandidateSet]:
        """All combinations of the weights' choices, reduced before and after each; nothing where none is left.

        Args:
            lost: what each loses besides.
        """
        options = [self._possible(own) for own in options]
        if not all(map(len, options)):
            return []
        if len(options) > 1:
            options = [reduced(own, self.limited) for own in options]
        if count := len(self.site.fused):
            sharing = combined_sharing(options[:count], self.limited, self._gemm)
            sharing = self._possible(with_fused_gemm(sharing, self.site, self.timing))
            options = [reduced(sharing, self.limited), *options[count:]]
        rows = combined(options, self.limited, rivals, lost) if len(options[0]) else None
        return [] if rows is None else [rows]

    def _gemm(self, widths: Ints) -> Ints:
        """The latency of what the fused weights run together, all in the one scheme."""
        (scheme,) = self.schemes
        return of_what_is_shared(self.site, widths, scheme, self.timing)[0]

    def _possible(self, rows: CandidateSet) -> CandidateSet:
        """Without those of which a needed cost is unknown."""
        return rows.at(rows.known(self.needed)) if self.needed else rows

    def _dims(self, form: Form, scheme: Scheme, taken: Sequence[int], largest: int) -> Ints:
        """The dims up to the largest that these weights may take together."""
        return dims_up_to(largest, self.site, form, scheme, taken, self.space.align, self.timing)

"""What weights and sites become: one choice each, with what it takes, counted again where it is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from gac.core.errors import PlanError
from gac.forms import DENSE, check_choice, form_named
from gac.forms.tensor_parallel import divides, moved_axes, split_gemms
from gac.models.sites import Site, Weight
from gac.plan.costs import BYTES, COSTS
from gac.schemes import DEFAULT_SCHEME, scheme_named

REMEDY = "Make it again; this one was edited."


@dataclass(frozen=True)
class WeightChoice:
    """What one weight becomes."""

    weight: Weight
    form: str
    dim: int
    scheme: str = DEFAULT_SCHEME

    @property
    def name(self) -> str:
        return self.weight.name

    @property
    def becomes(self) -> tuple[str, int, str]:
        """Form, dim and scheme."""
        return self.form, self.dim, self.scheme

    @property
    def is_dense(self) -> bool:
        """True if the weight has its dense form, in whatever scheme."""
        return form_named(self.form).is_dense

    @property
    def changed(self) -> bool:
        """Whether it is no longer as it was in the dense model."""
        return not self.is_dense or scheme_named(self.scheme).lossy

    @property
    def params(self) -> int:
        return form_named(self.form).params(self.weight, self.dim)

    @property
    def bytes(self) -> int:
        """Scales and zero points among them."""
        return counted([self], BYTES)[0]

    @property
    def dense_bytes(self) -> int:
        """Of the dense weight in 16 bits."""
        return counted([self], BYTES)[1]

    @property
    def length(self) -> int:
        """What alignment is judged by: the dim, or the features of as many heads or blocks."""
        form = form_named(self.form)
        return form.size(self.weight, self.dim) if form.dim_counts_units else self.dim

    def length_on(self, gpus: int) -> int:
        """That of what one of so many GPUs has of it, as far as alignment goes."""
        if gpus == 1:
            return self.length
        form = form_named(self.form)
        parts = split_gemms(form, self.weight, self.dim, 1, gpus)
        moved = zip(parts, moved_axes(form, self.weight), strict=False)  # there are none of what is skipped
        return gcd(self.length, *(gemm.axes[axis] for gemm, axis in moved if axis is not None))

    def divides(self, gpus: int) -> bool:
        """Whether so many GPUs have an equal part each."""
        return divides(form_named(self.form), self.weight, self.dim, scheme_named(self.scheme), gpus)

    @property
    def aligned(self) -> bool:
        """Whether it is dense, or that length a multiple of 8."""
        return self.is_dense or self.length % 8 == 0


@dataclass(frozen=True)
class Candidate:
    """What a site may become: a form, a scheme and a dim a weight; a latency (None: unknown) and a count a workload.

    ``interpolated``: how many of its weights' latencies were interpolated; ``modelled``: how many come from a model of
    the GPU, one count a workload, or none where it is not said, which means 0.
    ``shared``: its weights that read the same input run their first GEMMs as one.
    """

    forms: tuple[str, ...]
    schemes: tuple[str, ...]
    dims: tuple[int, ...]
    params: int
    loss: float
    latency_ns: tuple[int | None, ...]
    interpolated: tuple[int, ...]
    shared: bool = False
    modelled: tuple[int, ...] = ()

    def choices(self, weights: Sequence[Weight]) -> tuple[WeightChoice, ...]:
        """What each of the site's weights becomes."""
        return tuple(WeightChoice(*one) for one in zip(weights, self.forms, self.dims, self.schemes, strict=True))


@dataclass(frozen=True)
class SiteChoice:
    """The candidate chosen for a site; ``latency_ns`` has one entry a workload, None where unknown.

    ``shared``: its weights that read the same input run their first GEMMs as one.
    ``alternatives``: where the choice was the exact one, the best candidate with fewer parameters and the best with
    more (with fewer and more bytes, where these are limited), at the prices of the certificate.
    """

    site: str
    layer: int
    kind: str
    weights: tuple[WeightChoice, ...]
    params: int
    dense_params: int
    loss: float
    latency_ns: tuple[int | None, ...]
    shared: bool = False
    alternatives: tuple[Candidate, ...] = ()

    @classmethod
    def of(cls, site: Site, chosen: Candidate, alternatives: tuple[Candidate, ...] = ()) -> "SiteChoice":
        """One of a site's candidates as its choice."""
        weights, latency = chosen.choices(site.weights), chosen.latency_ns
        sizes = chosen.params, site.params
        return cls(site.name, site.layer, site.kind, weights, *sizes, chosen.loss, latency, chosen.shared, alternatives)


def counted(weights: Sequence[WeightChoice], column: str) -> tuple[int, int]:
    """What these choices take of a cost that follows from dims alone, and what the dense weights take."""
    cost, dense, plain = COSTS[column], DENSE, scheme_named(DEFAULT_SCHEME)
    used = sum(cost(form_named(one.form), scheme_named(one.scheme), one.weight, one.dim) for one in weights)
    return used, sum(cost(dense, plain, one.weight, dense.full(one.weight)) for one in weights)


def check(holds: bool, given: str, expected: str) -> None:
    """Refuse a plan or a frontier that contradicts itself.

    Raises:
        PlanError: of what is given and expected, where it does not hold.
    """
    if not holds:
        raise PlanError(given, expected, REMEDY)


def check_site(site: SiteChoice) -> None:
    weights = [one.weight for one in site.weights]
    _check_choices(site.weights, site.params, f"site {site.site}")
    dense = sum(weight.params for weight in weights)
    check(dense == site.dense_params, f"site {site.site} states {site.dense_params} dense parameters", f"{dense}")
    for other in site.alternatives:
        check_candidate(other, weights, len(site.latency_ns), f"an alternative of site {site.site}")


def check_candidate(candidate: Candidate, weights: Sequence[Weight], workloads: int, what: str) -> None:
    """Refuse a candidate that these weights cannot have, or whose counts are not those of its dims.

    Args:
        workloads: how many latencies it has.
        what: how an error names it: ``an option of site ...``.

    Raises:
        PlanError: naming what does not fit.
    """
    forms, schemes, dims = len(candidate.forms), len(candidate.schemes), len(candidate.dims)
    latency, interpolated = candidate.latency_ns, candidate.interpolated
    modelled = candidate.modelled or (0,) * workloads
    check(
        {forms, schemes, dims} == {len(weights)} and {len(latency), len(interpolated), len(modelled)} == {workloads},
        f"{what} has {forms} forms, {schemes} schemes, {dims} dims and {len(latency)} latencies, "
        f"{len(interpolated)} counts of interpolated and {len(modelled)} of modelled ones",
        f"{len(weights)} of the first three, one a weight, and {workloads} of the others, one a workload",
    )
    positive = all(ns is None or ns >= 0 for ns in latency) and min((*interpolated, *modelled), default=0) >= 0
    given = f"{what} has latencies {latency}, {interpolated} interpolated, {modelled} modelled"
    check(positive, given, "positive ns and counts")
    _check_choices(candidate.choices(weights), candidate.params, what)


def _check_choices(choices: Sequence[WeightChoice], params: int, what: str) -> None:
    for one in choices:
        check_choice(one.weight, one.form, one.dim)
        scheme = scheme_named(one.scheme)
        runs = scheme.shape_requirement is None or all(
            map(scheme.supports, form_named(one.form).latency.gemms(one.weight, one.dim, 1))
        )
        check(runs, f"{what} has {one.name} as {one.form} {one.dim} in {scheme.name}", scheme.shape_requirement or "")
    _check_meeting(choices, what)
    counted = sum(one.params for one in choices)
    check(counted == params, f"{what} states {params} parameters", f"{counted}, as its dims say")


def _check_meeting(choices: Sequence[WeightChoice], what: str) -> None:
    """Where weights meet on sides that a form shortens, they are all as long as it says there."""
    lengths = [form_named(one.form).shortening(one.dim) for one in choices]
    for form, dim in lengths:
        meeting = [at for at, one in enumerate(choices) if form.shortens(one.weight)]
        sides = {form.shortens(choices[at].weight) for at in meeting}
        agreed = sides == {"out", "in"} and all(lengths[at] == (form, dim) for at in meeting)
        check(
            agreed or not any(lengths[at] == (form, dim) for at in meeting),
            f"{what} has {', '.join(dict.fromkeys(f'{choices[at].form} dim {choices[at].dim}' for at in meeting))}",
            "one form and dim for all weights that it shortens together",
        )

"""The choices of weights and sites, and their checks: amounts are counted again from forms, schemes and dims."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from gac.core.errors import PlanError
from gac.forms import check_choice, form_named
from gac.forms.base import ModuleSpec
from gac.forms.tensor_parallel import divides, moved_axes, split_gemms
from gac.models.sites import Weight
from gac.plan.costs import BYTES, COSTS
from gac.schemes import DEFAULT_SCHEME, scheme_named

REMEDY = "Make it again; this one was edited."


@dataclass(frozen=True)
class WeightChoice:
    """The form, dim and scheme of one weight."""

    weight: Weight
    form: str
    dim: int
    scheme: str = DEFAULT_SCHEME

    @property
    def name(self) -> str:
        return self.weight.name

    @property
    def becomes(self) -> tuple[str, int, str]:
        return self.form, self.dim, self.scheme

    @property
    def module(self) -> ModuleSpec:
        """The module that runs it."""
        return form_named(self.form).module(self.weight, self.dim)

    @property
    def expert_sizes(self) -> tuple[int, int]:
        """The number of experts of a layer, and their neurons."""
        return form_named(self.form).routed_sizes(self.weight, self.dim)

    @property
    def description(self) -> str:
        """Name, form, dim and module, for errors."""
        return f"{self.name} is {self.form} with dim {self.dim}, {self.module}"

    @property
    def is_dense(self) -> bool:
        """True if the weight has its dense form, in whatever scheme."""
        return form_named(self.form).is_dense

    @property
    def changed(self) -> bool:
        """True unless it stays as in the dense model."""
        return self.form != "dense" or scheme_named(self.scheme).lossy

    @property
    def params(self) -> int:
        return form_named(self.form).params(self.weight, self.dim)

    @property
    def bytes(self) -> int:
        return counted([self], BYTES)[0]

    @property
    def dense_bytes(self) -> int:
        return counted([self], BYTES)[1]

    @property
    def length(self) -> int:
        """The length that alignment is judged by: the dim, or the features of as many heads or blocks."""
        form = form_named(self.form)
        return form.size(self.weight, self.dim) if form.dim_counts_units else self.dim

    def length_on(self, gpus: int) -> int:
        """The same for the part that one of several GPUs has."""
        if gpus == 1:
            return self.length
        form = form_named(self.form)
        parts = split_gemms(form, self.weight, self.dim, 1, gpus)
        moved = zip(parts, moved_axes(form, self.weight), strict=False)  # skipped weights have no axes
        return gcd(self.length, *(gemm.axes[axis] for gemm, axis in moved if axis is not None))

    def divides(self, gpus: int) -> bool:
        return divides(form_named(self.form), self.weight, self.dim, scheme_named(self.scheme), gpus)

    @property
    def aligned(self) -> bool:
        """True if it is dense, or ``length`` a multiple of 8."""
        return self.form == "dense" or self.length % 8 == 0


@dataclass(frozen=True)
class Candidate:
    """A possible choice of a site: a form, a scheme and a dim for each weight.

    Attributes:
        latency_ns: one a workload; None where unknown.
        interpolated: the number of its weights whose latencies were interpolated, one a workload.
        shared: its weights that read the same input run their first GEMMs as one.
        modelled: the number of latencies from a model of the GPU, one a workload; empty means 0.
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
        return tuple(WeightChoice(*each) for each in zip(weights, self.forms, self.dims, self.schemes, strict=True))


@dataclass(frozen=True)
class SiteChoice:
    """The candidate chosen for a site.

    Attributes:
        latency_ns: one a workload; None where unknown.
        shared: its weights that read the same input run their first GEMMs as one.
        alternatives: of an exact choice, the best candidate with fewer parameters and the best with more (with fewer
            and more bytes, where these are limited), at the prices of the certificate.
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


def counted(weights: Sequence[WeightChoice], column: str) -> tuple[int, int]:
    """The amounts of a cost of ``COSTS`` of these choices, and of the dense weights."""
    amount, dense, plain = COSTS[column].of_choice, form_named("dense"), scheme_named(DEFAULT_SCHEME)
    used = sum(amount(form_named(each.form), scheme_named(each.scheme), each.weight, each.dim) for each in weights)
    return used, sum(amount(dense, plain, choice.weight, dense.full(choice.weight)) for choice in weights)


# --- checks ---------------------------------------------------------------------------------------------------------


def check(holds: bool, problem: str, expected: str) -> None:
    if not holds:
        raise PlanError(problem, expected, REMEDY)


def check_site(site: SiteChoice) -> None:
    weights = [choice.weight for choice in site.weights]
    check(bool(weights), f"site {site.site} has no weights", "one at least")
    _check_choices(site.weights, site.params, f"site {site.site}")
    dense = sum(weight.params for weight in weights)
    check(dense == site.dense_params, f"site {site.site} states {site.dense_params} dense parameters", f"{dense}")
    for other in site.alternatives:
        check_candidate(other, weights, len(site.latency_ns), f"an alternative of site {site.site}")


def check_candidate(candidate: Candidate, weights: Sequence[Weight], workloads: int, what: str) -> None:
    """Refuse with a ``PlanError`` a candidate that these weights cannot have, or whose counts are not its dims'.

    Args:
        workloads: the number of latencies that it has.
        what: how an error names it: ``an option of site ...``.
    """
    forms, schemes, dims = len(candidate.forms), len(candidate.schemes), len(candidate.dims)
    latency, sources = candidate.latency_ns, (candidate.interpolated, candidate.modelled or (0,) * workloads)
    lengths = {len(latency), *map(len, sources)}
    check(
        {forms, schemes, dims} == {len(weights)} and lengths == {workloads},
        f"{what} has {forms} forms, {schemes} schemes, {dims} dims and {len(latency)} latencies "
        f"(sources: {', '.join(str(len(counts)) for counts in sources)})",
        f"{len(weights)} of the first three, one a weight, and {workloads} latencies with their sources",
    )
    positive = min((*filter(None, latency), *sources[0], *sources[1]), default=0) >= 0
    check(positive, f"{what} has latencies {latency}, from {sources}", "positive ns and counts")
    _check_choices(candidate.choices(weights), candidate.params, what)


def _check_choices(choices: Sequence[WeightChoice], params: int, what: str) -> None:
    for choice in choices:
        check_choice(choice.weight, choice.form, choice.dim)
        scheme = scheme_named(choice.scheme)
        problem, expected = f"{what} has {choice.name} in {scheme.name}", "a scheme that takes the weight"
        check(scheme.applies_to(choice.weight), problem, expected)
        if scheme.shape_requirement is not None and not choice.weight.is_routed:
            gemms = form_named(choice.form).latency.gemms(choice.weight, choice.dim, 1)
            problem = f"{what} has {choice.name} as {choice.form} {choice.dim} in {scheme.name}"
            check(all(map(scheme.supports, gemms)), problem, scheme.shape_requirement)
    _check_shortened(choices, what)
    count = sum(choice.params for choice in choices)
    check(count == params, f"{what} states {params} parameters", f"{count}, as its dims say")


def _check_shortened(choices: Sequence[WeightChoice], what: str) -> None:
    """Refuse sides of unequal length where a form shortens several weights together."""
    lengths = [form_named(choice.form).shortening(choice.dim) for choice in choices]
    for form, dim in lengths:
        meeting = [number for number, choice in enumerate(choices) if form.shortens(choice.weight)]
        sides = {form.shortens(choices[number].weight) for number in meeting}
        agreed = sides == {"out", "in"} and all(lengths[number] == (form, dim) for number in meeting)
        stated = dict.fromkeys(f"{choices[number].form} dim {choices[number].dim}" for number in meeting)
        check(
            agreed or not any(lengths[number] == (form, dim) for number in meeting),
            f"{what} has {', '.join(stated)}",
            "one form and dim for all weights that it shortens together",
        )

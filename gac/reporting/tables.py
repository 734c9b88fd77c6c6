"""Plans, cliffs, profiles and perplexities as rich tables, at most 100 columns wide; nothing is printed here."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from math import exp
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, JustifyMethod
from rich.table import Table
from rich.text import Text

from gac.plan import Plan, SiteChoice, WeightChoice
from gac.reporting.comparison import Comparison, Measured

if TYPE_CHECKING:
    from gac.profiling.cliffs import Cliffs
    from gac.profiling.table import Sweep

_SYMBOLS = {"low_rank": "r", "narrow": "w"}
_KERNEL_WIDTH = 44
_WHOLE = ("name", "digest")  # columns of things to type or compare: never cut
_CLIFFS = """\
collapsed: dims slower than some larger dim; worst: such a dim -> the larger one, times faster
period: only its multiples keep up (1: alignment does not matter); steps: jumps among the other dims"""
_POINTS = "us: median; +-: half the interquartile range; slower than: the larger dim that rescues it"


def _table(columns: Iterable[tuple[str, str]]) -> Table:
    """An empty table; each column has a heading and ``<`` or ``>`` for left or right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for heading, side in columns:
        justify: JustifyMethod = "right" if side == ">" else "left"
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=heading in _WHOLE)
    return table


def _legend(text: str) -> Text:
    return Text(text, style="dim")


# --- a plan ---------------------------------------------------------------------------------------------------------


def plan_summary(plan: Plan) -> Text:
    """``Plan.summary`` with its first line standing out."""
    text = Text(plan.summary())
    text.stylize("bold", 0, text.plain.index("\n"))
    return text


def plan_table(plan: Plan) -> Group:
    """One row a layer: the form and dim of every weight, the parameters kept and the loss in nats a token."""
    kinds = list(dict.fromkeys(_kind(weight) for weight in plan.weights))
    columns = [("layer", ">"), *((kind.removesuffix("_proj"), ">") for kind in kinds), ("kept", ">"), ("loss", ">")]
    table = _table(columns)
    for layer, group in groupby(plan.sites, key=lambda site: site.layer):
        sites = list(group)
        cells = {_kind(weight): _cell(weight) for site in sites for weight in site.weights}
        table.add_row(str(layer), *(cells.get(kind, "") for kind in kinds), *_totals(sites))
    return Group(table, _legend("r: rank of a low-rank pair; w: neurons of a narrower MLP; -: dense"))


def _kind(weight: WeightChoice) -> str:
    return weight.name.rpartition(".")[2]


def _cell(weight: WeightChoice) -> str:
    return "-" if weight.form == "dense" else f"{_SYMBOLS.get(weight.form, weight.form)} {weight.dim}"


def _totals(sites: Sequence[SiteChoice]) -> tuple[str, str]:
    kept = sum(site.params for site in sites) / sum(site.dense_params for site in sites)
    return f"{kept:.3f}", f"{sum(site.loss for site in sites):.4f}"


def plan_line(plan: Plan) -> Text:
    """Budget and alignment of a plan, in two lines."""
    budget, chosen = plan.budget, sum(plan.alignment.values())
    return Text(
        f"budget     {budget.used:,} of {budget.total:,} targeted parameters; {budget.limit:,} allowed\n"
        f"alignment  {plan.aligned_fraction:.1%} of {chosen} chosen dims are multiples of 8"
    )


# --- a GPU ----------------------------------------------------------------------------------------------------------


def profiles_table(entries: Sequence[Mapping[str, Any]]) -> Table:
    """The profiles that there are: ``name``, ``where``, and either what is in it or its ``problem``."""
    columns = [("name", "<"), ("", "<"), ("GPU", "<"), ("shapes", ">"), ("rows", "<"), ("date", "<"), ("digest", "<")]
    table = _table(columns)
    for entry in entries:
        name, where = entry["name"], entry["where"]
        if "problem" in entry:
            table.add_row(name, where, entry["problem"])
            continue
        rows = ", ".join(map(str, entry["rows"]))
        shapes, digest = f"{entry['shapes']:,}", entry["digest"][:12]
        table.add_row(name, where, entry["gpu"], shapes, rows, entry["date"], digest)
    return table


def cliffs_table(gpu: str, found: Sequence[tuple["Sweep", "Cliffs"]]) -> Group:
    """One row a sweep: how many dims collapse, the worst of them and what rescues it."""
    columns = [("sweep", "<"), ("dims", ">"), ("collapsed", ">"), ("worst", ">"), ("period", ">"), ("steps", ">")]
    table = _table(columns)
    for sweep, cliffs in found:
        counts = (f"{len(sweep):,}", f"{len(cliffs.collapsed):,}")
        table.add_row(sweep.label, *counts, _worst(cliffs), str(cliffs.period), f"{len(cliffs.sweet_spots):,}")
    return Group(Text(gpu, style="bold"), table, _legend(_CLIFFS))


def _worst(cliffs: "Cliffs") -> str:
    if not len(cliffs.collapsed):
        return "none"
    at = int(cliffs.slowdown.argmax())
    return f"{cliffs.collapsed[at]} -> {cliffs.rescue[at]}, {cliffs.slowdown[at]:.2f}x"


def points_table(sweep: "Sweep", cliffs: "Cliffs", first: int, last: int) -> Group:
    """Every measured dim from ``first`` to ``last``: its latency, and what would rescue it where it is collapsed."""
    columns = [(sweep.axis, ">"), ("us", ">"), ("+-", ">"), ("slower", ">"), ("than", ">"), ("kernels", "<")]
    table = _table(columns)
    rescues = zip(cliffs.collapsed.tolist(), cliffs.slowdown.tolist(), cliffs.rescue.tolist(), strict=True)
    collapsed = {dim: (f"{slowdown:.2f}x", str(rescue)) for dim, slowdown, rescue in rescues}
    points = zip(sweep.dims.tolist(), sweep.ns.tolist(), sweep.iqr.tolist(), sweep.kernels, strict=True)
    for dim, ns, iqr, kernels in points:
        if first <= dim <= last:
            shown = "\n".join(dict.fromkeys(map(_short, kernels)))
            table.add_row(str(dim), f"{ns / 1e3:.1f}", f"{iqr / 2e3:.1f}", *collapsed.get(dim, ("", "")), shown)
    return Group(Text(sweep.label, style="bold"), table, _legend(_POINTS))


def _short(kernel: str) -> str:
    """The name that tells: CUTLASS has it in a template argument, others before theirs; the middle goes if need be."""
    outer, _, arguments = kernel.removeprefix("void ").partition("<")
    name = arguments.partition(">")[0] if outer.startswith("cutlass::Kernel") else outer
    return name if len(name) <= _KERNEL_WIDTH else f"{name[: _KERNEL_WIDTH - 17]}...{name[-14:]}"


# --- a check --------------------------------------------------------------------------------------------------------


def perplexity_table(result: Comparison) -> Group:
    """Perplexity of a model, and where there is another one: the ratio, and the plan's prediction beside it."""
    columns = [("", "<"), ("perplexity", ">"), ("ratio", ">"), ("ln ratio", ">")]
    table = _table(columns)
    if result.against is not None:
        table.add_row(result.against.name, f"{result.against.perplexity.value:.3f}", "1", "0")
    table.add_row(result.model.name, f"{result.model.perplexity.value:.3f}", *_change(result.log_ratio))
    if result.predicted_perplexity is not None:
        table.add_row("  predicted by its plan", f"{result.predicted_perplexity:.3f}", *_change(result.predicted))
    return Group(table, _legend(_protocol(result.model)))


def _change(log_ratio: float | None) -> tuple[str, ...]:
    return () if log_ratio is None else (f"{exp(log_ratio):.4f}", f"{log_ratio:.4f}")


def _protocol(measured: Measured) -> str:
    value = measured.perplexity
    return f"{value.protocol}\n{value.tokens:,} tokens predicted, {value.dtype}"

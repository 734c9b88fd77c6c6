"""What each result shows of itself: the table for people, and the rows for a DataFrame."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from gac.allocation.frontier import Frontier
from gac.evaluation.results import Perplexity
from gac.plan import Plan, SiteChoice, WeightChoice
from gac.profiling.cliffs import Cliffs
from gac.profiling.table import Profile
from gac.reporting.frontier import frontier_table
from gac.reporting.html_tables import html_of
from gac.reporting.layout import class_name, legend, new_table
from gac.reporting.tables import plan_summary, plan_table, weights_by_layer

_WIDTH = 100

Row = Mapping[str, Any]


@dataclass(frozen=True)
class View:
    """How one kind of result is shown.

    Attributes:
        table: what rich prints.
        rows: of the DataFrame, by column name.
    """

    table: Callable[[Any], RenderableType]
    rows: Callable[[Any], Sequence[Row]]

    def text(self, result: Any) -> str:
        """The table without colours."""
        plain: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False, "no_color": True}
        console = Console(width=_WIDTH, force_terminal=False, force_jupyter=False, **plain)
        with console.capture() as captured:
            console.print(self.table(result))
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    def html(self, result: Any) -> str:
        return html_of(self.table(result))


def view_of(result: object) -> View:
    """The view of a result, found by the name of its class."""
    return VIEWS[type(result).__name__]


# --- a plan ---------------------------------------------------------------------------------------------------------


def _plan(plan: Plan) -> Group:
    return Group(plan_table(plan), plan_summary(plan))


def _plan_rows(plan: Plan) -> list[Row]:
    called = {weight.name: short for _, weights in weights_by_layer(plan) for short, weight in weights.items()}
    names = [workload.workload for workload in plan.workloads]
    return [_weight_row(site, weight, called[weight.name], names) for site in plan.sites for weight in site.weights]


def _weight_row(site: SiteChoice, weight: WeightChoice, kind: str, workloads: Sequence[str]) -> Row:
    latencies = zip(workloads, site.latency_ns, strict=True)
    return {
        "layer": site.layer,
        "kind": kind,
        "weight": weight.name,
        **_fields(weight, "form", "dim"),
        **_fields(weight.weight, "out_features", "in_features"),
        "params": weight.params,
        "dense_params": weight.weight.params,
        "kept": weight.params / weight.weight.params,
        "aligned": weight.form == "dense" or weight.dim % 8 == 0,
        "site": site.site,
        "site_loss": site.loss,
        **{f"site_latency_ns {workload}": ns for workload, ns in latencies},
    }


# --- a profile and its cliffs ---------------------------------------------------------------------------------------


def _profile(profile: Profile) -> Group:
    columns = [("operator", "<"), ("dtype", "<"), ("shapes", ">"), ("failed", ">"), ("fastest", ">"), ("slowest", ">")]
    kinds: dict[tuple[str, str], list[float | None]] = {}
    for row in profile.measurements:
        kinds.setdefault((row.operator, row.dtype), []).append(row.median_ns)
    rows: list[Sequence[str | Text]] = []
    for kind, medians in sorted(kinds.items()):
        known = [ns for ns in medians if ns is not None]
        times = [f"{pick(known) / 1e3:,.1f} µs" for pick in (min, max)] if known else ["-", "-"]
        rows.append([*map(Text, kind), f"{len(medians):,}", f"{len(medians) - len(known):,}", *times])
    header = profile.header
    title = Text(f"profile {profile.path.stem}: {header.gpu}", style="bold")
    software = f"driver {header.driver}, CUDA {header.cuda}, cuBLAS {header.cublas}, PyTorch {header.torch}"
    quality = f"{profile.converged_fraction:.1%} of the medians known to 1 %, drift {profile.drift:.1%}"
    return Group(
        title, new_table(columns, rows), legend(f"{software}\n{quality}; {header.date}, digest {profile.digest[:12]}")
    )


def _profile_rows(profile: Profile) -> list[Row]:
    rows = profile.measurements
    return [_fields(row, *_RUN) | dict(row.shape) | _fields(row, *_MEASURED) for row in rows]


_RUN, _MEASURED = ("operator", "dtype", "cache"), ("median_ns", "spread_ns", "samples", "converged", "error")


def _fields(record: object, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _cliffs(cliffs: Cliffs) -> Group:
    columns = [("alignment class", "<"), ("dims", ">"), ("slowdown", ">"), ("padded to", ">"), ("keeps up", "<")]
    rows = [
        (class_name(one.step), f"{one.dims:,}", f"{one.slowdown:.2f}x", f"multiples of {one.against}", keeps_up)
        for one in cliffs.classes
        for keeps_up in ("yes" if one.keeps_up else "no",)
    ]
    worst = ""
    if len(cliffs.collapsed):
        at = int(cliffs.slowdown.argmax())
        worst = f", the worst {cliffs.collapsed[at]} ({cliffs.slowdown[at]:.2f}x the latency of {cliffs.rescue[at]})"
    found = (
        f"{len(cliffs.collapsed):,} collapsed dims{worst}; {len(cliffs.sweet_spots):,} sweet spots\n"
        f"period {cliffs.period}; differences under {cliffs.noise:.1%} are noise"
    )
    return Group(new_table(columns, rows), legend(found))


def _cliffs_rows(cliffs: Cliffs) -> list[Row]:
    fallen = zip(cliffs.collapsed.tolist(), cliffs.rescue.tolist(), cliffs.slowdown.tolist(), strict=True)
    steps = zip(cliffs.sweet_spots.tolist(), cliffs.edges.tolist(), cliffs.jumps.tolist(), strict=True)
    rows = [{"dim": dim, "is": "collapsed", "beside": other, "times": times} for dim, other, times in fallen]
    rows += [{"dim": dim, "is": "sweet spot", "beside": other, "times": times} for dim, other, times in steps]
    return sorted(rows, key=lambda row: (row["dim"], row["is"]))


# --- a frontier and a perplexity ------------------------------------------------------------------------------------


def _frontier(frontier: Frontier) -> Group:
    made, method = frontier.measured, frontier.recipe.measure.method
    title = f"frontier of {made.model}, {method}, {made.profile.gpu}"
    return Group(Text(title, style="bold"), frontier_table(frontier))


def _frontier_rows(frontier: Frontier) -> list[Row]:
    return [
        {
            **_fields(point, "asked", "limit", "params"),
            "kept": point.params / frontier.dense_params,
            **_fields(point, "loss", "perplexity"),
            **{f"latency_ns {name}": ns for name, ns in zip(frontier.workloads, point.latency_ns, strict=True)},
            **_fields(point.certificate, "status", "gap"),
        }
        for point in frontier.points
    ]


def _perplexity(found: Perplexity) -> Group:
    columns = [("perplexity", ">"), ("tokens predicted", ">"), ("dtype", "<")]
    return Group(new_table(columns, [(f"{found.value:.3f}", f"{found.tokens:,}", found.dtype)]), legend(found.protocol))


def _perplexity_rows(found: Perplexity) -> list[Row]:
    return [asdict(found)]


VIEWS: Mapping[str, View] = MappingProxyType(
    {
        "Plan": View(_plan, _plan_rows),
        "Profile": View(_profile, _profile_rows),
        "Cliffs": View(_cliffs, _cliffs_rows),
        "Frontier": View(_frontier, _frontier_rows),
        "Perplexity": View(_perplexity, _perplexity_rows),
    }
)

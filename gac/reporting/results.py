"""What each result shows of itself: the table for people, and the rows for a DataFrame."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import singledispatch
from html import escape
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from gac.allocation.frontier import Frontier
from gac.evaluation.results import Perplexity
from gac.plan.plan import Plan
from gac.profiling.cliffs import Cliffs
from gac.profiling.table import Profile
from gac.reporting.formatting import class_name, legend, new_table
from gac.reporting.frontier import frontier_table
from gac.reporting.tables import plan_summary, plan_table, short_names_of

_WIDTH, _TALLEST = 100, "30em"

Row = dict[str, Any]


@singledispatch
def table_of(result: Any) -> Group:
    """What rich prints of a plan, of weights or of tokens, a profile, cliffs, a frontier or a perplexity."""
    raise AssertionError(f"no table of {type(result).__name__}")


@singledispatch
def rows_of(result: Any) -> Sequence[Row]:
    """The rows of the DataFrame, by column name."""
    raise AssertionError(f"no rows of {type(result).__name__}")


def _fields(record: object, *names: str) -> Row:
    return {name: getattr(record, name) for name in names}


# --- a plan ---------------------------------------------------------------------------------------------------------


@table_of.register
def _(plan: Plan) -> Group:
    return Group(plan_table(plan), plan_summary(plan))


@rows_of.register
def _(plan: Plan) -> Sequence[Row]:
    called = short_names_of(plan.sites)
    names = [f"site_latency_ns {one.workload}" for one in plan.workloads]
    return [
        {
            "layer": site.layer,
            "kind": called[one.name],
            "weight": one.name,
            **_fields(one, "form", "dim", "scheme"),
            **_fields(one.weight, "out_features", "in_features"),
            "params": one.params,
            "dense_params": one.weight.params,
            "kept": one.params / one.weight.params,
            "bytes": one.bytes,
            "aligned": one.aligned,
            "site": site.site,
            "site_loss": site.loss,
            **dict(zip(names, site.latency_ns, strict=True)),
        }
        for site in plan.sites
        for one in site.weights
    ]


# --- a profile and cliffs -------------------------------------------------------------------------------------------


@table_of.register
def _(profile: Profile) -> Group:
    columns = [("operator", "<"), ("dtype", "<"), ("shapes", ">"), ("failed", ">"), ("fastest", ">"), ("slowest", ">")]
    kinds: dict[tuple[str, str], list[float | None]] = {}
    for row in profile.measurements:
        kinds.setdefault((row.operator, row.dtype), []).append(row.median_ns)
    table = new_table(columns)
    for kind, medians in sorted(kinds.items()):
        known = [ns for ns in medians if ns is not None]
        times = [f"{pick(known) / 1e3:,.1f} µs" for pick in (min, max)] if known else ["-", "-"]
        table.add_row(*map(Text, kind), f"{len(medians):,}", f"{len(medians) - len(known):,}", *times)
    header = profile.header
    found = (
        f"driver {header.driver}, {header.libraries}\n"
        f"{profile.converged_fraction:.1%} of the medians known to 1 %, drift {profile.drift:.1%}; {header.date}, "
        f"digest {profile.digest[:12]}"
    )
    return Group(Text(f"profile {profile.path.stem}: {header.gpu}", style="bold"), table, legend(found))


@rows_of.register
def _(profile: Profile) -> Sequence[Row]:
    run, measured = ("operator", "dtype", "cache"), ("median_ns", "spread_ns", "samples", "converged", "error")
    return [_fields(row, *run) | dict(row.shape) | _fields(row, *measured) for row in profile.measurements]


@table_of.register
def _(cliffs: Cliffs) -> Group:
    columns = [("alignment class", "<"), ("dims", ">"), ("slowdown", ">"), ("padded to", ">"), ("keeps up", "<")]
    table = new_table(columns)
    for one in cliffs.classes:
        keeps_up = "yes" if one.keeps_up else "no"
        padded = f"multiples of {one.against}"
        table.add_row(class_name(one.step), f"{one.dims:,}", f"{one.slowdown:.2f}x", padded, keeps_up)
    worst = ""
    if len(cliffs.collapsed):
        at = int(cliffs.slowdown.argmax())
        worst = f", the worst {cliffs.collapsed[at]} ({cliffs.slowdown[at]:.2f}x the latency of {cliffs.rescue[at]})"
    found = (
        f"{len(cliffs.collapsed):,} collapsed dims{worst}; {len(cliffs.sweet_spots):,} sweet spots\n"
        f"period {cliffs.period}; differences under {cliffs.noise:.1%} are noise"
    )
    return Group(table, legend(found))


@rows_of.register
def _(cliffs: Cliffs) -> Sequence[Row]:
    kinds = {
        "collapsed": (cliffs.collapsed, cliffs.rescue, cliffs.slowdown),
        "sweet spot": (cliffs.sweet_spots, cliffs.edges, cliffs.jumps),
    }
    rows = [
        {"dim": dim, "is": kind, "beside": other, "times": times}
        for kind, columns in kinds.items()
        for dim, other, times in zip(*(column.tolist() for column in columns), strict=True)
    ]
    return sorted(rows, key=lambda row: (row["dim"], row["is"]))


# --- a frontier and a perplexity ------------------------------------------------------------------------------------


@table_of.register
def _(frontier: Frontier) -> Group:
    made, method = frontier.measured, frontier.recipe.measure.method
    title = f"frontier of {made.model}, {method}, {made.profile.gpu}"
    return Group(Text(title, style="bold"), frontier_table(frontier))


@rows_of.register
def _(frontier: Frontier) -> Sequence[Row]:
    names = [f"latency_ns {name}" for name in frontier.workloads]
    return [
        {
            **_fields(point, "asked", "limit", "params"),
            "kept": point.params / frontier.dense_params,
            "bytes": frontier.bytes(point),
            "bits": frontier.bits(point),
            "kv_numbers": frontier.kv_numbers(point),
            **_fields(point, "loss", "together", "perplexity"),
            **dict(zip(names, point.latency_ns, strict=True)),
            **_fields(point.certificate, "status", "gap"),
        }
        for point in frontier.points
    ]


@table_of.register
def _(found: Perplexity) -> Group:
    columns = [("perplexity", ">"), ("tokens predicted", ">"), ("dtype", "<")]
    return Group(new_table(columns, [(f"{found.value:.3f}", f"{found.tokens:,}", found.dtype)]), legend(found.protocol))


@rows_of.register
def _(found: Perplexity) -> Sequence[Row]:
    return [asdict(found)]


# --- text and HTML --------------------------------------------------------------------------------------------------


def text_of(result: Any) -> str:
    """The table without colours."""
    plain: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False, "no_color": True}
    console = Console(width=_WIDTH, force_terminal=False, force_jupyter=False, **plain)
    with console.capture() as captured:
        console.print(table_of(result))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def html_of(result: Any) -> str:
    """The table as HTML: every word is escaped, colours are left to the page, tables scroll where they are large."""
    return "\n".join(_parts(table_of(result)))


def _parts(renderable: RenderableType) -> Iterator[str]:
    if isinstance(renderable, Group):
        for one in renderable.renderables:
            yield from _parts(one)
    elif isinstance(renderable, Table):
        columns = renderable.columns
        heads = _cells('th scope="col"', columns, [column.header for column in columns])
        rows = zip(*(column.cells for column in columns), strict=True)
        body = "".join(f"<tr>{_cells('td', columns, row)}</tr>" for row in rows)
        table = f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
        yield f'<div style="max-height: {_TALLEST}; overflow: auto">{table}</div>'
    else:
        yield f'<pre style="white-space: pre-wrap">{_escaped(renderable)}</pre>'


def _cells(tag: str, columns: Sequence[Column], cells: Sequence[RenderableType]) -> str:
    return "".join(
        f'<{tag} style="text-align: {column.justify}">{_escaped(cell)}</{tag[:2]}>'
        for column, cell in zip(columns, cells, strict=True)
    )


def _escaped(cell: RenderableType) -> str:
    return escape(cell.plain if isinstance(cell, Text) else str(cell)).replace("\n", "<br>")

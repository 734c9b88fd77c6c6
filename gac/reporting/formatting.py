"""How tables and pages write numbers and choices, and the look that tables share."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import floor, log10

from rich import box
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from gac.models.sites import short_names
from gac.plan.plan import WeightChoice
from gac.schemes import DEFAULT_SCHEME

_NUMBER, _ENDLESS = 16, 10**6  # letters of a word that is not broken; more than any table is wide
_WHOLE = ("name", "digest", "study")  # columns of things to type or compare: never cut


def duration(ns: int | None) -> str:
    """For example ``30.4 µs``; ``unknown`` for None."""
    if ns is None:
        return "unknown"
    if abs(ns) < 1_000:
        return f"{ns} ns"
    return f"{ns / 1e3:,.1f} µs" if abs(ns) < 1_000_000 else f"{ns / 1e6:,.3f} ms"


def nats(loss: float) -> str:
    """Three significant digits, written out down to a millionth."""
    if not 1e-6 <= abs(loss) < 1:
        return f"{loss:.3g}"
    return f"{loss:.{2 - floor(log10(abs(loss)))}f}"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending whole numbers, neighbours drawn together: ``0-4, 7``."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def counted(count: int, what: str) -> str:
    """For example ``1 weight``, ``2 weights``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def choice(weight: WeightChoice) -> str:
    """What one weight becomes: ``dense``, ``low_rank 128 w4a16`` (not to be broken between the words)."""
    dim = [] if weight.is_dense else [f"{weight.dim:,}"]
    scheme = [] if weight.scheme == DEFAULT_SCHEME else [weight.scheme]
    return "\N{NO-BREAK SPACE}".join([weight.form, *dim, *scheme])


def choices(weights: Sequence[WeightChoice]) -> str:
    """What the weights of a site become: once where all become the same."""
    found = list(map(choice, weights))
    if len(set(found)) == 1:
        return found[0]
    called = short_names([weight.name for weight in weights])
    return ", ".join(f"{called[weight.name]} {one}" for weight, one in zip(weights, found, strict=True))


def megabytes(count: int) -> str:
    """For example ``113.8 MB``; of less than one, ``184.3 kB``."""
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"


class FittingTable(Table):
    """A table that breaks neither headings nor numbers: where they do not fit side by side, each row is a list."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._widths(console, options)
        for column, width in zip(self.columns, widths, strict=False):
            column.width = width
        yield from super().__rich_console__(console, options) if widths else self._lists()

    def _widths(self, console: Console, options: ConsoleOptions) -> list[int]:
        """How wide each column is, the widest narrowed first; none where headings or numbers would be broken."""
        for column in self.columns:
            column.width = None
        wide = options.update_width(_ENDLESS)
        needs = [[Measurement.get(console, wide, one) for one in (of.header, *of.cells)] for of in self.columns]
        widths = [max(need.maximum for need in column) for column in needs]
        least = [max(column[0].minimum, *(min(need.minimum, _NUMBER) for need in column)) for column in needs]
        least = [most if of.no_wrap else low for of, most, low in zip(self.columns, widths, least, strict=True)]
        room = options.max_width - (Measurement.get(console, wide, self).maximum - sum(widths))
        while sum(widths) > room:
            width, at = max((width if width > least[at] else 0, at) for at, width in enumerate(widths))
            if not width:
                return []
            widths[at] -= 1
        return widths

    def _lists(self) -> Iterator[Text]:
        """Row by row, a line for each heading and what stands below it."""
        for row in zip(*(column.cells for column in self.columns), strict=True):
            named = ((str(column.header), cell) for column, cell in zip(self.columns, row, strict=True))
            yield from (Text.assemble(f"{name}: " if name else "", cell) for name, cell in named if str(cell))
            yield Text()


def new_table(columns: Iterable[tuple[str, str]], rows: Iterable[Sequence[str | Text]] = ()) -> Table:
    """A table; each column has a heading and ``<`` or ``>`` for left or right."""
    table = FittingTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for heading, side in columns:
        justify: JustifyMethod = "right" if side == ">" else "left"
        table.add_column(Text(heading), justify=justify, overflow="fold", no_wrap=heading in _WHOLE)
    for row in rows:
        table.add_row(*row)
    return table


def legend(text: str) -> Text:
    """What stands below a table to read it by."""
    return Text(text, style="dim")


def class_name(step: int) -> str:
    """What an alignment class is called: ``odd``, ``8 x odd``."""
    return "odd" if step == 1 else f"{step} x odd"

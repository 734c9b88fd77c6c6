"""Studies of attention: the cost of a misaligned head_dim, who serves it, and the bandwidth it is served with."""

from collections.abc import Sequence
from statistics import median

from gac.lab.studies import published
from gac.lab.studies.readings import Readings
from gac.lab.studies.records import Cell, Column, Finding, Study, Verdict
from gac.lab.studies.served import kernels_note
from gac.lab.studies.shapes import classes_note, sdpa, slowdowns
from gac.lab.studies.verdicts import ABSENT, band_rule, close, graded, percent, stated, times
from gac.profiling.records import Point

DENSE = range(64, 257)
BACKENDS = ("auto", "flash", "mem_efficient", "math", "cudnn")

DENSE_BAND = (1.25, 2.0)
"""Published: 1.3x to 2x where head_dim % 8 != 0 (107 against 112: 1.39x); the lower end has room for noise."""

SAME_BACKEND = 0.10
"""What PyTorch chose is as fast as a backend within this: it chose that backend."""

MATH_SLOWER = 5.0
"""The math backend takes at least this many times longer than the automatic choice (published: 13x to 22x)."""

LOST_BANDWIDTH = (0.20, 0.50)
"""Published: 26 to 30 % at 113 and 121, summed up as about 40 %."""

NO_LOSS = 0.05

_SETTING = "A100-80GB, B=4 S=2048 H=32 fp16"


def _dense_points() -> tuple[Point, ...]:
    return tuple(sdpa(d) for d in DENSE)


def _dense(readings: Readings) -> Finding:
    figures = {row.head_dim: row.latency_ms for row in published.sdpa("S1")}
    shown = sorted({*figures, 72, 80, 88, 129, 136, 160, 192, 224, 256})
    rows = tuple((d, readings.ms(sdpa(d)), _next_eight(readings, d), figures.get(d)) for d in shown)
    factor = readings.middle(slowdowns(readings, sdpa, DENSE), "the slowdown of misaligned head dims")
    verdict = graded(factor, *DENSE_BAND)
    at_107 = readings.ratio(sdpa(107), sdpa(112))
    example = f"; 107 takes {at_107:.2f}x as long as 112 (A100: 1.39x)" if at_107 is not None else ""
    figures_said = (
        f"head dims that are no multiple of 8 take {times(factor, *DENSE_BAND)} as long as the next multiple{example}"
    )
    columns = (
        Column("head_dim"),
        Column("measured", "ms"),
        Column("over next multiple of 8", "x"),
        Column("A100", "ms"),
    )
    notes = (
        classes_note(readings, sdpa, DENSE, "head_dim"),
        _falls(readings),
        *_served(readings, DENSE),
        *close("", factor, ABSENT, *DENSE_BAND),
    )
    return Finding(columns, rows, verdict, stated(verdict, figures_said), notes)


def _served(readings: Readings, dims: Sequence[int]) -> tuple[str, ...]:
    """Whose kernels serve aligned and misaligned head dims."""
    groups = {"head_dim % 8 == 0": (d for d in dims if d % 8 == 0), "the others": (d for d in dims if d % 8)}
    return kernels_note(readings, {name: [sdpa(d) for d in members] for name, members in groups.items()})


def _next_eight(readings: Readings, d: int) -> float | None:
    return slowdowns(readings, sdpa, [d])[0] if d % 8 else None


def _falls(readings: Readings) -> str:
    """Which multiples of 8 are slower than the next one, beyond 2 %."""
    pairs = [(d, readings.ratio(sdpa(d), sdpa(d + 8))) for d in DENSE if d % 8 == 0 and d + 8 in DENSE]
    slower = [str(d) for d, ratio in pairs if ratio is not None and ratio > 1.02]
    return f"multiples of 8 that are slower than the next one: {', '.join(slower) or 'none'}"


SDPA_DENSE = Study(
    "sdpa-dense",
    "attention at every head_dim from 64 to 256",
    "head_dim % 8 != 0 costs 1.3x to 2x (107: 2.147 ms, 112: 1.545 ms, 128: 1.485 ms)",
    f"GAC's study, experiment S1, {_SETTING}",
    band_rule("median over misaligned head dims of latency over that of the next multiple of 8", *DENSE_BAND),
    _dense_points,
    _dense,
)


def _operator(backend: str) -> str:
    return "efficient" if backend == "mem_efficient" else backend


def _backend_dims() -> tuple[int, ...]:
    return tuple(sorted({row.head_dim for row in published.sdpa("S2")}))


def _backend_points() -> tuple[Point, ...]:
    return tuple(sdpa(d, _operator(backend)) for d in _backend_dims() for backend in BACKENDS)


def _backends(readings: Readings) -> Finding:
    figures = {(row.head_dim, row.backend): row.latency_ms for row in published.sdpa("S2")}
    rows = tuple(
        _backend_row(readings, d, backend, figures.get((d, backend))) for d in _backend_dims() for backend in BACKENDS
    )
    flash = all(_near(readings.ratio(sdpa(d), sdpa(d, "flash"))) for d in _backend_dims())
    refused = readings.ns(sdpa(107, "efficient")) is None
    slower = readings.middle(
        [readings.ratio(sdpa(d, "math"), sdpa(d)) for d in _backend_dims()], "how slow the math backend is"
    )
    verdict = _backend_verdict(flash, refused, slower >= MATH_SLOWER)
    columns = (Column("head_dim"), Column("backend", side="<"), Column("measured", "ms"), Column("A100", "ms"))
    theirs = median(
        math / auto
        for d in _backend_dims()
        if (math := figures[d, "math"]) is not None and (auto := figures[d, "auto"]) is not None
    )
    said = (
        f"the automatic choice {'runs as fast as flash at every head_dim' if flash else _chosen(readings)}, "
        f"mem-efficient {'refuses' if refused else 'takes'} 107, math takes {slower:.0f}x as long as the automatic "
        f"choice (A100: {theirs:.0f}x)"
    )
    notes = (*_flash_edges(readings), *close("math", slower, MATH_SLOWER))
    return Finding(columns, rows, verdict, stated(verdict, said), notes)


def _flash_edges(readings: Readings) -> tuple[str, ...]:
    """Notes for head dims at which the automatic choice is only just as fast as flash, or only just not."""
    ratios = ((d, readings.ratio(sdpa(d), sdpa(d, "flash"))) for d in _backend_dims())
    return tuple(
        text
        for d, ratio in ratios
        if ratio is not None
        for text in close(f"automatic over flash at {d}", ratio, 1 - SAME_BACKEND, 1 + SAME_BACKEND)
    )


def _backend_row(readings: Readings, d: int, backend: str, figure: float | None) -> tuple[Cell, ...]:
    measured = readings.ms(sdpa(d, _operator(backend)))
    refused = figure is None and backend != "cudnn"
    return d, backend, "refused" if measured is None else measured, "refused" if refused else figure


def _backend_verdict(flash: bool, refused: bool, math: bool) -> Verdict:
    if flash and refused and math:
        return "held"
    return "other" if refused or math else "did not hold"


def _near(ratio: float | None) -> bool:
    return ratio is not None and abs(ratio - 1) <= SAME_BACKEND


def _chosen(readings: Readings) -> str:
    """Which backend runs as fast as the automatic choice, head_dim by head_dim."""
    by_backend: dict[str, list[str]] = {}
    for d in _backend_dims():
        found = [name for name in BACKENDS[1:] if _near(readings.ratio(sdpa(d), sdpa(d, _operator(name))))]
        by_backend.setdefault(" or ".join(found) or "none of them", []).append(str(d))
    return "runs as fast as " + " and as ".join(f"{name} at {' '.join(dims)}" for name, dims in by_backend.items())


SDPA_BACKENDS = Study(
    "sdpa-backends",
    "which backend serves which head_dim",
    "FlashAttention serves every head_dim, 107 included (2.139 ms); mem-efficient refuses 107; math takes 26 to 28 ms",
    f"GAC's study, experiment S2, {_SETTING}",
    f"rule: held where the automatic choice is within {percent(SAME_BACKEND)} of flash at every head_dim, "
    f"mem-efficient refuses 107 and math takes at least {MATH_SLOWER:.0f}x as long; other where only the refusal or "
    "the slow math backend is there; did not hold where neither is",
    _backend_points,
    _backends,
)


def _bandwidth_points() -> tuple[Point, ...]:
    return tuple(sdpa(d) for d in _bandwidth_dims())


def _bandwidth_dims() -> range:
    return range(64, 129)


def _bandwidth(readings: Readings) -> Finding:
    figures = {row.head_dim: row.gb_s for row in published.hypothesis("H3") if row.head_dim is not None}
    shown = sorted({*figures, 64, 96, 104, 107, 128})
    rows = tuple(
        (
            d,
            readings.gb_s(sdpa(d)),
            _hundredfold(_lost(readings, d)),
            figures.get(d),
            _hundredfold(_published_lost(figures, d)),
        )
        for d in shown
    )
    lost = readings.middle(
        [_lost(readings, d) for d in _bandwidth_dims()], "the bandwidth lost by misaligned head dims"
    )
    least, most = LOST_BANDWIDTH
    verdict: Verdict = "did not hold" if lost < NO_LOSS else "held" if least <= lost <= most else "other"
    columns = (
        Column("head_dim"),
        Column("measured", "GB/s"),
        Column("lost", "%"),
        Column("A100", "GB/s"),
        Column("A100 lost", "%"),
    )
    said = (
        f"misaligned head dims move {percent(lost, NO_LOSS, least, most)} fewer bytes a second than the multiple of 8 "
        f"below them (A100: {_published_losses(figures)})"
    )
    notes = (*_served(readings, _bandwidth_dims()), *close("", lost, NO_LOSS, least, most, write=percent))
    return Finding(columns, rows, verdict, stated(verdict, said), notes)


def _lost(readings: Readings, d: int) -> float | None:
    """Share of the bandwidth at the multiple of 8 below that a misaligned head_dim loses."""
    ours, aligned = readings.gb_s(sdpa(d)), readings.gb_s(sdpa(d - d % 8))
    return None if d % 8 == 0 or ours is None or aligned is None else 1 - ours / aligned


def _published_lost(figures: dict[int, float | None], d: int) -> float | None:
    ours, aligned = figures.get(d), figures.get(d - d % 8)
    return None if d % 8 == 0 or ours is None or aligned is None else 1 - ours / aligned


def _published_losses(figures: dict[int, float | None]) -> str:
    lost = _known([_published_lost(figures, d) for d in figures])
    return f"{percent(min(lost))} and {percent(max(lost))}"


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _hundredfold(share: float | None) -> float | None:
    return None if share is None else 100 * share


SDPA_BANDWIDTH = Study(
    "sdpa-bandwidth",
    "hypothesis H3: effective bandwidth of attention by head_dim",
    "aligned head dims reach 153 to 160 GB/s, misaligned ones 107 to 118: up to 40 % of the bandwidth is lost",
    f"GAC's study, experiment C23 (H3), {_SETTING}",
    "rule: median over misaligned head dims of the share of GB/s lost against the multiple of 8 below; held from "
    f"{percent(LOST_BANDWIDTH[0])} to {percent(LOST_BANDWIDTH[1])}, did not hold below {percent(NO_LOSS)}, other "
    "beyond",
    _bandwidth_points,
    _bandwidth,
)

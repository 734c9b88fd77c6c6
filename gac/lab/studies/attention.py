"""Studies of attention: the cost of a misaligned head_dim, who serves it, and the bandwidth it is served with."""

from collections.abc import Mapping, Sequence
from statistics import median

from gac.lab.studies import published
from gac.lab.studies.readings import Readings, known, quotient
from gac.lab.studies.records import Band, Cell, Finding, close, percent, study
from gac.lab.studies.served import kernels_note
from gac.lab.studies.shapes import along, example, sdpa
from gac.profiling.records import Point

DENSE = range(64, 257)
BACKENDS = ("auto", "flash", "mem_efficient", "math", "cudnn")

DENSE_BAND = Band(1.25, 2.0)
"""Published: 1.3x to 2x where head_dim % 8 != 0 (107 against 112: 1.39x); the lower end has room for noise."""

SAME_BACKEND = 0.10
"""What PyTorch chose is as fast as a backend within this: it chose that backend."""

MATH_SLOWER = 5.0
"""The math backend takes at least this many times longer than the automatic choice (published: 13x to 22x)."""

LOST_BANDWIDTH = Band(0.20, 0.50, absent=0.05, write=percent)
"""Published: 26 to 30 % at 113 and 121, summed up as about 40 %."""

_SETTING = "A100-80GB, B=4 S=2048 H=32 fp16"


@study(
    "sdpa-dense",
    "attention at every head_dim from 64 to 256",
    "head_dim % 8 != 0 costs 1.3x to 2x (107: 2.147 ms, 112: 1.545 ms, 128: 1.485 ms)",
    f"GAC's study, experiment S1, {_SETTING}",
    DENSE_BAND.rule("median over misaligned head dims of latency over that of the next multiple of 8"),
    lambda: tuple(sdpa(d) for d in DENSE),
)
def sdpa_dense(readings: Readings) -> Finding:
    figures = published.sdpa_ms("S1")
    shown = {d: figures.get(d) for d in sorted({*figures, 72, 80, 88, 129, 136, 160, 192, 224, 256})}
    notes = (_falls(readings), *_served(readings, DENSE))
    rest = example(readings, sdpa, "1.39x")
    return along(readings, DENSE_BAND, ("head_dim", "head dims"), sdpa, DENSE, shown, "A100|ms", rest, *notes)


def _served(readings: Readings, dims: Sequence[int]) -> tuple[str, ...]:
    """Whose kernels serve aligned and misaligned head dims."""
    groups = {"head_dim % 8 == 0": (d for d in dims if d % 8 == 0), "the others": (d for d in dims if d % 8)}
    return kernels_note(readings, {name: [sdpa(d) for d in members] for name, members in groups.items()})


def _falls(readings: Readings) -> str:
    """Which multiples of 8 are slower than the next one, beyond 2 %."""
    pairs = [(d, readings.ratio(sdpa(d), sdpa(d + 8))) for d in DENSE if d % 8 == 0 and d + 8 in DENSE]
    slower = [str(d) for d, ratio in pairs if ratio is not None and ratio > 1.02]
    return f"multiples of 8 that are slower than the next one: {', '.join(slower) or 'none'}"


def _of(d: int, backend: str) -> Point:
    return sdpa(d, "efficient" if backend == "mem_efficient" else backend)


def _backend_figures() -> dict[tuple[int, str], float | None]:
    return {(row.head_dim, row.backend): row.latency_ms for row in published.rows("a100_sdpa", study="S2")}


def _backend_dims() -> list[int]:
    return sorted({d for d, _ in _backend_figures()})


@study(
    "sdpa-backends",
    "which backend serves which head_dim",
    "FlashAttention serves every head_dim, 107 included (2.139 ms); mem-efficient refuses 107; math takes 26 to 28 ms",
    f"GAC's study, experiment S2, {_SETTING}",
    f"rule: held where the automatic choice is within {percent(SAME_BACKEND)} of flash at every head_dim, "
    f"mem-efficient refuses 107 and math takes at least {MATH_SLOWER:.0f}x as long; other where only the refusal or "
    "the slow math backend is there; did not hold where neither is",
    lambda: tuple(_of(d, backend) for d in _backend_dims() for backend in BACKENDS),
)
def sdpa_backends(readings: Readings) -> Finding:
    figures, dims = _backend_figures(), _backend_dims()
    rows = (_backend_row(readings, d, backend, figures.get((d, backend))) for d in dims for backend in BACKENDS)
    over_flash = {d: readings.ratio(sdpa(d), sdpa(d, "flash")) for d in dims}
    flash = all(map(_near, over_flash.values()))
    refused = readings.ns(sdpa(107, "efficient")) is None
    slower = readings.middle([readings.ratio(sdpa(d, "math"), sdpa(d)) for d in dims], "how slow the math backend is")
    slow = slower >= MATH_SLOWER
    theirs = median(known(quotient(figures[d, "math"], figures[d, "auto"]) for d in dims))
    said = (
        f"the automatic choice {'runs as fast as flash at every head_dim' if flash else _chosen(readings)}, "
        f"mem-efficient {'refuses' if refused else 'takes'} 107, math takes {slower:.0f}x as long as the automatic "
        f"choice (A100: {theirs:.0f}x)"
    )
    edges = ((f"automatic over flash at {d}", ratio) for d, ratio in over_flash.items() if ratio is not None)
    notes = (text for name, ratio in edges for text in close(name, ratio, 1 - SAME_BACKEND, 1 + SAME_BACKEND))
    table = ("head_dim", "<backend", "measured|ms", "A100|ms")
    held, absent = flash and refused and slow, not (refused or slow)
    return Finding(table, rows, held, absent, said, (*notes, *close("math", slower, MATH_SLOWER)))


def _backend_row(readings: Readings, d: int, backend: str, figure: float | None) -> tuple[Cell, ...]:
    measured = readings.ms(_of(d, backend))
    refused = figure is None and backend != "cudnn"
    return d, backend, "refused" if measured is None else measured, "refused" if refused else figure


def _near(ratio: float | None) -> bool:
    return ratio is not None and abs(ratio - 1) <= SAME_BACKEND


def _chosen(readings: Readings) -> str:
    """Which backend runs as fast as the automatic choice, head_dim by head_dim."""
    by_backend: dict[str, list[str]] = {}
    for d in _backend_dims():
        found = [name for name in BACKENDS[1:] if _near(readings.ratio(sdpa(d), _of(d, name)))]
        by_backend.setdefault(" or ".join(found) or "none of them", []).append(str(d))
    return "runs as fast as " + " and as ".join(f"{name} at {' '.join(dims)}" for name, dims in by_backend.items())


BANDWIDTH_DIMS = range(64, 129)


@study(
    "sdpa-bandwidth",
    "hypothesis H3: effective bandwidth of attention by head_dim",
    "aligned head dims reach 153 to 160 GB/s, misaligned ones 107 to 118: up to 40 % of the bandwidth is lost",
    f"GAC's study, experiment C23 (H3), {_SETTING}",
    "rule: median over misaligned head dims of the share of GB/s lost against the multiple of 8 below; held from "
    f"{percent(LOST_BANDWIDTH.least)} to {percent(LOST_BANDWIDTH.most)}, did not hold below "
    f"{percent(LOST_BANDWIDTH.absent)}, other beyond",
    lambda: tuple(sdpa(d) for d in BANDWIDTH_DIMS),
)
def sdpa_bandwidth(readings: Readings) -> Finding:
    hypothesis = published.rows("a100_hypotheses", hypothesis="H3")
    figures = {row.head_dim: row.gb_s for row in hypothesis if row.head_dim is not None}
    ours = {d: readings.gb_s(sdpa(d)) for d in BANDWIDTH_DIMS}
    rows = (
        (d, ours[d], _hundredfold(_lost(ours, d)), figures.get(d), _hundredfold(_lost(figures, d)))
        for d in sorted({*figures, 64, 96, 104, 107, 128})
    )
    theirs = known(_lost(figures, d) for d in figures)
    return LOST_BANDWIDTH.finding(
        readings.middle([_lost(ours, d) for d in ours], "the bandwidth lost by misaligned head dims"),
        "misaligned head dims move {} fewer bytes a second than the multiple of 8 below them "
        f"(A100: {percent(min(theirs))} and {percent(max(theirs))})",
        ("head_dim", "measured|GB/s", "lost|%", "A100|GB/s", "A100 lost|%"),
        rows,
        *_served(readings, BANDWIDTH_DIMS),
    )


def _lost(gb_s: Mapping[int, float | None], d: int) -> float | None:
    """Share of the bandwidth at the multiple of 8 below that a misaligned head_dim loses."""
    ours, aligned = gb_s.get(d), gb_s.get(d - d % 8)
    return None if d % 8 == 0 or ours is None or aligned is None else 1 - ours / aligned


def _hundredfold(share: float | None) -> float | None:
    return None if share is None else 100 * share

"""Results of models in an engine: samples of every turn, medians, and speeds over the first model. Loads no torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from gac.core.display import Row, Shown, Table
from gac.core.io import Record
from gac.core.words import number_of
from gac.evaluation.engines.workloads import EngineWorkload

SCHEMA = 1

_NAMES = {"vllm": "vLLM", "torch": "PyTorch", "cuda": "CUDA", "gac": "GAC"}
_MS = "ms: median wall time of a prefill (all first tokens), a decode step, a throughput run"
_RATE = "tokens/s: read by a prefill, else written"
_GRAPHS = "ms: GPU time of the CUDA graph of a decode step, without the engine's work between steps; medians"


@dataclass(frozen=True)
class EngineTiming:
    """The time of one model at one workload.

    Attributes:
        ms: the median of ``ms_samples``, one a turn.
        tokens_per_second: read (prefill) or written, of all sequences.
        total_tokens_per_second: read and written, of a throughput.
        graph_ms: the median of ``graph_ms_samples``, GPU time of the CUDA graph of a decode step; None without one.
        ratio: speed over the first model, the quotient of medians; None for the first model itself.
        ratio_samples: one a turn.
    """

    workload: str
    ms: float
    ms_samples: tuple[float, ...]
    tokens_per_second: float
    total_tokens_per_second: float | None = None
    graph_ms: float | None = None
    graph_ms_samples: tuple[float, ...] = ()
    graph_ratio: float | None = None
    ratio: float | None = None
    ratio_samples: tuple[float, ...] = ()

    @classmethod
    def of(
        cls, workload: EngineWorkload, samples: Sequence[Mapping[str, Any]], first: "EngineTiming | None"
    ) -> "EngineTiming":
        """Summarise ``ms`` and ``graph_ms`` of every turn; ``first`` is what the first model took."""
        ms = [sample["ms"] for sample in samples]
        graph_ms = [sample["graph_ms"] for sample in samples if sample["graph_ms"] is not None]
        middle, graph = median(ms), median(graph_ms) if graph_ms else None
        graph_ratio = None if first is None or first.graph_ms is None or graph is None else first.graph_ms / graph
        rates = workload.tokens_per_second(middle)
        return cls(
            str(workload),
            middle,
            tuple(ms),
            *rates,
            graph,
            tuple(graph_ms),
            graph_ratio,
            None if first is None else first.ms / middle,
            () if first is None else tuple(a / b for a, b in zip(first.ms_samples, ms, strict=True)),
        )


@dataclass(frozen=True)
class EngineModel:
    """A model, and its time at each workload."""

    name: str  # the directory or hub id
    digest: str | None  # SHA-256 of a compressed checkpoint's file of digests, which stands for all of it
    kv_cache_tokens: int | None  # that its KV cache holds; None where the engine does not tell it
    timings: tuple[EngineTiming, ...]


@dataclass(frozen=True, repr=False)
class EngineBench(Shown, Record):
    """Models timed in an engine, the first of them the one that speeds are relative to.

    Attributes:
        engine: ``vllm``.
        versions: of the engine, PyTorch, CUDA and GAC, in the environment of the engine.
        in_turns: all models were in memory, and took turns; else one was measured after the other.
        memory_share: of the GPU's memory, that each had; None on a CPU.
        options: further arguments of the engine, as NAME=JSON.
    """

    schema_version: int
    engine: str
    versions: dict[str, str]
    device: str
    in_turns: bool
    memory_share: float | None
    turns: int
    models: tuple[EngineModel, ...]
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_schema(self.schema_version, SCHEMA)

    @property
    def labels(self) -> tuple[str, ...]:
        """Short names of the models: the last part of each, where these differ."""
        names = [model.name for model in self.models]
        ends = [name.rstrip("/").rpartition("/")[2] for name in names]
        return tuple(ends if len({*ends}) == len(ends) and all(ends) else names)

    @property
    def by_workload(self) -> Sequence[tuple[EngineTiming, ...]]:
        return list(zip(*(model.timings for model in self.models), strict=True))

    @property
    def description(self) -> str:
        versions = ", ".join(f"{_NAMES[name]} {version}" for name, version in self.versions.items())
        order = "" if len(self.models) == 1 else " in turns" if self.in_turns else ", one model after the other"
        share = "" if self.memory_share is None else f"; each with {self.memory_share:.0%} of the GPU's memory"
        options = f"; {', '.join(self.options)}" if self.options else ""
        return f"{versions}; {self.device}\n{number_of(self.turns, 'run')} a workload{order}{share}{options}"

    def tables(self) -> Sequence[Table | str]:
        """One row a workload; where decode steps are CUDA graphs, also these alone."""
        ratios = self._headings("ratio"), self._headings("range")
        columns = [f"{label} ms" for label in self.labels]
        columns += [heading for pair in zip(*ratios, strict=True) for heading in pair]
        columns += [f"{label} tokens/s" for label in self.labels]
        rows = [row for timings in self.by_workload for row in _wall_rows(timings)]
        wall = _table("workload", columns, rows, "\n".join(self._notes()))
        graphs = [_graph_row(timings) for timings in self.by_workload if all(each.graph_ms for each in timings)]
        columns = [*(f"{label} ms" for label in self.labels), *ratios[0]]
        return [wall, "", _table("CUDA graph of", columns, graphs, _GRAPHS)] if graphs else [wall]

    def rows(self) -> Sequence[Row]:
        """One row a model and workload, without samples."""
        return [
            {"model": model.name, **{key: value for key, value in asdict(timing).items() if "samples" not in key}}
            for model in self.models
            for timing in model.timings
        ]

    def _headings(self, word: str) -> list[str]:
        others = self.labels[1:]
        return [word if len(others) == 1 else f"{label} {word}" for label in others]

    def _notes(self) -> list[str]:
        notes = [_MS, _RATE]
        if len(self.models) > 1:
            notes.append(f"ratio: speed over {self.labels[0]}, by medians; range: of all turns")
        sizes = [
            f"{label} {model.kv_cache_tokens:,}"
            for label, model in zip(self.labels, self.models, strict=True)
            if model.kv_cache_tokens
        ]
        return [*notes, *([f"tokens that the KV cache holds: {', '.join(sizes)}"] if sizes else []), self.description]


def _table(first: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: str) -> Table:
    return Table([(first, "<"), *((column, ">") for column in columns)], rows, notes=notes)


def _wall_rows(timings: Sequence[EngineTiming]) -> Iterator[list[str]]:
    ratios = [cell for each in timings[1:] for cell in (_ratio(each.ratio), _range(each.ratio_samples))]
    rates = [rate(each.tokens_per_second) for each in timings]
    yield [timings[0].workload, *(_ms(each.ms) for each in timings), *ratios, *rates]
    totals = [each.total_tokens_per_second for each in timings]
    if totals[0] is not None:
        empty = [""] * (len(timings) + len(ratios))
        yield ["  with what is read", *empty, *(rate(total or 0.0) for total in totals)]


def _graph_row(timings: Sequence[EngineTiming]) -> list[str]:
    cells = [_ms(each.graph_ms or 0.0) for each in timings]
    return [timings[0].workload, *cells, *(_ratio(each.graph_ratio) for each in timings[1:])]


def rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.{0 if tokens_per_second >= 100 else 1}f}"


def _ms(ms: float) -> str:
    return f"{ms:,.3f}" if ms < 100 else f"{ms:,.1f}"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _range(samples: Sequence[float]) -> str:
    return f"{min(samples):.2f}-{max(samples):.2f}"

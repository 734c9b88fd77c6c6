"""Measured perplexity beside measured tokens a second in vLLM: GAC's plans, two peers, and the dense model.

    python tests/benchmarks/tradeoff.py --output tradeoff.json
    python tests/benchmarks/tradeoff.py --plot tradeoff.png --output tradeoff.json  # draws what is measured

GAC's plans are of fewer parameters (``--budgets``) and of less time at all workloads (``--latencies``); their models
are healed, as ``--heal`` says. Peers are those whose models vLLM's own class serves: ``ShortGPT``, with fewer layers,
and ``uniform width``, with narrower ones, by the rules of ``peers.py``. In vLLM all models have random weights, five
of them at a time, in turns with the dense model. The same command goes on where it was stopped. Needs vLLM beside GAC,
or ``--engine-python``.

Tokens a second are of the CUDA graphs of decode steps: for a model this small the engine's work on the CPU between
steps, 1 ms and more, hides what the GPU saves. The bench has both.
"""

import copy
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import gac
from gac.core.io import to_json
from gac.core.workloads import Workload
from gac.evaluation.engines.bench import MOST_MODELS, bench_engine
from gac.evaluation.engines.records import EngineBench
from gac.healing.records import TOKENS
from gac.plan.engines import VLLM
from gac.plan.plan import Plan
from gac.plan.recipe import DEFAULT_TEXT
from gac.reporting.page import COLOURS, DOTTED, MARKERS, panel
from gac.reporting.page import save as save_figure
from tests.benchmarks.harness import BASIS, OF_A_STUDY, options, write
from tests.benchmarks.in_vllm import OPTIONS as ENGINE_OPTIONS
from tests.benchmarks.in_vllm import write_config
from tests.benchmarks.peers import PEERS, Dense, Gone, Peers

DENSE, BY_SIZE, BY_TIME = "dense", "GAC", "GAC by time"
SERVED = ("ShortGPT", "uniform width")
LABELS = {DENSE: "dense, vLLM's own class", BY_SIZE: "GAC, fewer parameters", BY_TIME: "GAC, less time"}
SIZE = (5.2, 3.4)
WORKLOADS = ("decode:1@1024", "decode:16@1024", "decode:64@1024")
MOST = 3.0
"""Ratios of perplexity above which a figure shows nothing."""


def served_config(config: Any, gone: Gone) -> Any:
    """The config of a dense model without these layers, or with as many fewer neurons and heads in each."""
    smaller = copy.deepcopy(config)
    left = {block: block.groups - len(groups) for block, groups in gone.items()}
    if not any(left.values()):
        smaller.num_hidden_layers -= len({block.layer for block in gone})
        return smaller
    of_mlps, of_attentions = ({left[block] for block in left if block.is_mlp is is_mlp} for is_mlp in (True, False))
    (smaller.intermediate_size,), (smaller.num_key_value_heads,) = of_mlps, of_attentions
    smaller.num_attention_heads = config.num_attention_heads // config.num_key_value_heads * smaller.num_key_value_heads
    return smaller


def plans_of(asked: Any) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """The name of each of GAC's plans, its budget, and further options of ``gac.allocate``."""
    yield from ((f"{BY_SIZE} {budget:g}", budget, {}) for budget in asked.budgets)
    yield from ((f"{BY_TIME} {share:g}", 1.0, {"latency": share}) for share in asked.latencies)


def measure(asked: Any) -> None:
    """Measure perplexities, then speeds."""
    study = Peers(asked, "workloads")
    model, known = study.loaded.model, {row["name"] for row in study.rows}
    configs: dict[str, tuple[Any, Plan | None]] = {DENSE: (model.config, None)}
    planned = BASIS | {"profile": asked.profile, "calibration": asked.calibration, "tokenizer": study.loaded.tokenizer}
    for name, budget, limits in plans_of(asked):
        plan = gac.allocate(model, budget, engine=VLLM.name, workloads=asked.workloads, **planned, **limits)
        configs[name] = model.config, plan
        if name not in known:
            study.keep({"name": name} | study.measured(plan))
    dense = Dense.of(study.loaded, asked.calibration)
    for peer in asked.peers:
        for budget, gone in PEERS[peer](dense, sorted(asked.peer_budgets, reverse=True)):
            configs[name := f"{peer} {budget:g}"] = served_config(model.config, gone), None
            if name not in known:
                study.pruned(dense, {"name": name}, gone)
    model.to("cpu")  # engines take nearly all of the GPU
    torch.cuda.empty_cache()
    benches = study.record.setdefault("benches", [])
    measured = {name for bench in benches for name in bench["names"]}
    untimed = [name for name in configs if name != DENSE and name not in measured]
    for first in range(0, len(untimed), MOST_MODELS - 1):
        names = untimed[first : first + MOST_MODELS - 1]
        timed = {name: configs[name] for name in (DENSE, *names)}
        benches.append({"names": names} | json.loads(to_json(timed_in_vllm(timed, asked))))
        write(asked.output, **study.record)


def timed_in_vllm(configs: Mapping[str, tuple[Any, Plan | None]], asked: Any) -> EngineBench:
    """Models with random weights, in turns."""
    with tempfile.TemporaryDirectory() as work:
        folders = [Path(work, name.replace(" ", "-")) for name in configs]
        for folder, (config, plan) in zip(folders, configs.values(), strict=True):
            write_config(folder, config, plan)
        timed = list(map(str, folders)), asked.workloads
        bench = bench_engine(timed[0], workloads=timed[1], options=asked.engine_options, python=asked.engine_python)
    print(bench, flush=True)
    return bench


def speeds_of(record: Mapping[str, Any], workload: str) -> tuple[dict[str, float], float]:
    """Tokens a second over the dense model's of the same bench, by name; and the dense model's of the first bench."""
    speeds, dense = {DENSE: 1.0}, []
    for bench in record["benches"]:
        steps = [
            next(timing["graph_ms"] for timing in model["timings"] if timing["workload"] == workload)
            for model in bench["models"]
        ]
        dense.append(1000 * Workload.parse(workload).batch / steps[0])
        speeds |= {name: steps[0] / step for name, step in zip(bench["names"], steps[1:], strict=True)}
    return speeds, dense[0]


def figure_of(record: Mapping[str, Any], workload: str) -> Any:
    """Perplexity over dense against tokens a second over dense."""
    losses = {DENSE: 1.0} | {row["name"]: row["mean_ratio"] for row in record["rows"]}
    speeds, dense = speeds_of(record, workload)
    shown = sorted((name for name in speeds if losses[name] <= MOST), key=losses.__getitem__)
    kinds = dict.fromkeys(kind for kind in (*LABELS, *SERVED) if kind in map(kind_of, shown))
    with panel(None, SIZE) as ax:
        ax.axhline(1, **DOTTED)
        ax.axvline(1, **DOTTED)
        ax.margins(0.12)
        for kind, colour, marker in zip(kinds, COLOURS, MARKERS, strict=False):
            points = [(speeds[name], losses[name]) for name in shown if kind_of(name) == kind]
            ax.plot(*zip(*points, strict=True), marker=marker, color=colour, label=LABELS.get(kind, kind))
        for name in shown:
            if name != DENSE:
                share = name.rpartition(" ")[2]
                ax.annotate(share, (speeds[name], losses[name]), (6, 3), textcoords="offset points", fontsize=8)
        run = Workload.parse(workload)
        many = f"{run.batch} sequence{'s' if run.batch > 1 else ''}"
        ax.set(xlabel=f"tokens a second over dense ({dense:,.0f}), {many}", ylabel="perplexity over dense")
        ax.legend(fontsize=8, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return ax.figure


def kind_of(name: str) -> str:
    """What a model is, without its share."""
    return name if name == DENSE else name.rpartition(" ")[0]


def main() -> None:
    parser = options(__doc__, *OF_A_STUDY, "--budgets")
    parser.add_argument("--latencies", type=float, nargs="*", default=[0.95, 0.9, 0.85])
    parser.add_argument("--peers", nargs="*", choices=SERVED, default=list(SERVED))
    parser.add_argument("--peer-budgets", type=float, nargs="*", default=[0.9, 0.8])
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--engine-python", type=Path)
    parser.add_argument("--engine-options", nargs="*", default=ENGINE_OPTIONS)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--plot-workload", default=WORKLOADS[1])
    parser.set_defaults(
        calibration=[*DEFAULT_TEXT], budgets=[1.0, 0.9, 0.8, 0.7], profile="nvidia-h200-vllm", heal=TOKENS
    )
    asked = parser.parse_args()
    if asked.plot:
        save_figure(figure_of(json.loads(asked.output.read_text()), asked.plot_workload), asked.plot)
    else:
        measure(asked)


if __name__ == "__main__":
    main()

"""Measured perplexity beside measured tokens a second in vLLM: GAC's plans, two peers, and the dense model.

    python tests/benchmarks/tradeoff.py --output tradeoff.json --plot tradeoff.png

Peers are those whose models vLLM's own class serves: ``ShortGPT``, with fewer layers, and ``uniform width``, with
narrower ones, by the rules of ``peers.py``. In vLLM all models have random weights. GAC's are healed, as ``--heal``
says. The same command goes on with the perplexities where it was stopped, and draws what is measured. Needs vLLM beside
GAC, or ``--engine-python``.
"""

import copy
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gac
from gac.core.io import to_json
from gac.core.workloads import Workload
from gac.evaluation.engines.bench import bench_engine
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

SERVED = ("ShortGPT", "uniform width")
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


def measure(asked: Any) -> dict[str, Any]:
    """Measure perplexities, then speeds; the record of both."""
    study = Peers(asked, "workloads", "peers")
    model, known = study.loaded.model, {row["name"] for row in study.rows}
    configs: dict[str, tuple[Any, Plan | None]] = {"dense": (model.config, None)}
    planned = BASIS | {"profile": asked.profile, "calibration": asked.calibration, "tokenizer": study.loaded.tokenizer}
    for budget in asked.budgets:
        plan = gac.allocate(model, budget, engine=VLLM.name, workloads=asked.workloads, **planned)
        configs[name := f"GAC {budget:g}"] = model.config, plan
        if name not in known:
            study.keep({"name": name} | study.measured(plan))
    dense = Dense.of(study.loaded, asked.calibration)
    for peer in asked.peers:
        for budget, gone in PEERS[peer](dense, sorted(asked.peer_budgets, reverse=True)):
            configs[name := f"{peer} {budget:g}"] = served_config(model.config, gone), None
            if name not in known:
                study.pruned(dense, {"name": name}, gone)
    with tempfile.TemporaryDirectory() as work:
        folders = [Path(work, name.replace(" ", "-")) for name in configs]
        for folder, (config, plan) in zip(folders, configs.values(), strict=True):
            write_config(folder, config, plan)
        timed = list(map(str, folders)), asked.workloads
        bench = bench_engine(timed[0], workloads=timed[1], options=asked.engine_options, python=asked.engine_python)
    print(bench)
    speeds = {
        name: {timing.workload: timing.tokens_per_second for timing in timed.timings}
        for name, timed in zip(configs, bench.models, strict=True)
    }
    study.record |= {"tokens_per_second": speeds, "bench": json.loads(to_json(bench))}
    write(asked.output, **study.record)
    return study.record


def figure_of(record: Mapping[str, Any], workloads: Sequence[str]) -> Any:
    """Perplexity over dense against tokens a second, a panel for each workload."""
    from matplotlib import pyplot

    losses = {row["name"]: row["mean_ratio"] for row in record["rows"]}
    kinds = dict.fromkeys(name.rpartition(" ")[0] for name in losses)
    figure = pyplot.figure(figsize=(3.4 * len(workloads), 3.2), layout="constrained")
    for axes, workload in zip(
        figure.subplots(1, len(workloads), sharey=True, squeeze=False)[0], workloads, strict=True
    ):
        speeds = {name: each[workload] for name, each in record["tokens_per_second"].items()}
        with panel(axes, (3.4, 3.2)) as ax:
            ax.axhline(1, **DOTTED)
            ax.plot([speeds["dense"]], [1], "k*", ms=9, label="dense, vLLM's own class")
            for kind, colour, marker in zip(kinds, COLOURS, MARKERS, strict=False):
                names = [name for name in losses if name.startswith(kind) and losses[name] <= MOST]
                points = [speeds[name] for name in names], [losses[name] for name in names]
                ax.plot(*points, marker=marker, color=colour, ls="-" if len(names) > 1 else "none", label=kind)
                for name, *place in zip(names, *points, strict=True):
                    ax.annotate(name.rpartition(" ")[2], place, (5, 4), textcoords="offset points", fontsize=7)
            run = Workload.parse(workload)
            many = f"{run.batch} sequence{'s' if run.batch > 1 else ''}"
            ax.set(
                xlabel=f"tokens a second, {many}",
                xlim=(0, 1.15 * max(speeds.values())),
                ylim=(0.9, 1.1 * max(min(loss, MOST) for loss in losses.values())),
            )
            ax.locator_params(axis="x", nbins=5)
            if axes is figure.axes[0]:
                ax.set_ylabel("perplexity over dense")
                ax.legend(fontsize=7)
    return figure


def main() -> None:
    parser = options(__doc__, *OF_A_STUDY, "--budgets")
    parser.add_argument("--peers", nargs="*", choices=SERVED, default=list(SERVED))
    parser.add_argument("--peer-budgets", type=float, nargs="*", default=[0.8])
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--engine-python", type=Path)
    parser.add_argument("--engine-options", nargs="*", default=ENGINE_OPTIONS)
    parser.add_argument("--plot", type=Path)
    parser.set_defaults(calibration=[*DEFAULT_TEXT], budgets=[0.9, 0.8, 0.7], profile="nvidia-h200-vllm", heal=TOKENS)
    asked = parser.parse_args()
    measured = json.loads(asked.output.read_text()) if asked.output.exists() else {}
    record = measured if "bench" in measured else measure(asked)
    if asked.plot:
        save_figure(figure_of(record, asked.workloads), asked.plot)


if __name__ == "__main__":
    main()

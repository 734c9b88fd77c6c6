"""What each of two processes does with the checkpoints of a folder: ``torchrun ... split_worker.py FOLDER``.

Process 0 writes what it found to ``found.json``, process 1 to ``other.json``.
"""

import copy
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

RANK = int(os.environ["RANK"])
FOLDER = Path(sys.argv[1])
INDIVISIBLE = "indivisible"
IDS = torch.arange(40).reshape(2, 20)
SAID: list[str] = []


class Listener(logging.Handler):
    """Keeps what is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        SAID.append(record.getMessage())


def with_gac() -> dict[str, Any]:
    """``gac.load``, and transformers' factory with GAC imported."""
    import gac

    names = sorted(
        path.name for path in FOLDER.iterdir() if (path / "config.json").exists() and "indiv" not in path.name
    )
    found = {name: _compared(gac.load, FOLDER / name, {"dtype": torch.float32}) for name in names}
    split = gac.load(FOLDER / "llama-bf16", tp_plan="auto")
    return {
        "loaded": found,
        "errors": _errors(gac.load, split),
        "static": _static(split),
        "ends": _ends(),
        "bench": _bench(),
    }


def _static(split: Any) -> bool:
    """Whether tokens are the same with a static cache."""
    kept = {"cache_implementation": "static"}
    one, other = (split.generate(IDS[:1], max_new_tokens=6, do_sample=False, **more).tolist() for more in ({}, kept))
    return bool(one == other)


def _compared(load: Callable[..., Any], path: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Logits and tokens of the split model beside those of the whole one."""
    whole = load(path, **options)
    SAID.clear()
    split = load(path, tp_plan="auto", **options)
    said = list(SAID)
    with torch.no_grad():
        error = (whole(IDS).logits - split(IDS).logits).abs().max()
        tokens = [one.generate(IDS[:1], max_new_tokens=6, do_sample=False).tolist() for one in (whole, split)]
    return {
        "error": float(error),
        "same": tokens[0] == tokens[1],
        "bytes": [_bytes(one) for one in (whole, split)] if hasattr(whole, "model") else [],
        "said": said,
        "names": set(whole.state_dict()) >= set(split.state_dict()),
    }


def _bytes(model: Any) -> int:
    """Of the layers."""
    return sum(one.nbytes for one in (*model.model.layers.parameters(), *model.model.layers.buffers()))


def _errors(load: Callable[..., Any], split: Any) -> dict[str, str]:
    """What is raised, here and in the other process."""
    apart = FOLDER / ("llama-bf16" if RANK == 0 else "llama-w8a16")
    attempts = {
        "indivisible": lambda: load(FOLDER / INDIVISIBLE, tp_plan="auto"),
        "apart": lambda: load(apart, tp_plan="auto"),
        "saved": lambda: split.save_pretrained(FOLDER / f"again-{RANK}"),
        "size": lambda: type(split).from_pretrained(FOLDER / "llama-bf16", tp_size=4),
        "trained": lambda: split(inputs_embeds=torch.zeros(1, 4, 64, requires_grad=True)),
    }
    return {name: _raised(attempt) for name, attempt in attempts.items()}


def _raised(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except Exception as failure:  # noqa: BLE001 - its type and text are compared
        return f"{type(failure).__name__}: {failure}"
    return "nothing"


def _ends() -> dict[str, float]:
    """Embeddings and heads in a storage, tied and not: how far logits are from the whole model's."""

    from gac.runtime.parallel.ranks import started
    from gac.runtime.parallel.splitting import split
    from gac.schemes import scheme_named
    from tests.models.small import small_config, small_model

    found = {}
    from gac.measurement.embeddings import quantised_embeddings, replace_embeddings

    for scheme, tied in (("w8a16", True), ("w8a16", False), ("bf16", True)):
        whole = small_model(small_config("llama", tie_word_embeddings=tied))
        replace_embeddings(whole, quantised_embeddings(whole, scheme_named(scheme)))
        part = copy.deepcopy(whole)
        split(part, started())
        with torch.no_grad():
            found[f"{scheme} {tied}"] = float((whole(IDS).logits - part(IDS).logits).abs().max())
    return found


def _bench() -> list[list[Any]]:
    """Names and bytes of versions, and those of one process that is alone; every round is the slowest one's."""
    from gac.core.workloads import Workload
    from gac.evaluation.bench import Bench
    from gac.evaluation.shapes import model_of_shapes, planner_of_shapes, variant, weight_bytes
    from gac.evaluation.split import SlowestTimer, SplitShapes, ranks_of_torchrun
    from gac.models.shapes import Shapes
    from tests.evaluation.test_latency import CountingTimer

    class Slower(CountingTimer):
        """Process 1 takes a byte's time longer."""

        def round(self, held: Any) -> Any:
            return super().round([one + RANK for one in held])

    shapes: Any = Shapes("llama", 128, 512, 2, 4, 2, 32, 512)
    workload, ranks = Workload.parse("decode:2@8"), ranks_of_torchrun()
    planner = planner_of_shapes(shapes, [workload], "nvidia-h100-80gb-hbm3", schemes=("w8a16",))
    assert ranks is not None
    made = SplitShapes(shapes, ranks, torch.float32)
    timer: Any = SlowestTimer(Slower(), ranks)
    bench = Bench(
        made.dense, planner.problem.sites, planner.problem.timing, planner.dense_versions(), timer, None, made
    )
    versions = [planner.by_default(0.7), planner.uniform("w8a16")]
    whole = model_of_shapes(shapes, device="cpu", dtype=torch.float32)
    alone = [weight_bytes(variant(whole, one.choices)) for one in (*bench.dense_versions, *versions)]
    found = list(bench.run(versions, workload))
    assert all(one.predicted_ns is None for one in found)
    return [[one.timed.name, one.timed.latency.median_ns, size] for one, size in zip(found, alone, strict=True)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    logger = logging.getLogger("gac")
    logger.addHandler(Listener())
    distributed.init_process_group("gloo")
    found = with_gac()
    (FOLDER / ("found.json" if RANK == 0 else "other.json")).write_text(json.dumps(found))
    from gac.evaluation.split import end_together
    from gac.runtime.parallel.ranks import started

    end_together(started())
    assert not distributed.is_initialized()

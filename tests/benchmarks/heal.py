"""What healing wins back: excess ln(perplexity) of refitted, healed and LoRA-trained models, on the text and off it.

    python tests/benchmarks/heal.py --also prose technical --output heal.json
    python tests/benchmarks/heal.py --model gemma3-270m --budgets 0.8 --output heal-gemma.json
    python tests/benchmarks/heal.py --model rotated-smollm2 --bits 4.3 3.3 --output heal-bits.json
    python tests/benchmarks/heal.py --minutes 5 --rates 5e-4 1e-3 2e-3 4e-3 --budgets 0.8 --output rates.json
    python tests/benchmarks/heal.py --healing-text wiki-sample self --budgets 0.8 --output heal-two-texts.json
    python tests/benchmarks/heal.py --ways lora --output heal-lora.json
    python tests/benchmarks/heal.py --labels 0 0.2 0.5 --budgets 0.8 --output heal-labels.json

``batches/healing.json`` has them side by side. Every model is evaluated on all of its text's evaluation windows, and on
texts that neither calibrate nor train (``--also``): files, ``prose``, which is the news in the package gensim, and
``technical``, which is the reference of the language that Python brings. ``refitted`` is the plan as ``gac.compress``
applies it; ``healed`` that model after ``gac.heal``; ``lora`` is rank 16 by peft on it, trained on the labels of the
same text for the same time. ``excess`` is the logarithm of perplexity over the dense one. Rows are written one by one,
and the loss curve of what is under way as it is measured; the same command goes on. ``--models`` keeps the refitted
models for other commands to start from.
"""

import copy
import logging
import math
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import cached_property, partial
from itertools import count, product
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

import gac
from gac.core.distributed.ranks import ALONE
from gac.core.io import atomic_path
from gac.healing.records import BLOCKS, LossPoint
from gac.healing.text import HealingText, healing_text
from gac.measurement.own_text import sampled_windows
from gac.measurement.session import planned_digest
from gac.models.families import family_of
from gac.plan.plan import Plan
from tests.benchmarks.harness import BASIS, LEAST_LOSS, OF_ONE_TEXT, Study, news, options, write

WAYS = ("refitted", "healed", "lora")
SETTINGS = ("asked_rate", "blocks", "labels")
"""Of a healing, of which several are tried."""
LORA_RANK, LORA_RATE, LORA_WINDOWS = 16, 2e-4, 8
"""As peft's own examples train; so many windows a step. The rate falls to nothing, as transformers' trainer has it."""
BITS = 16
SCHEMES = ["w4a16:64", "w3a16:64", "w2a16:64"]


def main() -> None:
    parser = options(__doc__, *OF_ONE_TEXT, "--budgets")
    parser.add_argument("--bits", type=float, nargs="*", default=[], help="of a weight, instead of budgets")
    parser.add_argument("--schemes", nargs="*", default=SCHEMES, help="that there are for so many bits")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, help="instead of a time")
    parser.add_argument("--healing-text", nargs="*", default=[], help="the plan's where not given; self; several")
    parser.add_argument("--rates", type=float, nargs="*", default=[None])
    parser.add_argument("--blocks", type=float, nargs="*", default=[BLOCKS])
    parser.add_argument("--labels", type=float, nargs="*", default=[0.0], help="parts of the loss")
    parser.add_argument("--dense", action="store_true", help="train the weights, too, that plans leave dense")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=["refitted", "healed"])
    parser.add_argument("--also", nargs="*", default=[], help="texts that neither calibrate nor train")
    parser.add_argument("--models", type=Path, help="a directory of refitted models, which are made where they are not")
    parser.set_defaults(calibration="wiki-sample:190x1024")
    asked = parser.parse_args()
    if len(texts := asked.healing_text) < 2:
        asked.healing_text = texts[0] if texts else None
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    study = Healings(asked)
    for limit in asked.bits or asked.budgets:
        study.of_limit(limit)


class Healings(Study):
    """Models of some budgets, each refitted, and healed in every way that is asked for."""

    def __init__(self, asked: Namespace) -> None:
        super().__init__(asked, "minutes", "tokens", "healing_text", "also", "schemes", "dense")
        self._also = {name: text_named(name, asked.output.parent) for name in asked.also}
        self._dense_also = {name: self._on(self.loaded.model, name) for name in self._also}

    def of_limit(self, limit: float) -> None:
        """All rows of one budget, or of so many bits."""
        found = _Limit(self, limit, self._asked.models)
        for way in (one for one in WAYS if one in self._asked.ways):
            settings: Iterable[Any] = [(None, None, None)]
            if way == "healed":
                settings = product(self._asked.rates, self._asked.blocks, self._asked.labels)
            for setting in settings:
                case = {"limit": limit, "way": way, **dict(zip(SETTINGS, setting, strict=True))}
                if not any(all(row.get(name) == value for name, value in case.items()) for row in self.rows):
                    self._measure(found, case)

    def plan(self, limit: float) -> Plan:
        """Of a budget, or of so many bits."""
        asked: dict[str, Any] = {"budget": limit}
        if self._asked.bits:
            asked = {"memory": limit / BITS, "schemes": tuple(self._asked.schemes)}
        fixed = {"profile": self._profile, "calibration": self._asked.calibration, "tokenizer": self.loaded.tokenizer}
        return gac.allocate(self.loaded.model, **(BASIS | LEAST_LOSS | fixed | asked))

    def _measure(self, found: "_Limit", case: dict[str, Any]) -> None:
        """One row, with its loss curve, which is on disk as far as it has come."""
        model, begun = found.compressed(), time.monotonic()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        curve = _Curve(lambda points: self._under_way(case | {"curve": points}))
        healing = logging.getLogger("gac.healing.run")
        healing.addHandler(curve)
        healing.setLevel(logging.DEBUG)
        model, what = getattr(self, f"_{case['way']}")(model, case)
        healing.removeHandler(curve)
        seconds = {"seconds": time.monotonic() - begun}
        peak = {"peak_gb": torch.cuda.max_memory_allocated() / 1e9} if torch.cuda.is_available() else {}
        self.keep(case | what | self._row(model) | seconds | peak | {"curve": curve.points})

    def _under_way(self, row: dict[str, Any]) -> None:
        write(self._asked.output, **self.record | {"under_way": row})

    def _refitted(self, model: Any, _case: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return model, {}

    def _healed(self, model: Any, case: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        length = {"minutes": self._asked.minutes} if self._asked.tokens is None else {"tokens": self._asked.tokens}
        how = {"learning_rate": case["asked_rate"], "blocks": case["blocks"], "labels": case["labels"]}
        how |= {"dense": self._asked.dense, **length}
        try:
            text, tokenizer = self._asked.healing_text, self.loaded.tokenizer
            gac.heal(model, against=self.loaded.model, text=text, tokenizer=tokenizer, **how)
        except gac.GacError as failure:
            return model, {"failed": str(failure)}
        record = model.gac_plan.healed[-1]
        named = ("windows", "tokens", "learning_rate", "before", "after")
        return model, {f"healing_{name}": getattr(record, name) for name in named}

    def _lora(self, model: Any, _case: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        plan, dense = model.gac_plan, self.loaded.model
        digest = planned_digest(plan, self.loaded, family_of(dense.config).sites(dense.config))
        sample = partial(sampled_windows, dense, self.loaded.tokenizer, digest, 0, ALONE, True)
        text = healing_text(self._asked.healing_text, plan, self.loaded, sample)
        return trained_adapters(model, text, 60 * self._asked.minutes, self._asked.tokens)

    def _row(self, model: Any) -> dict[str, Any]:
        """Perplexity as a multiple of the dense model's, and its logarithm on every text."""
        own = {"": self.quality(model)["ratio"]}
        own |= {text: self._on(model, text) / dense for text, dense in self._dense_also.items()}
        named = {f"excess {Path(text).name}".strip(): math.log(ratio) for text, ratio in own.items()}
        return {"ratio": own[""], **named}

    def _on(self, model: Any, text: str) -> float:
        return gac.perplexity(model, self.loaded.tokenizer, self._also[text], windows=self._asked.windows).value


class _Curve(logging.Handler):
    """The loss curve of what is healed, handed over whenever it has one more point."""

    def __init__(self, longer: Callable[[list[dict[str, Any]]], None]) -> None:
        super().__init__(logging.DEBUG)
        self.points: list[dict[str, Any]] = []
        self._longer = longer

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and record.args and isinstance(record.args[0], LossPoint):
            self.points.append(asdict(record.args[0]))
            self._longer(self.points)


class _Limit:
    """One budget: the refitted model, made when it is first asked for, or read where it was kept.

    Args:
        models: the directory that refitted models are kept in, if any.
    """

    def __init__(self, study: Healings, limit: float, models: Path | None) -> None:
        self._study, self._limit = study, limit
        self._kept = models and models / f"{limit:g}"

    def compressed(self) -> Any:
        """A copy of it."""
        return copy.deepcopy(self._model)

    @cached_property
    def _model(self) -> Any:
        if self._kept and self._kept.exists():
            return gac.load(self._kept)
        loaded = self._study.loaded
        found = gac.compress(
            copy.deepcopy(loaded.model), self._study.plan(self._limit), tokenizer=loaded.tokenizer, heal=0
        )
        if self._kept:
            gac.save(found, self._kept, tokenizer=loaded.tokenizer)
        return found


def text_named(name: str, folder: Path) -> str:
    """A text that neither calibrates nor trains, as ``gac.perplexity`` takes it; what has to be written is there."""
    if name == "technical":
        path = folder / "technical.txt"
        with atomic_path(path) as temporary:
            temporary.write_text("\n\n".join(topics.values()), encoding="utf-8")
        return str(path)
    return str(news()) if name == "prose" else name


def trained_adapters(model: Any, text: HealingText, seconds: float, tokens: int | None) -> tuple[Any, dict[str, Any]]:
    """The model with LoRA adapters merged into it that were trained on the labels of what is healed on.

    Args:
        seconds: that are trained for, unless ``tokens`` are given.
    """
    import peft

    linear = [name for name, one in model.named_modules() if type(one) is torch.nn.Linear and "lm_head" not in name]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=LORA_RANK, lora_alpha=32, target_modules=linear))
    trained = [one for one in adapted.parameters() if one.requires_grad]
    optimizer, begun, read = torch.optim.AdamW(trained), time.monotonic(), 0
    for step in count():
        done = read / tokens if tokens else (time.monotonic() - begun) / seconds
        if done >= 1:
            break
        ids = text.train[text.batch(step * LORA_WINDOWS, LORA_WINDOWS, seed=0)].to(model.device)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = LORA_RATE * (1 - done)
        optimizer.step()
        optimizer.zero_grad()
        read += ids.numel()
    return adapted.merge_and_unload(), {"healing_tokens": read}


if __name__ == "__main__":
    main()

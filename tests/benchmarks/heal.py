"""What healing wins back: excess ln(perplexity) of refitted, healed and LoRA-trained models, on the text and off it.

    python tests/benchmarks/heal.py --also pages.txt git.txt --output heal.json
    python tests/benchmarks/heal.py --model gemma3-270m --budgets 0.8 --output heal-gemma.json
    python tests/benchmarks/heal.py --model rotated-smollm2 --bits 4.3 3.3 --output heal-bits.json
    python tests/benchmarks/heal.py --minutes 5 --rates 5e-4 1e-3 2e-3 4e-3 --budgets 0.8 --output rates.json
    python tests/benchmarks/heal.py --ways lora --output heal-lora.json

Every model is evaluated on all of its text's evaluation windows, and on files that neither calibrate nor train
(``--also``). ``refitted`` is the plan as ``gac.compress`` applies it; ``healed`` that model after ``gac.heal``;
``lora`` is rank 16 by peft on it, trained on the labels of the same text for the same time. ``excess`` is the
logarithm of perplexity over the dense one. Rows are written one by one, and the same command goes on.
"""

import copy
import math
import time
from argparse import Namespace
from functools import cached_property
from itertools import count
from typing import Any

import torch

import gac
from gac.healing.text import healing_text, order
from gac.plan import Plan
from tests.benchmarks.harness import BASIS, LEAST_LOSS, OF_A_STUDY, Study, options

WAYS = ("refitted", "healed", "lora")
LORA_RANK, LORA_RATE, LORA_WINDOWS = 16, 2e-4, 8
"""As peft's own examples train; so many windows a step."""
BITS = 16


def main() -> None:
    parser = options(__doc__, *OF_A_STUDY, "--budgets")
    parser.add_argument("--bits", type=float, nargs="*", default=[], help="of a weight, in w4a16, instead of budgets")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, help="instead of a time")
    parser.add_argument("--healing-text", help="the plan's where not given; self")
    parser.add_argument("--rates", type=float, nargs="*", default=[None])
    parser.add_argument("--blocks", type=float, nargs="*", default=[0.3])
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=["refitted", "healed"])
    parser.add_argument("--also", nargs="*", default=[], help="texts that neither calibrate nor train")
    parser.set_defaults(calibration="wiki-sample:190x1024")
    asked = parser.parse_args()
    study = Healings(asked)
    for limit in asked.bits or asked.budgets:
        study.of_limit(limit)


class Healings(Study):
    """Models of some budgets, each refitted, and healed in every way that is asked for."""

    def __init__(self, asked: Namespace) -> None:
        super().__init__(asked, "minutes", "tokens", "healing_text", "also")
        self._dense_also = {text: self._on(self.loaded.model, text) for text in asked.also}

    def of_limit(self, limit: float) -> None:
        """All rows of one budget, or of so many bits."""
        found = _Limit(self, limit)
        for way in (one for one in WAYS if one in self._asked.ways):
            settings = [(None, None)]
            if way == "healed":
                settings = [(rate, blocks) for rate in self._asked.rates for blocks in self._asked.blocks]
            for rate, blocks in settings:
                case = {"limit": limit, "way": way, "asked_rate": rate, "blocks": blocks}
                if not any(all(row.get(name) == value for name, value in case.items()) for row in self.rows):
                    begun = time.monotonic()
                    model, what = getattr(self, f"_{way}")(found, rate, blocks)
                    self.keep(case | what | self._row(model) | {"seconds": time.monotonic() - begun})

    def plan(self, limit: float) -> Plan:
        """Of a budget, or of so many bits in w4a16."""
        asked: dict[str, Any] = {"budget": limit}
        if self._asked.bits:
            asked = {"memory": limit / BITS, "schemes": ("w4a16",)}
        fixed = {"profile": self._profile, "calibration": self._asked.calibration, "tokenizer": self.loaded.tokenizer}
        return gac.allocate(self.loaded.model, **(BASIS | LEAST_LOSS | fixed | asked))

    def _refitted(self, found: "_Limit", _rate: Any, _blocks: Any) -> tuple[Any, dict[str, Any]]:
        return found.compressed(), {}

    def _healed(self, found: "_Limit", rate: float | None, blocks: float) -> tuple[Any, dict[str, Any]]:
        length = {"minutes": self._asked.minutes} if self._asked.tokens is None else {"tokens": self._asked.tokens}
        how = {"learning_rate": rate, "blocks": blocks, "text": self._asked.healing_text, **length}
        model = found.compressed()
        try:
            gac.heal(model, against=self.loaded.model, tokenizer=self.loaded.tokenizer, **how)
        except gac.GacError as failure:
            return model, {"failed": str(failure)}
        record = model.gac_plan.healed[-1]
        named = ("tokens", "learning_rate", "before", "after", "seconds")
        return model, {f"healing_{name}": getattr(record, name) for name in named}

    def _lora(self, found: "_Limit", _rate: Any, _blocks: Any) -> tuple[Any, dict[str, Any]]:
        import peft

        model = found.compressed()
        text = healing_text(self._asked.healing_text, found.plan, self.loaded, None)  # type: ignore[arg-type]
        linear = [name for name, one in model.named_modules() if type(one) is torch.nn.Linear and "lm_head" not in name]
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=LORA_RANK, lora_alpha=32, target_modules=linear))
        trained = [one for one in adapted.parameters() if one.requires_grad]
        optimizer, begun, read = torch.optim.AdamW(trained, lr=LORA_RATE), time.monotonic(), 0
        for step in count():
            if time.monotonic() - begun > 60 * self._asked.minutes or read >= (self._asked.tokens or math.inf):
                break
            turns = [divmod(at, len(text.train)) for at in range(step * LORA_WINDOWS, (step + 1) * LORA_WINDOWS)]
            ids = text.train[[int(order(len(text.train), 0, turn)[at]) for turn, at in turns]].to(model.device)
            with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
                loss = adapted(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            read += ids.numel()
        return adapted.merge_and_unload(), {"healing_tokens": read}

    def _row(self, model: Any) -> dict[str, Any]:
        """Perplexity as a multiple of the dense model's, and its logarithm on every text."""
        own = {"": self._perplexity(model).value / self.record["dense"]}
        own |= {text: self._on(model, text) / dense for text, dense in self._dense_also.items()}
        return {"ratio": own[""], **{f"excess {text}".strip(): math.log(ratio) for text, ratio in own.items()}}

    def _on(self, model: Any, text: str) -> float:
        return gac.perplexity(model, self.loaded.tokenizer, text, windows=self._asked.windows).value


class _Limit:
    """One budget: its plan and the refitted model, made when they are first asked for."""

    def __init__(self, study: Healings, limit: float) -> None:
        self._study, self._limit = study, limit

    @cached_property
    def plan(self) -> Plan:
        return self._study.plan(self._limit)

    @cached_property
    def _model(self) -> Any:
        dense = copy.deepcopy(self._study.loaded.model)
        return gac.compress(dense, self.plan, tokenizer=self._study.loaded.tokenizer)

    def compressed(self) -> Any:
        """A copy of the refitted model."""
        return copy.deepcopy(self._model)


if __name__ == "__main__":
    main()

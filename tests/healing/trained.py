"""A tiny model that has learned a text, so that there is something to lose, and compressed ones of it."""

import copy
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import gac
from gac.testing import models

LENGTH = 64
TOKENS = 2_000


@dataclass(frozen=True)
class Trained:
    """``heal`` of compressed copies of it, on the text that it has learned."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    text: Path
    _compressed: dict[str, Any] = field(default_factory=dict)

    def compressed(self, **options: Any) -> Any:
        """A copy of the model that such a plan makes."""
        key = str(options)
        if key not in self._compressed:
            asked = {"budget": 0.4, "latency": "any", "fuse": False} | options
            how = {"calibration": f"{self.text}:4x{LENGTH}", "profile": "nvidia-h100-80gb-hbm3", "progress": False}
            plan = gac.allocate(self.model, tokenizer=self.tokenizer, **(how | asked))
            self._compressed[key] = self.applied(plan)
        return copy.deepcopy(self._compressed[key])

    def healed(self) -> Any:
        """A copy of the low-rank model, healed for ``TOKENS``."""
        if "healed" not in self._compressed:
            self._compressed["healed"] = self.heal(self.compressed())
        return copy.deepcopy(self._compressed["healed"])

    def applied(self, plan: gac.Plan) -> Any:
        return gac.compress(copy.deepcopy(self.model), plan, tokenizer=self.tokenizer, progress=False)

    def command(self, folder: Path) -> tuple[Any, ...]:
        """``gac heal`` of the low-rank model against this one, both saved in the folder."""
        for part in (self.model, self.tokenizer):
            part.save_pretrained(folder / "dense")
        gac.save(self.compressed(), folder / "small", tokenizer=self.tokenizer)
        models = (folder / "small", "--against", folder / "dense")
        return "heal", *models, "--tokens", TOKENS, "--learning-rate", 0.001

    def heal(self, small: Any, **options: Any) -> Any:
        length = {} if "minutes" in options else {"tokens": TOKENS}
        how = {"against": self.model, "tokenizer": self.tokenizer, "progress": False, "learning_rate": 1e-3}
        return gac.heal(small, **(how | length | options))


def trained(folder: Path) -> Trained:
    """Learned from seeded words for a second."""
    draw = random.Random(0)
    words = ["the", "rank", "of", "a", "weight", "is", "small", "where", "curvature", "falls", "off", "quickly"]
    text, tokenizer, model = folder / "prose.txt", models.tiny_tokenizer(), models.tiny_model()
    text.write_text(" ".join(draw.choice(words) for _ in range(1200)), encoding="utf-8")
    ids = torch.tensor(tokenizer(text.read_text(), add_special_tokens=False)["input_ids"])
    windows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    optimizer, dice = torch.optim.Adam(model.parameters(), lr=3e-3), torch.Generator().manual_seed(0)
    for _ in range(40):
        batch = windows[torch.randint(len(windows), (16,), generator=dice)]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return Trained(model, tokenizer, text)

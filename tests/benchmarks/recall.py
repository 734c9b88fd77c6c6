"""Recall from contexts of which half of the tokens are kept: GAC's budgets by layer beside the same for every layer.

    python tests/benchmarks/recall.py --output recall.json
    python tests/benchmarks/recall.py --device cpu --context 512 --samples 4 --output recall-cpu.json

Contexts are news with sentences between them, each of which gives the code of a city. ``needle`` has one such sentence,
at a random depth, and asks for it. ``keys``, after RULER's (arXiv 2404.06654), has eight and asks for each. The press
sees the context alone: what is asked comes after tokens have been evicted. A code counts as recalled where every token
of it is the likeliest; ``loss`` is in nats a token of the codes. ``uniform`` keeps as many tokens in every layer, as a
press of kvpress with one ratio does; ``gac`` is ``gac.allocate_tokens``; ``dense`` keeps all. The seeds draw cities,
codes, depths and news. Rows are written one by one, and the same command goes on.
"""

import json
import random
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from statistics import mean
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

import gac
from gac.models.loading import load_model
from tests.benchmarks.harness import machine, markdown, news, options, write

CITIES = (
    *(
        "Paris",
        "London",
        "Berlin",
        "Madrid",
        "Rome",
        "Vienna",
        "Oslo",
        "Dublin",
        "Athens",
        "Lisbon",
        "Prague",
        "Warsaw",
    ),
    *("Cairo", "Tokyo", "Lima", "Delhi"),
)
TASKS = {"needle": 1, "keys": 8}
SETTINGS = ("model", "presses", "keep", "context", "samples", "calibration", "following", "shares")


def sample(tokenizer: Any, filler: list[int], context: int, keys: int, draw: random.Random) -> tuple[list[int], Any]:
    """Token ids of a context of exactly this length, and what is asked of it: ids of each question and its answer."""
    codes = {city: f"{draw.randrange(10**5):05d}" for city in draw.sample(CITIES, keys)}
    ids = {
        city: tokenizer(f"\nThe secret code of {city} is {code}.\n", add_special_tokens=False)["input_ids"]
        for city, code in codes.items()
    }
    room = context - sum(map(len, ids.values()))
    if room <= keys:
        raise SystemExit(f"contexts of {context} tokens have no room for {keys} sentences; give a larger --context")
    begin = draw.randrange(len(filler) - room)
    text = filler[begin : begin + room]
    cuts = sorted(draw.sample(range(1, room), keys))
    found = text[: cuts[0]]
    for city, start, stop in zip(codes, cuts, [*cuts[1:], room], strict=True):
        found += ids[city] + text[start:stop]
    asked = [
        tuple(
            tokenizer(part, add_special_tokens=False)["input_ids"]
            for part in (f"\nThe secret code of {city} is", f" {code}")
        )
        for city, code in codes.items()
    ]
    return found, asked


@torch.inference_mode()
def recalled(model: Any, press: Any, context: list[int], asked: Any) -> Iterator[tuple[bool, float]]:
    """Of each answer whether it is the likeliest, token by token, and its loss."""
    ids, length = torch.tensor([context], device=model.device), len(context)
    with press(model):
        cache = DynamicCache()
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        lengths = [layer.keys.shape[2] for layer in cache.layers]
        for question, answer in asked:
            after = torch.tensor([question + answer], device=model.device)
            positions = torch.arange(length, length + after.shape[1], device=model.device)[None]
            logits = model(input_ids=after, position_ids=positions, past_key_values=cache).logits[0].float()
            wanted, told = after[0, len(question) :], logits[len(question) - 1 : -1]
            yield bool((told.argmax(-1) == wanted).all()), float(cross_entropy(told, wanted))
            for layer, kept in zip(cache.layers, lengths, strict=True):
                layer.keys, layer.values = layer.keys[:, :, :kept], layer.values[:, :, :kept]


def plans_of(loaded: Any, press: str, asked: Namespace) -> dict[str, gac.TokenPlan]:
    """GAC's plan, and those that keep the same and all in every layer."""
    shares = sorted({*asked.shares, asked.keep})
    found = gac.allocate_tokens(
        loaded.model,
        asked.keep,
        press=press,
        calibration=f"{asked.calibration}x{asked.context + asked.following}",
        following=asked.following,
        shares=shares,
        tokenizer=loaded.tokenizer,
    )
    every = int(asked.keep * asked.context) // found.step * found.step

    def same(kept: int) -> gac.TokenPlan:
        layers = tuple(replace(one, kept=kept) for one in found.layers)
        return replace(found, layers=layers, limit=max(found.limit, kept * len(layers)))

    return {"dense": same(found.context), "uniform": same(every), "gac": found}


def resumed(asked: Namespace) -> dict[str, Any]:
    """What was measured before."""
    settings = {name: getattr(asked, name) for name in SETTINGS} | {"device": asked.device}
    settings |= {"versions": machine()["versions"]}
    if not asked.output.exists():
        return {"settings": settings, "budgets": {}, "rows": []}
    found: dict[str, Any] = json.loads(asked.output.read_text())
    if found.get("settings") != json.loads(json.dumps(settings)):
        raise SystemExit(f"{asked.output} was measured with {found.get('settings')}, not {settings}")
    return found


def row_of(loaded: Any, press: Any, filler: list[int], task: str, seed: int, asked: Namespace) -> dict[str, float]:
    """Recall and loss of the samples of a seed."""
    draw, found = random.Random(f"{task} {seed}"), []
    for _ in range(asked.samples):
        context, questions = sample(loaded.tokenizer, filler, asked.context, TASKS[task], draw)
        found += recalled(loaded.model, press, context, questions)
    return {"recall": mean(right for right, _ in found), "loss": mean(loss for _, loss in found)}


def summary(rows: list[dict[str, Any]]) -> str:
    """Means over the seeds."""
    kinds = list(dict.fromkeys((row["press"], row["task"], row["way"]) for row in rows))
    lines = []
    for kind in kinds:
        own = [row for row in rows if (row["press"], row["task"], row["way"]) == kind]
        lines.append(
            [
                *kind,
                str(len(own)),
                f"{mean(row['recall'] for row in own):.3f}",
                f"{mean(row['loss'] for row in own):.3f}",
            ]
        )
    return markdown(("press", "task", "way", "seeds", "recall", "loss"), lines)


def main() -> None:
    parser = options(__doc__, "--model", "--output", "--device")
    parser.add_argument("--presses", nargs="+", default=["snapkv", "expectedattention"])
    parser.add_argument("--keep", type=float, default=0.5)
    parser.add_argument("--context", type=int, default=1024, help="tokens")
    parser.add_argument("--samples", type=int, default=20, help="contexts of each task and seed")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--calibration", default="wiki-sample:16", help="text and windows")
    parser.add_argument("--following", type=int, default=128, help="tokens of a window that follow the context")
    parser.add_argument("--shares", type=float, nargs="+", default=[eighth / 8 for eighth in range(1, 8)])
    asked = parser.parse_args()
    record, loaded = resumed(asked), load_model(asked.model)
    loaded.model.to(asked.device)
    filler = loaded.tokenizer(news().read_text("utf-8"), add_special_tokens=False)["input_ids"]
    for press in asked.presses:
        plans = plans_of(loaded, press, asked)
        record["budgets"][press] = [one.kept for one in plans["gac"].layers]
        for task, seed, (way, plan) in ((t, s, p) for s in range(asked.seeds) for t in TASKS for p in plans.items()):
            case = {"press": press, "task": task, "seed": seed, "way": way}
            if any(case.items() <= row.items() for row in record["rows"]):
                continue
            kept = {"kept": plan.used / plan.total, "predicted": plan.loss}
            record["rows"].append(case | kept | row_of(loaded, gac.press(plan), filler, task, seed, asked))
            write(asked.output, **record)
            print(record["rows"][-1], flush=True)
    print(summary(record["rows"]))


if __name__ == "__main__":
    main()

"""Perplexity over dense with a smaller KV cache, predicted and measured: latents, few bits, and what peers do.

    python tests/benchmarks/cache.py --output cache.json
    python tests/benchmarks/cache.py --ways kv_bits latent:int8+int4 all --caches 0.62 0.5 0.35 --output cache-few.json
    python tests/benchmarks/cache.py --model gemma3-270m --lengths 1024 --output cache-gemma.json

Each way at each share of the dense cache (``--caches``); every model is measured on windows of each length.

- ``latent``: GAC's plan in the form ``latent``, no other weight changed. ``latent:int8``: in 8 bits, at half of each
  share. ``latent:int8+int4``: in 8 or 4 bits, as is best for each weight, at half of each share.
- ``kv_bits``: keys and values in 2 to 8 bits, as is best for each weight, at half of each share. ``all``: these beside
  latents in 8 and 4 bits, at half of each share. Neither counts the last tokens, which stay exact.
- ``head_dim``: GAC's plan with shorter values. Below a little over 0.5 there is none.
- ``palu``: PaLU's own allocation and groups, ranks in multiples of 32.
- ``kivi``: KIVI's rounding (arXiv 2402.02750) of the dense model's cache to ``--kivi`` bits, as in its paper: keys by
  channel in groups of 32 tokens, values by token in groups of 32 numbers, each with a least number and a step of 16
  bits; of the last 128 tokens a query reads exact ones. It is simulated, and its share counts none of these 128.

``fit`` is ln(ratio) predicted over measured. ``over 16 bits`` is the ratio of rounded latents over that of ``latent``
at twice the cache. Windows are cut from documents that are joined. Rows are written one by one, and the same command
goes on; where nothing is left it prints the table.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

import gac
from tests.benchmarks.harness import OF_ONE_TEXT, Study, markdown, options

WAYS = ("latent", "latent:int8", "latent:int8+int4", "kv_bits", "all", "palu", "head_dim", "kivi")
ROUNDED = {
    "latent:int8": ("latent:int8",),
    "latent:int8+int4": ("latent:int8", "latent:int4"),
    "kv_bits": ("kv_bits",),
    "all": ("kv_bits", "latent:int8", "latent:int4"),
}
"""Forms of ways that have half of each share."""
PALU = "fisher:nearest32"
GROUP = 32
"""Tokens of a channel of keys, or numbers of a token of values, that have one step."""
EXACT = 128
"""Tokens before a query that are not rounded yet."""
COLUMNS = ("way", "share", "cache", "length", "dense", "ratio", "predicted", "measured", "fit", "over 16 bits")


def main() -> None:
    parser = options(__doc__, *OF_ONE_TEXT, "--refit")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--caches", type=float, nargs="+", default=[0.7, 0.5, 0.35], help="shares of the dense cache")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096], help="tokens of evaluation windows")
    parser.add_argument("--kivi", type=int, nargs="+", default=[8, 4], help="bits")
    asked = parser.parse_args()
    study = OfLengths(asked)
    for way in asked.ways:
        if way == "kivi":
            for bits in asked.kivi:
                study.round(bits)
        else:
            for share in asked.caches:
                budget, how = planned(way, share)
                given = {} if way == "palu" else {"refit": asked.refit}
                study.add({"way": way, "share": share}, budget, **how, **given)
    print(markdown(COLUMNS, table(study.record)))


def planned(way: str, share: float) -> tuple[float, dict[str, Any]]:
    """The budget, and the options of ``gac.allocate``."""
    if way == "palu":
        return share, {"method": "palu", "rule": PALU}
    return 1.0, {"forms": ROUNDED.get(way, (way,)), "kv_cache": share / 2 if way in ROUNDED else share}


class OfLengths(Study):
    """A study whose rows have ln(ratio) on windows of each length, by that."""

    def __init__(self, asked: argparse.Namespace) -> None:
        super().__init__(asked, "lengths", "refit")

    def _perplexities(self, model: Any) -> dict[str, gac.Perplexity]:
        asked, [text] = self._asked, self.texts
        return {
            str(length): gac.perplexity(model, self.loaded.tokenizer, text, windows=asked.windows, length=length)
            for length in asked.lengths
        }

    def round(self, bits: int) -> None:
        """The row of the dense model with a rounded cache, unless there is one."""
        share = (bits + 2 * 16 / GROUP) / 16
        case = {"way": "kivi", "bits": bits, "share": share, "cache": share}
        if not any(case.items() <= row.items() for row in self.rows):
            with rounded_cache(self.loaded.model, bits):
                self.keep(case | self.quality(self.loaded.model))


def table(record: dict[str, Any]) -> Iterator[Sequence[str]]:
    """A line for each row and length, or one that says that there is no such plan."""
    exact = {row["share"]: row["losses"] for row in record["rows"] if row["way"] == "latent" and "ratio" in row}
    for row in sorted(record["rows"], key=lambda row: (WAYS.index(row["way"]), -row["share"])):
        head = [row["way"], f"{row['share']:.4g}", f"{row.get('cache', 0):.4f}"]
        for length, measured in row.get("losses", {}).items():
            predicted = row.get("predicted")
            told = ["", ""] if predicted is None else [f"{predicted:.4f}", f"{predicted / measured:.2f}"]
            beside = exact.get(row["share"]) if row["way"] in ROUNDED else None
            over = "" if beside is None else f"{math.exp(measured - beside[length]):.4f}"
            ratios = [f"{record['denses'][length]:.3f}", f"{math.exp(measured):.4f}"]
            yield [*head, length, *ratios, told[0], f"{measured:.4f}", told[1], over]
        if "refused" in row:
            yield [*head[:2], "out of reach", *[""] * (len(COLUMNS) - 3)]


@contextmanager
def rounded_cache(model: Any, bits: int) -> Iterator[None]:
    """With attention over a cache as KIVI rounds it."""
    own, name = model.config._attn_implementation, f"kivi_{bits}"
    AttentionInterface.register(name, partial(attend_rounded, bits))
    AttentionMaskInterface.register(name, eager_mask)
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(own)


def attend_rounded(
    bits: int, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **given: Any
) -> tuple[Tensor, None]:
    """What every query would mix if its token were decoded, ``EXACT`` queries at a time.

    Keys are rounded when ``EXACT`` of them have come, each value when it is ``EXACT`` tokens old.

    Args:
        query, key, value: ``(batch, heads, tokens, length)``, keys rotated.
        mask: what is added to scores, ``(batch, 1, tokens, tokens)``.
    """
    if given.get("softcap") is not None:
        raise SystemExit(f"{type(module).__name__} caps scores, which this simulation does not; leave the way kivi out")
    times, whole = query.shape[1] // key.shape[1], key.shape[2] // EXACT * EXACT
    old_keys = rounded(key[:, :, :whole].mT, bits).mT
    old_values = rounded(value, bits)
    mixed = []
    for start in range(0, query.shape[2], EXACT):
        stop = min(start + EXACT, query.shape[2])
        keys = torch.cat((old_keys[:, :, :start], key[:, :, start:stop]), 2).repeat_interleave(times, 1)
        scores = query[:, :, start:stop] @ keys.mT * scaling + mask[:, :, start:stop, :stop]
        shares = scores.softmax(-1, torch.float32).to(query.dtype)
        ages = torch.arange(start, stop, device=key.device)[:, None] - torch.arange(stop, device=key.device)
        parts = ((ages > EXACT, old_values), (ages <= EXACT, value))
        mixed.append(sum(shares * there @ of[:, :, :stop].repeat_interleave(times, 1) for there, of in parts))
    return torch.cat(mixed, 2).transpose(1, 2).contiguous(), None


def rounded(values: Tensor, bits: int) -> Tensor:
    """To the nearest of 2^bits numbers from the least to the largest of each ``GROUP`` along the last axis."""
    groups = values.float().unflatten(-1, (-1, GROUP))
    least, most = groups.aminmax(dim=-1, keepdim=True)
    least, step = (one.to(values.dtype).float() for one in (least, (most - least) / (2**bits - 1)))
    numbers = ((groups - least) / step.clamp_min(torch.finfo(torch.float32).tiny)).round().clamp(0, 2**bits - 1)
    return (numbers * step + least).flatten(-2).to(values.dtype)


if __name__ == "__main__":
    main()

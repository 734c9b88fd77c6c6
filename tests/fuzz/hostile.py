"""Values and changes that a reader has to withstand, for hypothesis and for the coverage-guided fuzzer alike."""

import json
import random
from typing import Any

WORDS = (
    *("", "low_rank", "narrow", "head_dim", "dense", "latent", "latent:2", "latent:0", "latent:" + "9" * 5000),
    *("prefill:1x1024", "decode:1@1", "prefill:" + "9" * 5000 + "x1", "auto", "params", "in", "out", "../../x", "/etc"),
    *("\x00", "\x1b[31m", "\ud800", "\u202e", "x" * 5000, "NaN", "cold", "bf16"),
)
NUMBERS = (
    *(0, -1, 1, 2, 8, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**400, -(10**400)),
    *(0.5, -0.0, 1e-320, 1e308, -1e308, float("nan"), float("inf"), 1e15 + 1, True, False, None),
)


def value(draw: random.Random) -> Any:
    """A value that some field does not expect."""
    kind = draw.randrange(6)
    if kind < 3:
        return draw.choice(NUMBERS)
    if kind < 5:
        return draw.choice(WORDS)
    return draw.choice(([], {}, [[]], {"a": 1}, [0] * 100, [None]))


def spoil(document: Any, draw: random.Random) -> Any:
    """The document, changed in place where a random walk from its root ends."""
    if not isinstance(document, dict | list) or not document:
        return value(draw)
    key = draw.choice(list(document) if isinstance(document, dict) else range(len(document)))
    what = draw.randrange(16)
    if what == 0:
        del document[key]
    elif what == 1:
        document[key] = value(draw)
    elif what == 2 and isinstance(document, list):
        document.insert(key, document[draw.randrange(len(document))])
    elif what == 2:
        document[draw.choice(WORDS)] = value(draw)
    else:
        document[key] = spoil(document[key], draw)
    return document


def spoiled(data: bytes, draw: random.Random) -> bytes:
    """JSON, or lines of JSON, with one or a few values changed; other bytes as they are."""
    lines = data.split(b"\n")
    for _ in range(draw.choice((1, 1, 2, 4))):
        number = draw.randrange(len(lines))
        try:
            lines[number] = json.dumps(spoil(json.loads(lines[number]), draw)).encode()
        except (ValueError, RecursionError):
            continue
    return b"\n".join(lines)

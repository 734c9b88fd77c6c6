"""Text that the dense model writes itself: what it says by itself is what it is to go on saying.

No data is needed, and no source is overfitted (LLM-QAT, arXiv 2305.17888). Documents begin with BOS, and where there is
a chat template with all that stands in it before a user's first word, in turn; what a user says is then answered
(Magpie, arXiv 2406.08464). Every token is drawn at temperature 1 from all tokens. A document ends with EOS or after as
many tokens as a window has; documents are packed one after the other. The text is kept on disk.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig

from gac.distributed.ranks import Ranks
from gac.errors import StatisticsError, TextError
from gac.io import home
from gac.models.loading import quiet_transformers
from gac.models.modules import input_device
from gac.progress import progress_bar
from gac.sensitivity.layerwise import frozen
from gac.sensitivity.store import read_tensors, write_tensors
from gac.sensitivity.text import Windows, windows_of

SELF = "self"
"""What a text is called that the dense model writes."""
WINDOWS = 512
"""How many are written where nothing is said."""
AT_ONCE = 256
"""Documents that are written side by side at most."""
CACHED = 2**33
"""Bytes of keys and values of all of them, at most."""
MOST = 64
"""Documents for a window at most, before a model counts as one that says nothing."""
ASKED = 4
"""What a user says has one of so many parts of a document's tokens at most."""
_MARK = "0f1e2d3c"


@dataclass(frozen=True)
class Start:
    """The token ids that a kind of document begins with.

    Attributes:
        ids: before its first word.
        reply: between what a user says and the answer; empty where none is given.
    """

    ids: tuple[int, ...]
    reply: tuple[int, ...] = ()


def own_windows(
    model: Any, tokenizer: Any, digest: str, windows: int, length: int, seed: int, ranks: Ranks, progress: bool
) -> Windows:
    """So many windows of text by the model, written now or read from disk; BOS is at their heads as in any text.

    Args:
        model: the dense one.
        digest: of its weights.
        seed: of the draw.

    Raises:
        TextError: the tokenizer has nothing to begin a text with, or the model ends all documents at once.
        StatisticsError: the text cannot be kept, or read.
    """
    starts = starts_of(tokenizer)
    settings = json.dumps([digest, windows, length, seed, [asdict(one) for one in starts]])
    path = home() / "own-text" / f"{hashlib.sha256(settings.encode()).hexdigest()[:40]}.safetensors"
    if not ranks.once(path.exists) and ranks.leads:
        write_tensors(path, {"ids": _written(model, starts, windows * length, length, seed, progress)})
    ranks.once(lambda: None)  # the others wait
    try:
        ids = read_tensors(path, torch.device("cpu"))["ids"]
    except (FileNotFoundError, KeyError) as failure:
        raise StatisticsError(
            f"{path} holds no text", "text that the model wrote", "Remove the file, and run the same again."
        ) from failure
    return windows_of(SELF, ids, tokenizer, windows, length)


def starts_of(tokenizer: Any) -> list[Start]:
    """What documents begin with, one for each kind of document.

    Raises:
        TextError: there are none.
    """
    found = [] if tokenizer.bos_token_id is None else [Start((int(tokenizer.bos_token_id),))]
    if getattr(tokenizer, "chat_template", None):
        said = [{"role": "user", "content": _MARK}]
        talk = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        before, _, behind = talk.partition(_MARK)
        ids, reply = (tokenizer(one, add_special_tokens=False)["input_ids"] for one in (before, behind))
        found.append(Start(tuple(ids), tuple(reply)))
    if not any(one.ids for one in found):
        raise TextError(
            f"text 'self' with a {type(tokenizer).__name__} that has neither BOS nor a chat template",
            "something that a text begins with",
            "Name a text, such as wiki-sample.",
        )
    return [one for one in found if one.ids]


def _written(model: Any, starts: Sequence[Start], tokens: int, length: int, seed: int, progress: bool) -> Tensor:
    """At least so many tokens of documents, int64 ``(tokens,)``."""
    found, have = [], 0
    devices = [input_device(model)] if input_device(model).type == "cuda" else []
    bar = progress_bar("writing text", "token", total=tokens, shown=progress)
    with bar, torch.random.fork_rng(devices), frozen(model), quiet_transformers():
        torch.manual_seed(seed)
        for document in _documents(model, starts, tokens, length):
            found.append(document)
            have += len(document)
            bar.update(len(document))
            if have >= tokens:
                return torch.cat(found)
    raise TextError(
        f"a dense model whose documents have {have / max(len(found), 1):.1f} tokens",
        "a model that writes text by itself",
        "Name a text, such as wiki-sample.",
    )


def _documents(model: Any, starts: Sequence[Start], tokens: int, length: int) -> Iterator[Tensor]:
    """Documents without what they began with, each with the EOS that it ended with."""
    ends, windows = _ends(model), -(-tokens // length)
    side_by_side = min(at_once(model, length), -(-windows // len(starts)))
    for turn in range(-(-MOST * windows // side_by_side)):
        start = starts[turn % len(starts)]
        begun, asked = [torch.tensor(start.ids)] * side_by_side, length // ASKED if start.reply else length
        said = _continued(model, begun, asked, ends)
        ended = [one[:-1] for one in said if start.reply and int(one[-1]) in ends]
        yield from (one for one in said if not (start.reply and int(one[-1]) in ends))
        if ended:
            yield from _answered(model, start, ended, length - asked, ends)


def _answered(model: Any, start: Start, said: Sequence[Tensor], most: int, ends: Sequence[int]) -> Iterator[Tensor]:
    """What was said, with answers of so many tokens at most."""
    talks = [torch.cat([one, torch.tensor(start.reply)]) for one in said]
    answers = _continued(model, [torch.cat([torch.tensor(start.ids), one]) for one in talks], most, ends)
    return (torch.cat(pair) for pair in zip(talks, answers, strict=True))


def _continued(model: Any, given: Sequence[Tensor], most: int, ends: Sequence[int]) -> list[Tensor]:
    """What the model writes behind token ids, each ``(tokens,)``: up to EOS, and so many tokens at most."""
    width, pad = max(map(len, given)), ends[0] if ends else 0
    ids = torch.stack([functional.pad(one, (width - len(one), 0), value=pad) for one in given])
    mask = torch.stack([functional.pad(torch.ones_like(one), (width - len(one), 0)) for one in given])
    how = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0,
        max_new_tokens=most, eos_token_id=list(ends) or None, pad_token_id=pad,
    )  # fmt: skip
    device = input_device(model)
    written = model.generate(ids.to(device), attention_mask=mask.to(device), generation_config=how).cpu()
    stops = [torch.isin(row, torch.tensor(ends, dtype=row.dtype)).nonzero() for row in written[:, width:]]
    return [row[: int(at[0]) + 1] if len(at) else row for row, at in zip(written[:, width:], stops, strict=True)]


def at_once(model: Any, length: int) -> int:
    """Documents of so many tokens that are written side by side: it decides what is drawn, so no device does."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    each = 2 * config.num_hidden_layers * heads * size * model.dtype.itemsize * length
    return int(max(1, min(AT_ONCE, CACHED // each)))


def _ends(model: Any) -> list[int]:
    """The tokens that end a text."""
    found = model.generation_config.eos_token_id
    return [] if found is None else [found] if isinstance(found, int) else list(found)

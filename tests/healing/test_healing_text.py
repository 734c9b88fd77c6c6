"""The text to heal on: one text or several, with held-out windows of each."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trained import LENGTH, Trained

import gac
from gac.core.errors import TextError
from gac.healing.text import HealingText, healing_text, held_out
from gac.measurement.own_text import Start, pieces_of, sample
from gac.measurement.text import TextSpec, Windows, windows_of
from gac.models.loading import Loaded


def text_of(text: Any, learned: Trained, prompts: list[Any] | None = None, labels: bool = False) -> HealingText:
    """The text for a plan on windows of ``LENGTH``; sampled text consists of the token 7."""
    loaded = Loaded(learned.model, "learned", learned.tokenizer)

    def sampler(windows: int, length: int, others: Sequence[Windows]) -> Windows:
        if prompts is not None:
            prompts.append(others)
        return windows_of("self", torch.full((windows * length,), 7), learned.tokenizer, windows, length)

    return healing_text(text, learned.compressed().gac_plan, loaded, sampler, labels)


def rows(text: HealingText) -> set[tuple[int, ...]]:
    return set(map(tuple, torch.cat([text.train, text.heldout]).tolist()))


@pytest.fixture
def other(tmp_path: Path) -> str:
    (tmp_path / "other.txt").write_text("gradients meet in the middle " * 100, encoding="utf-8")
    return str(tmp_path / "other.txt")


def test_sampled_text_continues_training_windows_of_other_texts(learned: Trained, other: str) -> None:
    prompts: list[Sequence[Windows]] = []
    text = text_of([f"self:24x{LENGTH}", f"{other}:20x{LENGTH}"], learned, prompts)
    assert text_of("self", learned, prompts).names == ("self",)
    [[of_other], nothing] = prompts
    assert len(nothing) == 0
    assert torch.equal(of_other.ids, text.train[text.train[:, 1] != 7])
    assert len(text.heldout[text.heldout[:, 1] != 7]) + len(of_other) == 20


def test_sampled_text_has_no_labels(learned: Trained, other: str) -> None:
    prompts: list[Any] = []
    with pytest.raises(TextError, match=f"labels with text 'self:24x{LENGTH}' alone"):
        text_of([f"self:24x{LENGTH}"], learned, prompts, labels=True)
    assert prompts == []
    text = text_of([f"self:24x{LENGTH}", f"{other}:20x{LENGTH}"], learned, labels=True)
    assert torch.equal(text.labelled, (text.train[:, 1] != 7).float())
    assert torch.equal(text.heldout_labelled, (text.heldout[:, 1] != 7).float())


def test_pieces_follow_a_bos() -> None:
    ids = torch.arange(68).view(2, 34)
    with_bos, without = (Windows("a text", ids, "digest", bos=bos) for bos in ("windows", "none"))
    pieces = pieces_of([with_bos, without], 99)
    assert (len(pieces), {piece.reply for piece in pieces}) == (16 * 2 + 17 * 2, {()})
    assert [pieces[i].ids for i in (0, 1, 16, 32)] == [(99, 1, 2), (99, 3, 4), (99, 35, 36), (99, 0, 1)]
    assert [pieces_of([text], None)[0].ids for text in (with_bos, without)] == [(1, 2), (0, 1)]
    assert pieces_of([], 99) == []


def test_windows_begin_with_evenly_spaced_starts_and_continue_with_the_next(tiny_model: Any) -> None:
    starts = [Start((token, token + 1)) for token in range(0, 12, 2)]
    tiny_model.generation_config.eos_token_id = [*range(tiny_model.config.vocab_size)]  # every token ends a document
    ids = sample(tiny_model, starts, 3, 12, 0, None, show_progress=False).view(3, 12)[:, [0, 1, 3, 4]]
    assert ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_unknown_tokens_are_refused_before_sampling(learned: Trained, other: str) -> None:
    prompts: list[Sequence[Windows]] = []
    learned.compressed()  # of the model before it is resized
    small = copy.deepcopy(learned.model)
    small.resize_token_embeddings(20)
    with pytest.raises(TextError, match="the tokenizer gives token id"):
        text_of([f"{other}:20x{LENGTH}", f"self:24x{LENGTH}"], replace(learned, model=small), prompts)
    assert prompts == []


def test_several_texts_have_the_windows_of_each(learned: Trained, other: str) -> None:
    documents = gac.Documents(["some words of another kind " * 60], length=LENGTH)
    items = [str(learned.text), f"{other}:11x{LENGTH}", f"self:13x{LENGTH}", documents]
    alone = [text_of(item, learned) for item in items]
    joint = text_of(items, learned)
    assert joint.names == tuple(name for text in alone for name in text.names)
    assert joint.names[1:] == (f"{other}:11x{LENGTH}", f"self:13x{LENGTH}", "1 document given in memory")
    assert rows(joint) == set().union(*map(rows, alone))
    assert joint.documents == documents.digests
    assert joint.bos


def test_sampled_text_without_a_size_has_the_window_length_of_the_plan(learned: Trained, other: str) -> None:
    text = text_of([other, "self"], learned)
    assert text.names == (other, "self")
    assert text.train.shape[1] == LENGTH
    assert (torch.cat([text.train, text.heldout])[:, 1] == 7).sum() == 512


def test_small_texts_occur_several_times_in_an_epoch(learned: Trained, other: str) -> None:
    text = text_of([f"{other}:20x{LENGTH}", f"self:180x{LENGTH}"], learned)
    sampled = text.train[:, 1] == 7
    assert len(text.epoch) == 3 * int((~sampled).sum()) + int(sampled.sum())  # the root of 9
    assert torch.equal(text.labelled, (~sampled).float())
    batch = text.batch(0, 2 * len(text.epoch), seed=0)
    for epoch in batch.chunk(2):
        assert (~sampled[epoch]).sum() == 3 * (~sampled).sum()
        assert torch.equal(epoch.unique(), torch.arange(len(text.train)))
    assert not torch.equal(*batch.chunk(2))
    assert torch.equal(text.batch(5, 7, seed=0), batch[5:12])
    assert not torch.equal(text.batch(0, 12, seed=1), batch[:12])
    alone = text_of(other, learned)
    assert torch.equal(alone.epoch, torch.arange(len(alone.train)))


@pytest.mark.parametrize("documents", [["one", "two words " * 1200], ["self: I am " * 1200, "a document"]])
def test_strings_that_name_no_text_are_documents(documents: Sequence[str], learned: Trained) -> None:
    text = text_of(documents, learned)
    assert text.names == ("2 documents given in memory",)
    assert text.documents == gac.Documents(documents).digests


def test_a_list_of_one_text_is_that_text(learned: Trained, other: str) -> None:
    for item in (other, f"{other}:12x{LENGTH}", TextSpec(other, 12, LENGTH), f"self:12x{LENGTH}"):
        alone, listed = text_of(item, learned), text_of([item], learned)
        assert alone.names == listed.names == (str(item),)
        assert torch.equal(alone.train, listed.train)


@pytest.mark.parametrize("counts", [(20, 40, 100), (184, 8192)])
def test_texts_have_the_same_share_of_heldout_windows_as_of_training_and_at_most_half(counts: Sequence[int]) -> None:
    heldout = [int(part.sum()) for part in held_out("texts", counts, 4).split(list(counts))]
    shares = [count**0.5 for count in counts]
    assert min(heldout) >= 1
    assert heldout == pytest.approx([sum(heldout) * share / sum(shares) for share in shares], abs=1)
    parts = held_out("texts", [1, 2, 200], 4).split([1, 2, 200])
    assert [part.tolist() for part in parts[:2]] == [[False], [False, True]]
    assert held_out("texts", [20], 2).nonzero()[:, 0].tolist() == [5, 15]

"""What is healed on: one text or several, each as it is alone, with windows of every one held out."""

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
from gac.healing.sampling import Start, pieces_of, sample
from gac.healing.text import HealingText, healing_text, held_out
from gac.measurement.text import TextSpec, Windows, windows_of
from gac.models.loading import Loaded


def text_of(given: Any, learned: Trained, seen: list[Any] | None = None, labels: bool = False) -> HealingText:
    """Of a plan on windows of ``LENGTH``; what the model writes is of the token 7, beside what is ``seen``."""
    loaded = Loaded(learned.model, "learned", learned.tokenizer)

    def written(windows: int, length: int, beside: Sequence[Windows]) -> Windows:
        if seen is not None:
            seen.append(beside)
        ids = torch.full((windows * length,), 7)
        return windows_of("self", ids, learned.tokenizer, windows, length)

    return healing_text(given, learned.compressed().gac_plan, loaded, written, labels)


def test_own_text_is_written_beside_what_is_trained_on(learned: Trained, other: str) -> None:
    """Not beside what is held out, nor where there is nothing else."""
    seen: list[Sequence[Windows]] = []
    found = text_of([f"self:24x{LENGTH}", f"{other}:20x{LENGTH}"], learned, seen)
    assert text_of("self", learned, seen).names == ("self",)
    [beside], nothing = seen
    assert len(nothing) == 0
    of_other = found.train[:, 1] != 7
    assert torch.equal(beside.ids, found.train[of_other])
    assert len(found.heldout[found.heldout[:, 1] != 7]) + len(beside) == 20


def test_only_text_that_is_given_has_labels(learned: Trained, other: str) -> None:
    seen: list[Any] = []
    with pytest.raises(TextError, match=f"labels with text 'self:24x{LENGTH}' alone, which the dense model writes"):
        text_of([f"self:24x{LENGTH}"], learned, seen, labels=True)
    assert seen == []
    found = text_of([f"self:24x{LENGTH}", f"{other}:20x{LENGTH}"], learned, labels=True)
    assert torch.equal(found.labelled, (found.train[:, 1] != 7).float())
    assert torch.equal(found.heldout_labelled, (found.heldout[:, 1] != 7).float())


def test_pieces_are_what_texts_say_behind_a_bos() -> None:
    ids = torch.arange(68).view(2, 34)
    with_bos, without = (Windows("a text", ids, "digest", bos=bos) for bos in ("windows", "none"))
    pieces = pieces_of([with_bos, without], 99)
    assert (len(pieces), {one.reply for one in pieces}) == (16 * 2 + 17 * 2, {()})
    assert [pieces[at].ids for at in (0, 1, 16, 32)] == [(99, 1, 2), (99, 3, 4), (99, 35, 36), (99, 0, 1)]
    assert [pieces_of([one], None)[0].ids for one in (with_bos, without)] == [(1, 2), (0, 1)]
    assert pieces_of([], 99) == []


def test_windows_begin_with_starts_in_even_steps_and_go_on_with_the_next(tiny_model: Any) -> None:
    starts = [Start((at, at + 1)) for at in range(0, 12, 2)]
    tiny_model.generation_config.eos_token_id = [*range(tiny_model.config.vocab_size)]  # every token ends a document
    found = sample(tiny_model, starts, 3, 12, 0, None, show_progress=False).view(3, 12)[:, [0, 1, 3, 4]]
    assert found.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_tokens_that_the_model_lacks_are_refused_before_it_reads_them(learned: Trained, other: str) -> None:
    seen: list[Sequence[Windows]] = []
    learned.compressed()  # of the model as it is
    small = copy.deepcopy(learned.model)
    small.resize_token_embeddings(20)
    with pytest.raises(TextError, match="the tokenizer gives token id"):
        text_of([f"{other}:20x{LENGTH}", f"self:24x{LENGTH}"], replace(learned, model=small), seen)
    assert seen == []


def rows(text: HealingText) -> set[tuple[int, ...]]:
    return set(map(tuple, torch.cat([text.train, text.heldout]).tolist()))


@pytest.fixture
def other(tmp_path: Path) -> str:
    path = tmp_path / "other.txt"
    path.write_text("gradients meet in the middle " * 100, encoding="utf-8")
    return str(path)


def test_several_texts_are_what_each_is_alone(learned: Trained, other: str) -> None:
    documents = gac.Documents(["some words of another kind " * 60], length=LENGTH)
    items = [str(learned.text), f"{other}:11x{LENGTH}", f"self:13x{LENGTH}", documents]
    alone = [text_of(item, learned) for item in items]
    together = text_of(items, learned)
    assert together.names == tuple(name for one in alone for name in one.names)
    assert together.names[1:] == (f"{other}:11x{LENGTH}", f"self:13x{LENGTH}", "1 document given in memory")
    assert rows(together) == set().union(*map(rows, alone))
    assert together.documents == documents.digests
    assert together.bos


def test_own_text_without_a_size_has_the_windows_of_the_plan(learned: Trained, other: str) -> None:
    found = text_of([other, "self"], learned)
    assert found.names == (str(other), "self")
    assert found.train.shape[1] == LENGTH
    written = (torch.cat([found.train, found.heldout])[:, 1] == 7).sum()
    assert written == 512


def test_a_small_text_is_read_more_often_than_a_large_one(learned: Trained, other: str) -> None:
    found = text_of([f"{other}:20x{LENGTH}", f"self:180x{LENGTH}"], learned)
    own = found.train[:, 1] == 7
    assert len(found.epoch) == 3 * int((~own).sum()) + int(own.sum())  # the root of 9
    assert torch.equal(found.labelled, (~own).float())
    drawn = found.batch(0, 2 * len(found.epoch), seed=0)
    for turn in drawn.chunk(2):
        assert (~own[turn]).sum() == 3 * (~own).sum()
        assert torch.equal(turn.unique(), torch.arange(len(found.train)))
    assert not torch.equal(*drawn.chunk(2))
    assert torch.equal(found.batch(5, 7, seed=0), drawn[5:12])
    assert not torch.equal(found.batch(0, 12, seed=1), drawn[:12])
    assert torch.equal(text_of(other, learned).epoch, torch.arange(len(text_of(other, learned).train)))


@pytest.mark.parametrize("given", [["one", "two words " * 1200], ["self: I am " * 1200, "a document"]])
def test_strings_none_of_which_is_a_text_are_documents(given: Sequence[str], learned: Trained) -> None:
    found = text_of(given, learned)
    assert found.names == ("2 documents given in memory",)
    assert found.documents == gac.Documents(given).digests


def test_one_of_a_list_is_what_it_is_without_the_list(learned: Trained, other: str) -> None:
    for item in (other, f"{other}:12x{LENGTH}", TextSpec(other, 12, LENGTH), f"self:12x{LENGTH}"):
        one, same = text_of(item, learned), text_of([item], learned)
        assert one.names == same.names == (str(item),)
        assert torch.equal(one.train, same.train)


@pytest.mark.parametrize("counts", [(190, 512), (20, 40, 100), (12, 300), (184, 8192)])
def test_windows_of_every_text_are_held_out_in_its_share_of_training(counts: Sequence[int]) -> None:
    out = held_out("texts", counts, 4).split(list(counts))
    found, shares = [int(one.sum()) for one in out], [count**0.5 for count in counts]
    assert min(found) >= 1
    assert found == pytest.approx([sum(found) * share / sum(shares) for share in shares], abs=1)


def test_of_few_windows_half_are_held_out_at_the_most() -> None:
    assert held_out("texts", [1, 2, 200], 4).split([1, 2, 200])[0].tolist() == [False]
    assert held_out("texts", [1, 2, 200], 4).split([1, 2, 200])[1].tolist() == [False, True]
    assert held_out("texts", [20], 2).nonzero()[:, 0].tolist() == [5, 15]

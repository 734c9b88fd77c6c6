"""A healed model is nearer to the dense one; what it consists of is as it was, and its plan says what was done."""

import copy
import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trained import LENGTH, TOKENS, Trained

import gac
from gac import api
from gac.checkpoint.card import model_card
from gac.core.errors import CheckpointError, GacError, HealingError, ModelError, PlanError, TextError
from gac.core.io import home
from gac.healing import descent, heal, healing, layers, own_text, state, whole, work
from gac.healing import logits as logits_of
from gac.healing.trainables import Trainables
from gac.plan.summary import apply_commands
from gac.reporting.figures.healing import LossPoint
from tests.cli.commands import answer, refused, run
from tests.compression.applying import logits

PLANS: dict[str, dict[str, Any]] = {
    "low rank": {},
    "narrow, fused": {"forms": ("narrow", "head_dim"), "budget": 0.6, "refit": "none", "fuse": True},
    "2 bits, rotated, fused": {"schemes": ("w2a16:32",), "budget": 1.0, "rotate": True, "fuse": True},
}


def shapes(model: Any) -> dict[str, tuple[Any, ...]]:
    return {name: (tuple(one.shape), one.dtype) for name, one in model.state_dict().items()}


def same(model: Any, state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one, state[name]) for name, one in model.state_dict().items())


@pytest.mark.parametrize("asked", PLANS)
def test_it_comes_nearer_and_keeps_forms_dims_schemes_and_bytes(asked: str, learned: Trained, tmp_path: Path) -> None:
    small = learned.compressed(**PLANS[asked])
    plan, before, state = small.gac_plan, shapes(small), {n: one.clone() for n, one in small.state_dict().items()}
    healed = learned.heal(small)
    assert healed is small
    [record] = healed.gac_plan.healed
    assert record.after < record.before
    assert (record.window_tokens, record.seed, record.texts) == (LENGTH, 0, (str(learned.text),))
    assert 0.8 * TOKENS < record.tokens < 1.4 * TOKENS
    assert shapes(healed) == before
    assert not same(healed, state)
    assert replace(healed.gac_plan, healed=()) == plan
    assert not any(one.requires_grad for one in healed.parameters()) or not healed.training
    gac.save(healed, tmp_path / "healed", tokenizer=learned.tokenizer)
    again = gac.load(tmp_path / "healed", device=str(healed.device))
    assert torch.equal(logits(again), logits(healed))
    assert again.gac_plan == healed.gac_plan
    assert f"gac heal DIR --against 'LlamaForCausalLM in memory' --text {learned.text}" in (
        tmp_path / "healed" / "README.md"
    ).read_text("utf-8")


def test_a_model_of_16_bits_is_trained_in_32_and_keeps_16(learned: Trained) -> None:
    narrow = replace(learned, model=copy.deepcopy(learned.model).to(torch.bfloat16), _compressed={})
    healed = narrow.heal(narrow.compressed())
    [record] = healed.gac_plan.healed
    assert record.after < record.before
    assert {one.dtype for one in healed.parameters()} == {torch.bfloat16}


def test_what_runs_in_training_is_what_is_stored(learned: Trained) -> None:
    small = learned.compressed(**PLANS["2 bits, rotated, fused"])
    for change in (0.0, 0.3):  # of a weight's size, far more than a step
        before, given = logits(small), {name: one.clone() for name, one in small.state_dict().items()}
        weights = small.gac_plan.weights
        trained = Trainables(small, weights, {one.name for one in weights if one.changed})
        masters = {name: one for name, one in trained.parameters.items() if name.endswith(("weight", "factor"))}
        for one in masters.values():
            one.data += change * one.std() * torch.randn(one.shape, generator=torch.Generator().manual_seed(0))
        inside = logits(small)
        trained.close(changed=True)
        torch.testing.assert_close(logits(small), inside)
        assert same(small, given) == (change == 0)
        if change == 0:
            torch.testing.assert_close(inside, before)


@pytest.mark.parametrize("near", [True, False])
def test_values_take_the_memory_of_those_that_are_needed_no_more(learned: Trained, near: bool) -> None:
    small = learned.compressed()
    trained = Trainables(small, weights := small.gac_plan.weights, {one.name for one in weights if one.changed})
    first = trained.values({}, near)
    places = {name: one.data_ptr() for name, one in first.items()}
    assert all(one.data_ptr() != places[name] for name, one in trained.parameters.items())
    for one in trained.parameters.values():
        one.data += 1
    assert not any(torch.equal(one, first[name]) for name, one in trained.parameters.items())
    now = trained.values(first, near)
    assert {name: one.data_ptr() for name, one in now.items()} == places
    assert all(torch.equal(one, now[name]) for name, one in trained.parameters.items())


def test_the_same_seed_gives_the_same_bits_and_another_one_others(learned: Trained) -> None:
    small = learned.compressed()
    one, two, other = (learned.heal(copy.deepcopy(small), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(logits(one), logits(two))
    assert not torch.equal(logits(one), logits(other))
    assert not list((home() / "healing").glob("*"))


def test_dense_weights_are_trained_where_that_is_asked_for(learned: Trained) -> None:
    small = learned.compressed()
    dense = [choice.name for choice in small.gac_plan.weights if not choice.changed]
    assert dense
    weights = {name: small.get_submodule(name).weight.clone() for name in dense}
    learned.heal(small)
    assert all(torch.equal(small.get_submodule(name).weight, weights[name]) for name in dense)
    again = learned.heal(small, dense=True, learning_rate=5e-4)
    assert not any(torch.equal(small.get_submodule(name).weight, weights[name]) for name in dense)
    assert [one.dense for one in again.gac_plan.healed] == [False, True]
    assert again.gac_plan.healed[1].before == pytest.approx(again.gac_plan.healed[0].after, rel=1e-4)


def test_where_nothing_better_is_found_it_goes_back_and_ends_in_small_steps(learned: Trained, monkeypatch: Any) -> None:
    small, parts, states = learned.compressed(), [], []
    found = iter([1.0, 0.5, 0.6, 0.7, 0.6, 0.7, 0.6, 0.6, 0.6, 0.4])  # the start, four looks worse than one, four more
    step, look = descent.Descent.step, healing.Healing.look

    def stepped(self: Any, loss: torch.Tensor, part: float, where: str) -> float:
        parts.append(part)
        step(self, loss, part, where)
        return 1 / len(parts)  # what is trained on gets better all the time

    def looked(self: Any) -> float:
        states.append((len(parts), self.trained.values()))
        return look(self)

    monkeypatch.setattr(healing.Healing, "_loss", lambda _self: next(found))
    monkeypatch.setattr(descent.Descent, "step", stepped)
    monkeypatch.setattr(healing.Healing, "look", looked)
    monkeypatch.setattr(whole, "BATCH", LENGTH)
    monkeypatch.setattr(whole, "LOOKED", 1.0)
    [record] = learned.heal(small, blocks=0.0, tokens=200 * LENGTH).gac_plan.healed
    looks = [at for at, _ in states]
    assert looks == pytest.approx([10, 20, 30, 40, 50, 55, 60, 65, 70], abs=1)
    assert record.tokens == looks[-1] * LENGTH
    assert parts[50:] == sorted(parts[50:], reverse=True)
    assert parts[-1] < 0.1 < parts[50]
    moved = [sum(float((one - two).abs().sum()) for one, two in zip(a.values(), b.values(), strict=True))
             for (_, a), (_, b) in ((states[0], states[4]), (states[0], states[5]))]  # fmt: skip
    assert moved[1] < moved[0]  # it went back


@pytest.mark.parametrize(
    ("trained", "held", "expected"),
    [
        ("9 8 7 6 5", "9 5 6 6 6", False),  # three looks since the best
        ("9 8 7 6 5 4", "9 5 6 6 6 6", True),
        ("9 8 9 9 9 9", "9 5 6 6 6 6", False),  # steps are too large: nothing gets better
        ("9 8 7 9 6 5 4", "9 5 6 6 6 6 6", True),
        ("5 4 3 2 1 0", "9 8 7 6 5 4", False),
        ("5 4 3 2 1 0", "nan 8 7 6 5 4", False),
        ("", "", False),
    ],
)
def test_a_text_is_overfitted_where_only_what_is_trained_on_gets_better(
    trained: str, held: str, expected: bool
) -> None:
    looks = zip(map(float, trained.split()), map(float, held.split()), strict=True)
    curve = [LossPoint("blocks", 0, 0, 0.0, 99.0, 0.0), *(LossPoint("model", 1, 1, 1.0, *look) for look in looks)]
    assert whole.overfitted(curve) == expected


def test_smaller_steps_take_the_root_of_their_share_of_the_rate() -> None:
    assert [work.rate_of_steps(0.002, tokens, 16_384) for tokens in (32_768, 16_384, 4_096, 256)] == pytest.approx(
        [0.002, 0.002, 0.001, 0.00025]
    )


@pytest.mark.parametrize(("blocks", "tokens"), [(0.0, (LENGTH, whole.BATCH)), (1.0, (8 * LENGTH, layers.BATCH))])
def test_every_part_steps_at_the_rate_of_its_steps(
    blocks: float, tokens: tuple[int, int], learned: Trained, monkeypatch: Any
) -> None:
    rates, begin = set(), descent.Descent.__init__

    def begun(self: Any, parameters: Any, given: Any, rate: float, ranks: Any) -> None:
        rates.add(rate)
        begin(self, parameters, given, rate, ranks)

    monkeypatch.setattr(descent.Descent, "__init__", begun)
    learned.heal(learned.compressed(), blocks=blocks, learning_rate=0.01, tokens=64 * LENGTH)
    assert rates == {work.rate_of_steps(0.01, *tokens)}


@pytest.mark.parametrize("blocks", [0.0, 1.0])
def test_each_part_wins_by_itself(blocks: float, learned: Trained) -> None:
    [record] = learned.heal(learned.compressed(), blocks=blocks).gac_plan.healed
    assert record.after < record.before
    assert record.blocks == blocks


def test_labels_teach_the_text_and_are_said(learned: Trained) -> None:
    """So the text's own tokens become likelier than by the dense model's words alone."""
    words = learned.tokenizer(learned.text.read_text(), add_special_tokens=False)["input_ids"]
    ids, found = torch.tensor(words[: len(words) // LENGTH * LENGTH]).view(-1, LENGTH), {}
    for labels in (0.0, 0.5):
        small = learned.heal(learned.compressed(), labels=labels)
        [record] = small.gac_plan.healed
        assert record.labels == labels
        found[labels] = float(small(input_ids=ids, labels=ids).loss.detach()), record.after
    assert found[0.5][0] < found[0.0][0]
    assert found[0.5][1] > found[0.0][1]  # and it is less like the dense model


def test_a_model_that_labels_made_less_like_the_dense_one_is_said_to_be(
    learned: Trained, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(whole, "LABELLED", 0.0)
    said = "the model is less like the dense one than before: labels=0.9 made it learn the text"
    small = learned.heal(learned.compressed())
    assert said not in caplog.text
    small = learned.heal(small, labels=0.9, learning_rate=1e-2, dense=True)
    first, second = small.gac_plan.healed
    assert second.after > second.before == pytest.approx(first.after, rel=1e-3)
    assert said in caplog.text


class Clock:
    """A second passes whenever it is looked at."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


def test_a_time_is_kept(learned: Trained, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    clock = Clock()  # by which a look at what is held out is as long as a step
    for module in (api, heal, healing, layers, state, whole, work):
        monkeypatch.setattr(module, "time", clock)
    with caplog.at_level("INFO", logger="gac"):
        [record] = learned.heal(learned.compressed(), minutes=3).gac_plan.healed
    assert record.after < record.before
    [minutes] = re.findall(r"healed in ([\d.]+) minutes", caplog.text)
    assert 0.8 * 3 < float(minutes) < 1.05 * 3
    assert "tokens a second" in caplog.text
    assert "the whole model: about " in caplog.text


def test_text_that_the_dense_model_writes_is_kept(learned: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    small, own = learned.compressed(), f"self:12x{LENGTH}"
    one = learned.heal(copy.deepcopy(small), text=own)
    assert one.gac_plan.healed[0].texts == (own,)
    assert one.gac_plan.healed[0].windows + one.gac_plan.healed[0].held == 12
    assert one.gac_plan.healed[0].bos
    assert len(list((home() / "own-text").iterdir())) == 1
    monkeypatch.setattr(own_text, "_written", None)  # nothing is written again
    assert torch.equal(logits(learned.heal(copy.deepcopy(small), text=own)), logits(one))


def test_what_a_user_says_is_answered_where_there_is_a_chat_template(learned: Trained) -> None:
    tokenizer, end = copy.deepcopy(learned.tokenizer), learned.tokenizer.eos_token_id
    tokenizer.chat_template = "Q{{ messages[0].content }}</s>{% if add_generation_prompt %}A{% endif %}"
    bos, chat = own_text.starts_of(tokenizer)
    [question, answer] = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in "QA")
    assert (bos.ids, chat) == ((tokenizer.bos_token_id,), own_text.Start((*question,), (end, *answer)))
    drawn = [-1, 7, end, 0, 8, end, 0, 9, end]  # what is drawn where other tokens are due is not taken
    for start, due in (
        (bos, [*bos.ids, 7, end, *bos.ids, 8, end, *bos.ids, 9, end]),
        (chat, [*question, 7, end, *answer, 8, end, *question, 9, end]),
    ):
        writer = own_text.Writer(itertools.repeat(start))
        assert [writer.after(token, [end]) for token in drawn] == due
        assert writer.documents == {bos: 3, chat: 1}[start]


def test_own_text_is_what_the_model_says_next(learned: Trained) -> None:
    bos = learned.tokenizer.bos_token_id
    ids = own_text._written(learned.model, [own_text.Start((bos,))], 3, LENGTH, 0, None, progress=False)
    assert ids.shape == (3 * LENGTH,)
    windows = ids.view(3, LENGTH)
    assert (windows[:, 0] == bos).all()
    with torch.no_grad():
        chances = learned.model(input_ids=windows).logits[:, :-1].softmax(-1).gather(-1, windows[:, 1:, None])
    assert chances.log().mean() > math.log(10 / learned.model.config.vocab_size)  # far more likely than by chance
    headed = own_text._written(learned.model, [own_text.Start((bos,))], 3, LENGTH, 0, bos, progress=False)
    assert torch.equal(headed.view(3, LENGTH - 1), windows[:, 1:])


def test_how_many_are_written_side_by_side_does_not_decide_what_is_drawn(tiny_model: Any, monkeypatch: Any) -> None:
    starts, written = [own_text.Start((256,)), own_text.Start((5, 6), (7, 8))], []
    for count in (1, 3, 3):
        monkeypatch.setattr(own_text, "at_once", lambda _model, _length, count=count: count)
        written.append(own_text._written(tiny_model, starts, 3, LENGTH, len(written) // 2, None, progress=False))
    assert torch.equal(written[0], written[1])
    assert not torch.equal(written[1], written[2])  # by another seed
    assert len({tuple(row[2:].tolist()) for row in written[0].view(3, LENGTH)}) == 3


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    chances = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.25, 0.0])
    numbers = torch.arange(1000) / 1000
    drawn = own_text.tokens_at(chances.log().expand(1000, -1), numbers)
    assert drawn.bincount(minlength=6).tolist() == [0, 500, 0, 250, 250, 0]
    edges = torch.tensor([0.0, 1 - 2**-24, 1.0])  # what is rounded up is a token that can be, too
    assert own_text.tokens_at(chances.log().expand(3, -1), edges).tolist() == [1, 4, 1]
    many = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(0))
    many[:, 25_000:] = -torch.inf
    assert (own_text.tokens_at(many, edges[1:]) < 25_000).all()


def test_as_many_are_written_side_by_side_as_fit(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, logits = 2 * 2 * 2 * 16 * LENGTH, 3 * 4 * 258  # keys and values of 2 layers and 2 heads; of 258 tokens
    assert own_text.at_once(tiny_model, LENGTH) == own_text.AT_ONCE
    monkeypatch.setattr(own_text, "CACHED", 5 * (4 * numbers + logits) + 1)
    assert own_text.at_once(tiny_model, LENGTH) == 5
    monkeypatch.setattr(own_text, "input_device", lambda _model: torch.device("cuda"))
    for free, count in ((1e12, own_text.AT_ONCE_GPU), (10.1 * (2 * numbers + logits) / own_text.FREE, 10), (0, 1)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device, free=free: (int(free), 0))
        assert own_text.at_once(tiny_model, LENGTH) == count


def test_models_make_more_logits_at_a_time_on_large_gpus(tiny_model: Any, monkeypatch: Any) -> None:
    windows = 2**28 // (258 * LENGTH)
    assert logits_of.windows_at_once(tiny_model, LENGTH) == windows
    monkeypatch.setattr(logits_of, "input_device", lambda _model: torch.device("cuda"))
    for memory, factor in ((2**33, 1), (80 * 2**30, 4)):
        found = SimpleNamespace(total_memory=memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device, found=found: found)
        assert logits_of.windows_at_once(tiny_model, LENGTH) == pytest.approx(factor * windows, rel=1e-3)
    monkeypatch.setattr(logits_of, "CHECKPOINTED", 1)
    assert logits_of.windows_at_once(tiny_model, LENGTH) == pytest.approx(4 / 3 * windows, rel=1e-3)


def test_documents_that_it_was_healed_on_are_not_for_evaluation(learned: Trained) -> None:
    document = learned.text.read_text("utf-8")
    healed = learned.heal(learned.compressed(), text=gac.Documents([document], length=LENGTH))
    assert healed.gac_plan.healed[0].texts == ("1 document given in memory",)
    said = ["with the same documents" in model_card(one.gac_plan) for one in (learned.compressed(), healed)]
    assert said == [False, True]
    with pytest.raises(TextError, match="are among the plan's calibration text"):
        gac.perplexity(healed, learned.tokenizer, gac.Documents([document]), length=LENGTH, progress=False)


def test_a_healed_plan_applies_as_it_was_made(learned: Trained) -> None:
    healed = learned.heal(learned.compressed())
    fresh = learned.applied(healed.gac_plan)
    assert fresh.gac_plan.healed == ()
    assert torch.equal(logits(fresh), logits(learned.compressed()))


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_a_rate_that_is_too_high_is_refused_and_nothing_is_changed(learned: Trained) -> None:
    small = learned.compressed()
    given = {name: one.clone() for name, one in small.state_dict().items()}
    with pytest.raises(HealingError) as failure:
        learned.heal(small, learning_rate=0.9)
    assert str(failure.value).startswith("loss on text held out that went from 0.")
    assert str(failure.value).endswith(
        "with learning_rate=0.9; expected one that falls. Heal with learning_rate=0.23, for longer, or on more text."
    )
    assert same(small, given)
    assert small.gac_plan.healed == ()


def diverging(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Make the loss of the whole model infinite from a step on."""
    exact, steps = whole.summed_loss, iter(range(10**6))

    def summed(*given: Any) -> Any:
        return exact(*given) * (math.inf if next(steps) >= first else 1.0)

    monkeypatch.setattr(whole, "summed_loss", summed)


def test_a_loss_that_is_not_finite_stops_it_in_the_best_state(learned: Trained, monkeypatch: Any) -> None:
    small = learned.compressed()
    diverging(monkeypatch, first=30)
    with pytest.raises(HealingError) as failure:
        learned.heal(small)
    assert str(failure.value) == (
        "a loss of inf in step 31 of the whole model with learning_rate=0.001; expected finite ones. "
        "Heal with a smaller learning_rate, or in another dtype."
    )
    [record] = small.gac_plan.healed
    assert record.after < record.before
    assert all(bool(one.isfinite().all()) for one in small.state_dict().values() if one.is_floating_point())


def test_a_loss_that_is_never_finite_changes_nothing(learned: Trained, monkeypatch: Any) -> None:
    small = learned.compressed()
    given = {name: one.clone() for name, one in small.state_dict().items()}
    diverging(monkeypatch, first=0)
    with pytest.raises(HealingError, match="a loss of inf in step 1 of the whole model"):
        learned.heal(small, blocks=0.0)
    assert same(small, given)


REFUSED: dict[str, tuple[dict[str, Any], type[GacError], str]] = {
    "two lengths": (
        {"minutes": 5, "tokens": 100},
        GacError,
        "minutes=5 and tokens=100; expected one of the two. Leave one out.",
    ),
    "no time": ({"minutes": 0}, GacError, "minutes=0; expected minutes above 0, up to 525,600, a year. Try 5."),
    "no rate": (
        {"learning_rate": 0.0},
        GacError,
        "learning_rate=0; expected a part of the weights' size, above 0 and below 1. Try 0.002, or leave it out.",
    ),
    "all of it and more": (
        {"blocks": 1.5},
        GacError,
        "blocks=1.5; expected the part of the work that goes to single layers, from 0 to 1. Try 0.1.",
    ),
    "labels alone": (
        {"labels": 1},
        GacError,
        "labels=1; expected the part of the loss that is the text's own tokens, from 0 up to below 1. Try 0.5.",
    ),
    "labels for no step": (
        {"labels": 0.5, "blocks": 1.0},
        GacError,
        "labels=0.5 with blocks=1; expected steps of the whole model, which labels are for. "
        "Ask for a smaller part for single layers, or leave the labels out.",
    ),
    "no seed": ({"seed": -1}, GacError, "seed=-1; expected a seed from 0 up to below 2 ** 32. Try 0."),
    "no step": (
        {"tokens": None, "minutes": 1e-4},
        HealingError,
        "0.0001 minutes with blocks=0.1: no step of the whole model, and layers by themselves won nothing; expected a "
        "loss on text held out that falls. Heal for longer, or with a smaller part for single layers.",
    ),
    "windows longer than its positions": (
        {"text": "self:12x4096"},
        ModelError,
        "windows of 4,096 tokens for a model of 512 positions; expected windows that the model can read. "
        "Ask for a length of at most 512.",
    ),
    "a short text": (
        {"text": gac.Documents(["word " * 100], length=LENGTH)},
        TextError,
        "1 document given in memory has 7 windows of 64 tokens to heal on; expected at least 10, some of which are "
        "held out. Use a longer text, shorter windows, or text='self', which the dense model writes.",
    ),
    "an unknown text": (
        {"text": "wiki-samples"},
        TextError,
        "text 'wiki-samples' is neither known nor a file; expected one of wiki-sample, wikitext2, c4, or a path. "
        "Did you mean 'wiki-sample'?",
    ),
    "an unknown text among several": (
        {"text": ["self:12x64", "wiki-samples"]},
        TextError,
        "text 'wiki-samples' is neither known nor a file; expected one of wiki-sample, wikitext2, c4, or a path. "
        "Did you mean 'wiki-sample'?",
    ),
    "no size": (
        {"text": "self:64"},
        TextError,
        "text 'self:64' is neither known nor a file; expected one of wiki-sample, wikitext2, c4, or a path. "
        "Check the name or the path.",
    ),
    "two lengths of windows": (
        {"text": ["self", "wiki-sample:12x32"]},
        TextError,
        "calibration windows of 32 and 64 tokens; expected one length for all texts. "
        "Give all of them the same: NAME:32x1024.",
    ),
    "one text twice": (
        {"text": ["self", "self:12x64"]},
        TextError,
        "the calibration text self twice; expected each text once. Add up its windows.",
    ),
    "a figure": (
        {"report": "losses.gif"},
        GacError,
        "figure losses.gif ends in '.gif'; expected one of .png, .pdf, .svg. Change the ending.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input(case: str, learned: Trained) -> None:
    options, error, said = REFUSED[case]
    small = learned.compressed()
    before = logits(small)
    with pytest.raises(error) as failure:
        learned.heal(small, **options)
    assert str(failure.value) == said
    assert torch.equal(logits(small), before)


def test_models_that_do_not_belong_together(learned: Trained, tiny_model: Any, tmp_path: Path) -> None:
    small = learned.compressed()
    with pytest.raises(PlanError) as failure:
        learned.heal(small, against=tiny_model)
    assert str(failure.value).startswith("the model's config and weights have digest ")
    with pytest.raises(CheckpointError, match="a LlamaForCausalLM without a plan"):
        learned.heal(copy.deepcopy(tiny_model))
    with pytest.raises(CheckpointError) as none:
        learned.heal(tmp_path)
    assert str(none.value) == (
        f"{tmp_path}, which is no compressed checkpoint; expected a directory that gac.save wrote. "
        "Compress the model first."
    )
    with pytest.raises(GacError, match="which is compressed; expected a dense model"):
        learned.heal(copy.deepcopy(small), against=small)


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def dense(learned: Trained, tmp_path: Path) -> Path:
    learned.model.save_pretrained(tmp_path / "dense")
    learned.tokenizer.save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def test_the_help_says_what_is_done_by_default() -> None:
    said = " ".join(run("heal", "--help").output.split())
    assert f"decoder layers by themselves; {work.BLOCKS:g} by default" in said
    assert f"Wall-clock time, everything counted; {work.MINUTES:g} by default" in said


def test_the_command(learned: Trained, dense: Path, tmp_path: Path, monkeypatch: Any) -> None:
    gac.save(learned.compressed(), tmp_path / "small", tokenizer=learned.tokenizer)
    asked = ("heal", tmp_path / "small", "--against", dense, "--tokens", TOKENS, "--learning-rate", 0.001)
    found = answer(*asked, "-o", tmp_path / "healed", "--report", tmp_path / "losses.svg")
    assert found["healed"]["after"] < found["healed"]["before"]
    assert found["directory"] == str(tmp_path / "healed")
    assert "KL(dense || healed), nats a token" in (tmp_path / "losses.svg").read_text("utf-8")
    healed = gac.load(tmp_path / "healed", device="cpu")
    assert healed.gac_plan.healed[0].tokens == found["healed"]["tokens"]
    assert "divergence from the dense model" in healed.gac_plan.summary()
    assert run("verify", tmp_path / "healed").exit_code == 0
    said = refused(*asked[:-1], 0.2, "-o", tmp_path / "worse")
    assert "Error: loss on text held out that went from" in said
    assert not (tmp_path / "worse").exists()
    diverging(monkeypatch, first=30)
    said = refused(*asked, "-o", tmp_path / "stopped")
    assert "Error: a loss of inf in step 31 of the whole model" in said
    assert gac.load(tmp_path / "stopped", device="cpu").gac_plan.healed


def test_the_command_takes_several_texts(learned: Trained, dense: Path, tmp_path: Path) -> None:
    gac.save(learned.compressed(), tmp_path / "small", tokenizer=learned.tokenizer)
    asked = ("heal", tmp_path / "small", "--against", dense, "--tokens", TOKENS, "--learning-rate", 0.001)
    own = f"self:12x{LENGTH}"
    found = answer(*asked, "--text", learned.text, "--text", own, "-o", tmp_path / "healed")
    assert found["healed"]["texts"] == [str(learned.text), own]
    again = gac.load(tmp_path / "healed", device="cpu").gac_plan
    assert f"--text {learned.text} --text {own} --tokens {TOKENS} " in apply_commands(again)[-1]
    said = refused(*asked, "--text", "notes.md", "--text", "more.md", "-o", tmp_path / "other")
    assert "Error: text 'notes.md' is neither known nor a file" in said


def test_the_report_of_a_healed_plan_says_so(learned: Trained, tmp_path: Path) -> None:
    plan = learned.heal(learned.compressed()).gac_plan
    page = tmp_path / "plan.html"
    gac.report(plan, page)
    assert "After that the model was healed on" in page.read_text("utf-8")


def test_an_adapter_learns_on_top_of_a_healed_model(learned: Trained, tmp_path: Path) -> None:
    lora = pytest.importorskip("peft", exc_type=ImportError)
    healed = learned.heal(learned.compressed())
    adapted = lora.get_peft_model(healed, lora.LoraConfig(r=4, target_modules=["first", "second"]))
    optimizer = torch.optim.Adam((one for one in adapted.parameters() if one.requires_grad), lr=1e-2)
    ids, losses = torch.arange(40).reshape(2, 20), []
    for _ in range(3):
        loss = adapted(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[0] > losses[1] > losses[2]
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    again = gac.load(tmp_path / "merged", device="cpu")
    assert torch.equal(logits(again), logits(merged))
    assert again.gac_plan.healed

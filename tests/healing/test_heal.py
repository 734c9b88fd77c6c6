"""Healing brings a compressed model nearer to the dense one, keeps its structure, and is recorded in its plan."""

import copy
import itertools
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trained import LENGTH, TOKENS, Trained

import gac
from gac import api
from gac.checkpoint.card import model_card
from gac.core.distributed.ranks import ALONE
from gac.core.errors import CheckpointError, GacError, HealingError, ModelError, PlanError, TextError
from gac.core.io import home
from gac.healing import heal, layerwise, optimizer, whole_model
from gac.healing import run as run_module
from gac.healing.records import LossPoint
from gac.healing.trainables import Trainables
from gac.measurement import own_text, session
from gac.measurement.openings import OPENINGS
from gac.plan.summary import apply_commands
from tests.cli.commands import answer, refused, run
from tests.compression.applying import logits, losses_of_three_steps
from tests.small_pipeline import has_state, state_of

PLANS: dict[str, dict[str, Any]] = {
    "low rank": {},
    "narrow, fused": {"forms": ("narrow", "head_dim"), "budget": 0.6, "refit": "none", "fuse": True},
    "2 bits, rotated, fused": {"schemes": ("w2a16:32",), "budget": 1.0, "rotate": True, "fuse": True},
}


def shapes(model: Any) -> dict[str, tuple[Any, ...]]:
    return {name: (tuple(values.shape), values.dtype) for name, values in model.state_dict().items()}


@pytest.mark.parametrize("case", PLANS)
def test_healing_lowers_the_loss_and_keeps_forms_and_bytes(case: str, learned: Trained, tmp_path: Path) -> None:
    small = learned.compressed(**PLANS[case])
    plan, before, state = small.gac_plan, shapes(small), state_of(small)
    healed = learned.heal(small)
    assert healed is small
    [record] = healed.gac_plan.healed
    assert record.after < record.before
    assert (record.window_tokens, record.seed, record.texts) == (LENGTH, 0, (str(learned.text),))
    assert 0.8 * TOKENS < record.tokens < 1.4 * TOKENS
    assert shapes(healed) == before
    assert not has_state(healed, state)
    assert replace(healed.gac_plan, healed=()) == plan
    assert not any(parameter.requires_grad for parameter in healed.parameters()) or not healed.training
    gac.save(healed, tmp_path / "healed", tokenizer=learned.tokenizer)
    loaded = gac.load(tmp_path / "healed", device=str(healed.device))
    assert torch.equal(logits(loaded), logits(healed))
    assert loaded.gac_plan == healed.gac_plan
    card = (tmp_path / "healed" / "README.md").read_text("utf-8")
    assert f"gac heal DIR --against 'LlamaForCausalLM in memory' --text {learned.text}" in card
    if case == "low rank":
        assert torch.equal(logits(learned.applied(healed.gac_plan)), logits(learned.compressed(**PLANS[case])))
        gac.report(healed.gac_plan, tmp_path / "plan.html")
        assert "divergence from the dense model" in (tmp_path / "plan.html").read_text("utf-8")


def test_a_16_bit_model_keeps_its_dtype(learned: Trained) -> None:
    narrow = replace(learned, model=copy.deepcopy(learned.model).to(torch.bfloat16), _compressed={})
    healed = narrow.heal(narrow.compressed())
    [record] = healed.gac_plan.healed
    assert record.after < record.before
    assert {parameter.dtype for parameter in healed.parameters()} == {torch.bfloat16}


def test_the_trained_model_is_the_stored_model(learned: Trained) -> None:
    small = learned.compressed(**PLANS["2 bits, rotated, fused"])
    for change in (0.0, 0.3):  # relative to a weight's size, far more than a step
        before, state, weights = logits(small), state_of(small), small.gac_plan.weights
        trained = Trainables(small, weights, {choice.name for choice in weights if choice.changed})
        for name, master in trained.parameters.items():
            if name.endswith(("weight", "factor")):
                noise = torch.randn(master.shape, generator=torch.Generator().manual_seed(0))
                master.data += change * master.std() * noise
        inside = logits(small)
        trained.close(changed=True)
        torch.testing.assert_close(logits(small), inside)
        assert has_state(small, state) == (change == 0)
        if change == 0:
            torch.testing.assert_close(inside, before)


def test_the_seed_decides_the_bits(learned: Trained) -> None:
    again, other = (logits(learned.heal(learned.compressed(), seed=seed)) for seed in (0, 1))
    first = logits(learned.healed())
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not list((home() / "healing").glob("*"))


def test_dense_weights_are_trained_on_request(learned: Trained) -> None:
    small = learned.compressed()
    weights = {c.name: small.get_submodule(c.name).weight.clone() for c in small.gac_plan.weights if not c.changed}
    assert weights
    small = learned.healed()
    assert all(torch.equal(small.get_submodule(name).weight, before) for name, before in weights.items())
    first, second = learned.heal(small, dense=True, learning_rate=5e-4).gac_plan.healed
    assert not any(torch.equal(small.get_submodule(name).weight, before) for name, before in weights.items())
    assert (first.dense, second.dense) == (False, True)
    assert second.before == pytest.approx(first.after, rel=1e-4)


def test_an_overfitted_run_restores_the_best_and_cools(learned: Trained, monkeypatch: Any) -> None:
    small, scales, evaluations = learned.compressed(), [], []
    losses = iter([1.0, 0.5, 0.6, 0.7, 0.6, 0.7, 0.6, 0.6, 0.6, 0.4])  # start, best, four worse, then four more
    step, evaluate = optimizer.RelativeAdamW.step, run_module.DistillationRun.evaluate_heldout

    def counted_step(self: Any, loss: torch.Tensor, scale: float, where: str) -> float:
        scales.append(scale)
        step(self, loss, scale, where)
        return 1 / len(scales)  # the training loss always falls

    def counted_evaluation(self: Any) -> float:
        evaluations.append((len(scales), self.trainables.snapshot()))
        return evaluate(self)

    monkeypatch.setattr(run_module.DistillationRun, "_heldout_loss", lambda _self: next(losses))
    monkeypatch.setattr(optimizer.RelativeAdamW, "step", counted_step)
    monkeypatch.setattr(run_module.DistillationRun, "evaluate_heldout", counted_evaluation)
    monkeypatch.setattr(whole_model, "BATCH", LENGTH)
    monkeypatch.setattr(whole_model, "EVALUATED", 1.0)
    [record] = learned.heal(small, blocks=0.0, tokens=200 * LENGTH).gac_plan.healed
    steps, snapshots = zip(*evaluations, strict=True)
    assert steps == pytest.approx([10, 20, 30, 40, 50, 55, 60, 65, 70], abs=1)
    assert record.tokens == steps[-1] * LENGTH
    assert scales[50:] == sorted(scales[50:], reverse=True)
    assert scales[-1] < 0.1 < scales[50]
    before, after = (
        sum(float((values - snapshots[0][name]).abs().sum()) for name, values in snapshots[i].items()) for i in (4, 5)
    )
    assert after < before  # the best snapshot was restored


def test_overfitting() -> None:
    for train, heldout, expected in (
        ("9 8 7 6 5", "9 5 6 6 6", False),  # three evaluations since the best
        ("9 8 7 6 5 4", "9 5 6 6 6 6", True),
        ("9 8 9 9 9 9", "9 5 6 6 6 6", False),  # steps are too large: nothing gets better
        ("5 4 3 2 1 0", "nan 8 7 6 5 4", False),
        ("", "", False),
    ):
        losses = zip(map(float, train.split()), map(float, heldout.split()), strict=True)
        curve = [LossPoint("blocks", 0, 0, 0.0, 99.0, 0.0), *(LossPoint("model", 1, 1, 1.0, *pair) for pair in losses)]
        assert whole_model.is_overfitted(curve) == expected, train


@pytest.mark.parametrize(
    ("blocks", "tokens"), [(0.0, (LENGTH, whole_model.BATCH)), (1.0, (8 * LENGTH, layerwise.BATCH))]
)
def test_each_phase_alone_improves_at_the_rate_of_its_batch(
    blocks: float, tokens: tuple[int, int], learned: Trained, monkeypatch: Any
) -> None:
    rates, init = set(), optimizer.RelativeAdamW.__init__

    def recorded(self: Any, parameters: Any, rms: Any, rate: float, ranks: Any) -> None:
        rates.add(rate)
        init(self, parameters, rms, rate, ranks)

    monkeypatch.setattr(optimizer.RelativeAdamW, "__init__", recorded)
    [record] = learned.heal(learned.compressed(), blocks=blocks, tokens=64 * LENGTH).gac_plan.healed
    assert rates == {optimizer.rate_for_batch(1e-3, *tokens)}
    assert record.after < record.before
    assert record.blocks == blocks


def test_labels_teach_the_text(learned: Trained) -> None:
    words = learned.tokenizer(learned.text.read_text(), add_special_tokens=False)["input_ids"]
    ids, results = torch.tensor(words[: len(words) // LENGTH * LENGTH]).view(-1, LENGTH), {}
    for labels in (0.0, 0.5):
        small = learned.heal(learned.compressed(), labels=labels) if labels else learned.healed()
        [record] = small.gac_plan.healed
        assert record.labels == labels
        results[labels] = float(small(input_ids=ids, labels=ids).loss.detach()), record.after
    assert results[0.5][0] < results[0.0][0]
    assert results[0.5][1] > results[0.0][1]  # and it drifts from the dense model


def test_a_drift_from_the_dense_model_is_logged(learned: Trained, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(whole_model, "LABELS_START", 0.0)
    first, second = learned.heal(learned.healed(), labels=0.9, learning_rate=1e-2, dense=True).gac_plan.healed
    assert second.after > second.before == pytest.approx(first.after, rel=1e-3)
    assert "the model drifts from the dense model: labels=0.9" in caplog.text


def test_the_minutes_are_kept(learned: Trained, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    clock = SimpleNamespace(monotonic=partial(next, itertools.count(1.0)))  # an evaluation takes as long as a step
    monkeypatch.setattr(whole_model, "BATCH", 16 * LENGTH)
    for module in (api, heal, layerwise, optimizer, run_module, whole_model):
        monkeypatch.setattr(module, "time", clock)
    with caplog.at_level("INFO", logger="gac"):
        [record] = learned.heal(learned.compressed(), minutes=3).gac_plan.healed
    assert record.after < record.before
    [minutes] = re.findall(r"healed in ([\d.]+) minutes", caplog.text)
    assert 0.8 * 3 < float(minutes) < 1.05 * 3
    assert "tokens a second" in caplog.text


def test_sampled_text_is_kept_on_disk(learned: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"self:12x{LENGTH}"
    first = learned.heal(learned.compressed(), text=text)
    [record] = first.gac_plan.healed
    assert (record.texts, record.windows + record.held, record.bos) == ((text,), 12, True)
    assert len(list((home() / "own-text").iterdir())) == 1
    monkeypatch.setattr(own_text, "sample", None)  # nothing is sampled again
    assert torch.equal(logits(learned.heal(learned.compressed(), text=text)), logits(first))


def test_a_plan_is_calibrated_on_text_that_the_model_writes_and_compressed_on_the_same(
    learned: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"{learned.text}:4x{LENGTH}", f"self:3x{LENGTH}"]
    options = {"tokenizer": learned.tokenizer, "profile": "nvidia-h100-80gb-hbm3", "progress": False}
    plan = gac.allocate(learned.model, 0.5, calibration=texts, latency="any", **options)
    calibration = plan.measured.calibration
    assert [(part.text, part.windows) for part in calibration.parts] == [(str(learned.text), 4), ("self", 3)]
    monkeypatch.setattr(own_text, "sample", None)  # nothing is sampled again
    assert learned.applied(plan).gac_plan.measured.calibration == calibration
    with pytest.raises(TextError, match="text 'self', which the dense model writes; expected text that others wrote"):
        gac.evaluate(learned.model, tokenizer=learned.tokenizer, text="self", progress=False)


def test_calibration_text_begins_with_openings_of_many_kinds(learned: Trained) -> None:
    tokenizer = copy.deepcopy(learned.tokenizer)
    plain = own_text.openings(tokenizer, 7)
    assert len(plain) == len(OPENINGS)
    assert all(start.ids[0] == 7 and not start.reply for start in plain)
    tokenizer.chat_template = "Q{{ messages[0].content }}</s>{% if add_generation_prompt %}A{% endif %}"
    mixed = own_text.openings(tokenizer, None)
    [chat] = {start for start in mixed if start.reply}
    assert chat == own_text.starts_of(tokenizer)[-1]
    assert [start.reply != () for start in mixed[:8]] == [False, False, False, True] * 2
    assert [(7, *start.ids) for start in mixed if not start.reply] == [start.ids for start in plain]


def test_text_that_is_none_is_told_from_text() -> None:
    ids = torch.randint(10, 1000, (3, 64), generator=torch.Generator().manual_seed(0))
    assert own_text.flaw_of(ids, [2], [0, 1, 2]) is None
    repeated = own_text.flaw_of(ids[:, :1].expand(3, 64), [2], [0, 1, 2])
    assert repeated == "98% of its sequences of four tokens are repeated"
    assert (
        own_text.flaw_of(torch.where(torch.arange(64) % 3 > 0, 1, ids), [2], [0, 1]) == "66% of its tokens are special"
    )
    ended = torch.where(torch.arange(200) % 2 == 0, 2, torch.arange(200)).expand(3, 200)
    assert own_text.flaw_of(ended, [2], [0, 1]) == "its documents have 2.0 tokens"


def test_by_default_a_model_that_writes_no_text_is_calibrated_on_wikipedia_alone(
    learned: Trained, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    short = (f"{learned.text}:2x{LENGTH}", f"self:2x{LENGTH}")
    monkeypatch.setattr(session, "DEFAULT_TEXT", short)
    monkeypatch.setattr(session, "DEFAULT_TEXT_ON_A_CPU", (f"{learned.text}:3x{LENGTH}", f"self:1x{LENGTH}"))
    monkeypatch.setattr(own_text, "sample", lambda _model, _starts, count, *_: torch.zeros(count, LENGTH).long())
    options = {"tokenizer": learned.tokenizer, "profile": "nvidia-h100-80gb-hbm3", "progress": False}
    plan = gac.allocate(learned.model, 0.5, calibration=list(short), latency="any", **options)
    assert plan.recipe.measure.text == f"{learned.text}:4x{LENGTH}"
    assert plan.measured.calibration.text == str(learned.text)
    assert "the dense model writes no text" in caplog.text
    monkeypatch.setattr(session, "DEFAULT_TEXT", ("wiki-sample",))
    with pytest.raises(TextError, match=r"text 'self' of a dense model that writes none: .* tokens are repeated"):
        gac.allocate(learned.model, 0.5, calibration=list(short), latency="any", **options)


def test_a_chat_template_makes_the_model_answer(learned: Trained) -> None:
    tokenizer, end = copy.deepcopy(learned.tokenizer), learned.tokenizer.eos_token_id
    tokenizer.chat_template = "Q{{ messages[0].content }}</s>{% if add_generation_prompt %}A{% endif %}"
    bos, chat = own_text.starts_of(tokenizer)
    [question, reply] = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in "QA")
    assert (bos.ids, chat) == ((tokenizer.bos_token_id,), own_text.Start((*question,), (end, *reply)))
    sampled = [-1, 7, end, 0, 8, end, 0, 9, end]  # a token is dropped where others are forced
    for start, expected in (
        (bos, [*bos.ids, 7, end, *bos.ids, 8, end, *bos.ids, 9, end]),
        (chat, [*question, 7, end, *reply, 8, end, *question, 9, end]),
    ):
        writer = own_text.Writer(itertools.repeat(start))
        assert [writer.next_token(token, [end]) for token in sampled] == expected


def test_sampled_text_is_likely(learned: Trained) -> None:
    bos = learned.tokenizer.bos_token_id
    ids = own_text.sample(learned.model, [own_text.Start((bos,))], 3, LENGTH, 0, None, show_progress=False)
    windows = ids.view(3, LENGTH)
    assert (windows[:, 0] == bos).all()
    with torch.no_grad():
        chances = learned.model(input_ids=windows).logits[:, :-1].softmax(-1).gather(-1, windows[:, 1:, None])
    assert chances.log().mean() > math.log(10 / learned.model.config.vocab_size)  # far more likely than by chance
    headed = own_text.sample(learned.model, [own_text.Start((bos,))], 3, LENGTH, 0, bos, show_progress=False)
    assert torch.equal(headed.view(3, LENGTH - 1), windows[:, 1:])


@pytest.mark.parametrize("headed", [False, True])
def test_pieces_of_a_window_are_written_at_once(learned: Trained, headed: bool) -> None:
    bos = learned.tokenizer.bos_token_id
    starts = [own_text.Start((bos, 5)), own_text.Start((bos, 6))]
    ids = own_text.sample(learned.model, starts, 2, 13, 0, bos if headed else None, show_progress=False, pieces=3)
    for row, opening in zip(ids.view(2, 13 - headed), (5, 6), strict=True):
        begins = range(0, 12, 4) if headed else range(1, 13, 5)  # BOS is put before windows later
        assert [int(row[at]) for at in begins] == [opening] * 3


def test_the_batch_size_does_not_change_the_sample(tiny_model: Any, monkeypatch: Any) -> None:
    starts, samples = [own_text.Start((256,)), own_text.Start((5, 6), (7, 8))], []
    for size, seed in ((1, 0), (3, 0), (3, 1)):
        monkeypatch.setattr(own_text, "batch_size", lambda _model, _length, size=size: size)
        samples.append(own_text.sample(tiny_model, starts, 3, LENGTH, seed, None, show_progress=False))
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[1], samples[2])
    assert len({tuple(row[2:].tolist()) for row in samples[0].view(3, LENGTH)}) == 3


def test_spare_windows_change_no_others(learned: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    count, spare = 3, 4
    sampled = partial(
        own_text.sampled_windows, learned.model, learned.tokenizer, "digest", 0, ALONE, False, count, LENGTH
    )
    alone = sampled()
    monkeypatch.setattr(own_text, "_spare", lambda *_: spare)
    both = sampled()
    assert alone.spare is None
    assert torch.equal(both.ids, alone.ids)
    assert both.digest == alone.digest
    assert both.spare is not None
    assert both.spare.shape == (spare, LENGTH)
    assert len({tuple(row.tolist()) for row in torch.cat([both.ids, both.spare])}) == count + spare


def test_tokens_are_sampled_by_their_probability() -> None:
    chances = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.25, 0.0])
    tokens = own_text.sample_tokens(chances.log().expand(1000, -1), torch.arange(1000) / 1000)
    assert tokens.bincount(minlength=6).tolist() == [0, 500, 0, 250, 250, 0]
    edges = torch.tensor([0.0, 1 - 2**-24, 1.0])  # rounding never gives an impossible token
    assert own_text.sample_tokens(chances.log().expand(3, -1), edges).tolist() == [1, 4, 1]
    many = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(0))
    many[:, 25_000:] = -torch.inf
    assert (own_text.sample_tokens(many, edges[1:]) < 25_000).all()


def test_documents_of_healing_are_refused_for_evaluation(learned: Trained) -> None:
    document = learned.text.read_text("utf-8")
    healed = learned.heal(learned.compressed(), text=gac.Documents([document], length=LENGTH))
    assert healed.gac_plan.healed[0].texts == ("1 document given in memory",)
    cards = [model_card(model.gac_plan) for model in (learned.compressed(), healed)]
    assert ["with the same documents" in card for card in cards] == [False, True]
    with pytest.raises(TextError, match="calibration text"):
        gac.perplexity(healed, learned.tokenizer, gac.Documents([document]), length=LENGTH, progress=False)


def diverging(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Make the loss of the whole model infinite from a step on."""
    exact, steps = whole_model.summed_loss, iter(range(10**6))

    def summed(*inputs: Any) -> Any:
        return exact(*inputs) * (math.inf if next(steps) >= first else 1.0)

    monkeypatch.setattr(whole_model, "summed_loss", summed)


@pytest.mark.parametrize(
    ("options", "infinite", "message"),
    [
        ({"learning_rate": 0.9}, False, r"learning_rate=0\.9; expected a decreasing held-out loss"),
        ({"blocks": 0.0}, True, "a loss of inf in step 1 of the whole model"),
    ],
)
def test_a_rate_that_is_too_high_and_a_loss_that_is_never_finite_change_nothing(
    options: dict[str, Any], infinite: bool, message: str, learned: Trained, monkeypatch: Any
) -> None:
    small = learned.compressed()
    state = state_of(small)
    if infinite:
        diverging(monkeypatch, first=0)
    with pytest.raises(HealingError, match=message):
        learned.heal(small, **options)
    assert has_state(small, state)
    assert small.gac_plan.healed == ()


def test_a_loss_that_is_not_finite_ends_in_the_best_snapshot(learned: Trained, monkeypatch: Any) -> None:
    small = learned.compressed()
    diverging(monkeypatch, first=20)
    with pytest.raises(HealingError, match="a loss of inf in step 21 of the whole model"):
        learned.heal(small)
    [record] = small.gac_plan.healed
    assert record.after < record.before
    assert all(bool(values.isfinite().all()) for values in small.state_dict().values() if values.is_floating_point())


REFUSED: list[tuple[dict[str, Any], type[GacError], str]] = [
    ({"minutes": 5, "tokens": 100}, GacError, "minutes=5 and tokens=100"),
    ({"minutes": 0}, GacError, "minutes=0"),
    ({"blocks": 1.5}, GacError, "blocks=1.5"),
    ({"labels": 0.5, "blocks": 1.0}, GacError, "labels=0.5 with blocks=1"),
    ({"tokens": None, "minutes": 1e-4}, HealingError, "0.0001 minutes with blocks=0.1"),
    ({"text": "self:12x4096"}, ModelError, "windows of 4,096 tokens for a model of 512 positions"),
    ({"text": gac.Documents(["word " * 100], length=LENGTH)}, TextError, "has 7 windows of 64 tokens"),
    ({"text": ["self:12x64", "wiki-samples"]}, TextError, "text 'wiki-samples' is neither known nor a file"),
    ({"text": ["self", "wiki-sample:12x32"]}, TextError, "calibration windows of 32 and 64 tokens"),
    ({"report": "losses.gif"}, GacError, "losses.gif"),
]


@pytest.mark.parametrize(("options", "error", "problem"), REFUSED)
def test_bad_input(options: dict[str, Any], error: type[GacError], problem: str, learned: Trained) -> None:
    small = learned.compressed()
    before = logits(small)
    with pytest.raises(error) as failure:
        learned.heal(small, **options)
    assert problem in failure.value.given
    assert torch.equal(logits(small), before)


def test_models_that_do_not_belong_together(learned: Trained, tiny_model: Any, tmp_path: Path) -> None:
    small = learned.compressed()
    with pytest.raises(PlanError, match="digest"):
        learned.heal(small, against=tiny_model)
    with pytest.raises(CheckpointError, match="a LlamaForCausalLM without a plan"):
        learned.heal(copy.deepcopy(tiny_model))
    with pytest.raises(CheckpointError, match="no compressed checkpoint"):
        learned.heal(tmp_path)
    with pytest.raises(GacError, match="which is compressed; expected a dense model"):
        learned.heal(copy.deepcopy(small), against=small)


def test_the_command(learned: Trained, tmp_path: Path, monkeypatch: Any) -> None:
    command = learned.command(tmp_path)
    texts = ("--text", learned.text, "--text", f"self:12x{LENGTH}")
    document = answer(*command, *texts, "-o", tmp_path / "healed", "--report", tmp_path / "losses.svg")
    assert document["healed"]["after"] < document["healed"]["before"]
    assert document["directory"] == str(tmp_path / "healed")
    assert document["healed"]["texts"] == [str(learned.text), f"self:12x{LENGTH}"]
    assert "KL(dense || healed), nats a token" in (tmp_path / "losses.svg").read_text("utf-8")
    plan = gac.load(tmp_path / "healed", device="cpu").gac_plan
    assert plan.healed[0].tokens == document["healed"]["tokens"]
    assert "divergence from the dense model" in plan.summary()
    assert f"--text {learned.text} --text self:12x{LENGTH} --tokens {TOKENS} " in apply_commands(plan)[-1]
    assert run("verify", tmp_path / "healed").exit_code == 0
    diverging(monkeypatch, first=20)
    message = refused(*command, "-o", tmp_path / "stopped")
    assert "Error: a loss of inf in step 21 of the whole model" in message
    assert gac.load(tmp_path / "stopped", device="cpu").gac_plan.healed


def test_an_adapter_learns_on_top_of_a_healed_model(learned: Trained, tmp_path: Path) -> None:
    lora = pytest.importorskip("peft", exc_type=ImportError)
    healed = learned.healed()
    adapted = lora.get_peft_model(healed, lora.LoraConfig(r=4, target_modules=["first", "second"]))
    losses = losses_of_three_steps(adapted)
    assert losses[0] > losses[1] > losses[2]
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    loaded = gac.load(tmp_path / "merged", device="cpu")
    assert torch.equal(logits(loaded), logits(merged))
    assert loaded.gac_plan.healed

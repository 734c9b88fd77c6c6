"""``head="w8a16"``: embedding and head in 8 bits, from the allocation to the checkpoint."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

import gac
from gac.allocation.frontier import Frontier
from gac.core.errors import CheckpointError, ModelError, PlanError
from gac.measurement.embeddings import quantised_embeddings
from gac.measurement.texts import planned_windows
from gac.models.loading import load_model
from gac.plan.evidence import RoundedHead
from gac.plan.plan import Plan
from gac.plan.summary import allocate_command
from gac.runtime.header import replace_weights
from gac.runtime.storage.embeddings import StoredEmbedding, StoredHead, TiedHead
from gac.runtime.storage.modules import count_parameters
from gac.schemes import scheme_named
from tests.changed import edited, with_measured, with_recipe
from tests.cli.commands import run
from tests.compression.applying import IDS, divergence, logits
from tests.compression.compressed import MakePlan
from tests.compression.ends import with_rounded_ends
from tests.models.small import every_layout, small_config, small_model
from tests.small_pipeline import Small

ROWS, COLUMNS = 258, 64
GIVEN: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(IDS)}


def small_llama(tied: bool, **changed: Any) -> Any:
    config = small_config("llama", tie_word_embeddings=tied, **changed)
    config.dtype = torch.bfloat16
    return small_model(config)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def asked(request: pytest.FixtureRequest, small: Small) -> Small:
    """The pipeline on a model of 16 bits, with a tied head and with one of its own."""
    return Small(small_llama(request.param, num_hidden_layers=1), small.tokenizer, small.text)


def head_of(plan: Plan) -> RoundedHead:
    assert plan.measured.head is not None
    return plan.measured.head


def held(folder: Path) -> int:
    """Bytes of all tensors of a checkpoint but ``weight_shape``, which says sizes alone."""
    tensors = load_file(folder / "model.safetensors").items()
    return sum(tensor.nbytes for name, tensor in tensors if not name.endswith("weight_shape"))


def test_summaries_in_few_bits_say_that_embedding_and_head_are_left_at_16(asked: Small) -> None:
    hint = "embedding, head and norms, on which no limit works"
    for head, is_said in (("bf16", True), ("w8a16", False)):
        plan = asked.allocate(None, memory=0.3, schemes=("w2a16:32",), forms=(), rotate=False, head=head)
        assert (hint in plan.summary()) == is_said


def test_the_files_hold_what_the_plan_says(asked: Small, tmp_path: Path) -> None:
    plan = asked.allocate(None, memory=0.6, schemes=("w8a16", "w4a16:32"), forms=(), rotate=False, head="w8a16")
    parameters = count_parameters(asked.model)
    ours, again = asked.there_and_back(plan, tmp_path)
    verified = gac.verify(tmp_path / "small")
    assert held(tmp_path / "small") == plan.model_bytes[0] == verified.planned_bytes
    assert verified.planned_bytes + verified.shape_bytes == verified.bytes
    assert ": as in the files" in run("verify", tmp_path / "small").output
    assert torch.equal(again.generate(IDS, **GIVEN), ours.generate(IDS, **GIVEN))
    assert isinstance(ours.lm_head, StoredHead) == (len(head_of(plan).shapes) == 2)
    assert count_parameters(ours) == parameters == plan.measured.params
    elsewhere: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype="auto")
    assert torch.equal(logits(elsewhere), logits(ours))


def test_what_it_loses_is_in_the_prediction(asked: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, plan = asked.allocate(0.8), asked.allocate(0.8, head="w8a16")
    head = head_of(plan)
    assert head.loss > 0
    assert plan.prediction.head == head.loss
    assert plan.prediction.loss == pytest.approx(plain.prediction.loss + head.loss)
    assert plan.prediction.summed == pytest.approx(plain.prediction.summed)
    assert plan.prediction.perplexity > plain.prediction.perplexity
    assert plan.certificate == plain.certificate
    assert plan.bits[1] < plain.bits[1]
    assert f"in w8a16: {head.bytes:,} of {head.dense_bytes:,} bytes" in plan.summary()
    assert "--head w8a16" in allocate_command(plan)
    assert "--head" not in allocate_command(plain)
    assert "embedding and head" not in plain.summary()
    monkeypatch.setattr("gac.measurement.embeddings.quantised_embeddings", pytest.fail)  # the price is kept
    assert asked.allocate(0.8, head="w8a16") == plan


@pytest.mark.parametrize("refit", ["none", "residual"])
def test_the_price_is_the_divergence_and_layers_make_up_for_it(asked: Small, refit: Any) -> None:
    plan = asked.allocate(1.0, forms=(), head="w8a16", refit=refit)
    ids = planned_windows(plan, load_model(asked.model, asked.tokenizer)).ids
    before = asked.model.state_dict()["model.layers.0.mlp.down_proj.weight"].clone()
    with torch.no_grad():
        dense = asked.model(input_ids=ids).logits.float()
        ours = asked.compress(plan)(input_ids=ids).logits.float()
    after = asked.model.state_dict()["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(before, after) == (refit == "none")
    lost = divergence(dense, ours)
    assert lost < 1e-3
    if refit == "none":
        assert head_of(plan).loss == pytest.approx(lost, rel=0.05)


def test_rows_that_are_rounded_in_parts_are_those_rounded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, scheme = small_llama(True), scheme_named("w8a16")
    whole = quantised_embeddings(model, scheme)
    monkeypatch.setattr("gac.measurement.embeddings.ROWS", 100)
    for name, module in quantised_embeddings(model, scheme).items():
        for buffer, found in module.named_buffers():
            assert torch.equal(found, whole[name].get_buffer(buffer))


def test_a_frontier_counts_it_at_every_point(asked: Small, tmp_path: Path) -> None:
    options: dict[str, Any] = {"points": 4, "limit": "bytes", "schemes": ("bf16", "w8a16", "w4a16:32"), "forms": ()}
    plain, found = asked.frontier(**options), asked.frontier(**options, head="w8a16")
    lost = found.measured.lost_by_head
    assert lost > 0
    for before, point in zip(plain.points, found.points, strict=True):
        assert point.loss == pytest.approx(before.loss + lost)
        assert point.perplexity > before.perplexity
    found.save(tmp_path / "frontier.json")
    assert Frontier.load(tmp_path / "frontier.json") == found
    plan = found.plan(0)
    assert plan.prediction.head == lost
    assert plan.prediction.loss == pytest.approx(found.points[0].loss)


@every_layout
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_it_is_saved_loaded_and_generates(model_type: str, tied: bool, make_plan: MakePlan, tmp_path: Path) -> None:
    config = small_config(model_type, tie_word_embeddings=tied)
    config.dtype = torch.bfloat16
    dense = small_model(config)
    model = with_rounded_ends(copy.deepcopy(dense), make_plan)
    assert len(model.gac_plan.measured.head.shapes) == (1 if tied else 2)
    assert (logits(model) - logits(dense)).abs().max() < 0.05 * logits(dense).abs().max()
    gac.save(model, tmp_path / "saved")
    beside = {*dense.state_dict()} - {name for name, _ in dense.named_parameters(remove_duplicate=False)}  # xIELU's
    assert held(tmp_path / "saved") == model.gac_plan.model_bytes[0] + 2 * len(beside)
    loaded = gac.load(tmp_path / "saved", device="cpu")
    assert loaded.config.tie_word_embeddings == tied
    assert torch.equal(logits(loaded), logits(model))
    assert torch.equal(loaded.generate(IDS, **GIVEN), model.generate(IDS, **GIVEN))
    gac.export(tmp_path / "saved", tmp_path / "merged", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (merged.get_input_embeddings().weight is merged.get_output_embeddings().weight) == tied
    assert merged.num_parameters() == dense.num_parameters()
    assert torch.equal(merged(IDS).logits, model(IDS).logits)


def test_what_is_looked_up_is_what_an_embedding_of_those_numbers_gives(make_plan: MakePlan) -> None:
    for model_type, dtype in (("llama", torch.bfloat16), ("gemma3_text", torch.float32)):
        config = small_config(model_type)
        plain: Any = small_model(config).get_input_embeddings()
        rounded = with_rounded_ends(small_model(config), make_plan).to(dtype).get_input_embeddings()
        plain.weight.data = rounded.values(dtype)
        assert rounded(IDS).dtype == dtype
        assert torch.equal(rounded(IDS), plain(IDS))


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, make_plan: MakePlan) -> Any:
    return with_rounded_ends(small_llama(request.param), make_plan)


@pytest.fixture
def saved(model: Any, tmp_path: Path) -> Path:
    gac.save(model, tmp_path / "saved")
    return tmp_path / "saved"


def test_a_tied_head_has_no_tensors_of_its_own_and_no_vocabulary_is_resized(model: Any, saved: Path) -> None:
    names = {name for name in load_file(saved / "model.safetensors") if "embed_tokens" in name or "lm_head" in name}
    tied = isinstance(model.lm_head, TiedHead)
    ends = ["model.embed_tokens"] if tied else ["model.embed_tokens", "lm_head"]
    assert names == {f"{one}.weight_{what}" for one in ends for what in ("packed", "scale", "shape")}
    other = copy.deepcopy(model)
    if tied:
        assert other.lm_head._link[0] is other.model.embed_tokens
    assert torch.equal(logits(other), logits(model))
    for one in (model, gac.load(saved), AutoModelForCausalLM.from_pretrained(saved)):
        with pytest.raises(ValueError, match="embedding and head are in w8a16; expected them in 16 or 32 bits to res"):
            one.resize_token_embeddings(ROWS + 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_another_dtype_leaves_what_is_stored_as_it_is(model: Any, saved: Path, dtype: torch.dtype) -> None:
    before = dict(model.model.embed_tokens.tensors)
    for other in (gac.load(saved, device="cpu", dtype=dtype), gac.load(saved, device="cpu").to(dtype)):
        assert all(torch.equal(one, before[name]) for name, one in other.model.embed_tokens.tensors.items())
        assert logits(other).dtype == dtype
        assert (logits(other) - logits(model)).abs().max() < 0.05 * logits(model).abs().max()


def test_it_opens_without_a_head_and_ties_again(model: Any, saved: Path) -> None:
    inner: Any = AutoModel.from_pretrained(saved)
    assert isinstance(inner.embed_tokens, StoredEmbedding)
    assert torch.equal(inner(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
    loaded: Any = gac.load(saved, device="cpu")
    loaded.tie_weights()
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(saved.parent / "again")
    assert held(saved.parent / "again") == held(saved)


def test_a_model_that_is_not_the_plans(model: Any, tmp_path: Path) -> None:
    model.set_input_embeddings(nn.Embedding(ROWS, COLUMNS, dtype=model.dtype))
    with pytest.raises(CheckpointError, match=r"embedding and head of which [01] are stored.*in w8a16, as model"):
        gac.save(model, tmp_path / "saved")


def test_a_config_that_says_something_else(saved: Path) -> None:
    plain: Any = small_llama(True)
    for described, message in (
        ({"tied": 1}, "gac: expected `bool`, got `int` - at `..head.tied`"),
        ({"tied": True}, "head has no storage; expected one of PackedIntegers"),
        ({"tied": True, "storage": "pickle"}, "head.storage is 'pickle'; expected one of PackedIntegers"),
    ):
        plain.config.gac = {"schema_version": 3, "modules": {}, "head": described}
        with pytest.raises(ValueError, match=message):
            replace_weights(plain, plain.config)
    with edited(saved / "config.json") as document:
        document["gac"]["head"]["tied"] = not document["gac"]["head"]["tied"]
    with pytest.raises(CheckpointError, match=r"config.json has head .*as plan.json says"):
        gac.load(saved)


def test_an_embedding_that_does_more(small: Small) -> None:
    special = small_llama(False)
    special.set_input_embeddings(type("Gated", (nn.Embedding,), {})(ROWS, COLUMNS, dtype=special.dtype))
    with pytest.raises(ModelError, match=r"model.embed_tokens of a LlamaForCausalLM is a Gated.*a plain embedding"):
        Small(special, small.tokenizer, small.text).allocate(0.8, head="w8a16")


def test_plans_that_contradict_themselves(small: Small) -> None:
    plan = small.allocate(0.8, head="w8a16")
    for changed in ({"shapes": ()}, {"shapes": ((10**9, 64),)}, {"shapes": ((0, 64),)}, {"loss": -1.0}):
        with pytest.raises(PlanError, match="plan has measured"):
            with_measured(plan, head=replace(head_of(plan), **changed))
    for change in (
        lambda: with_measured(plan, head=None),
        lambda: with_recipe(plan, head="bf16"),
        lambda: replace(plan, prediction=replace(plan.prediction, head=0.0)),
    ):
        with pytest.raises(PlanError, match="head"):
            change()

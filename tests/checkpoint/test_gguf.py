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
from gac.checkpoint.gguf.tensors import BLOCK_TYPES
from gac.core.errors import CheckpointError
from gac.plan.plan import Plan
from tests.compression.applying import IDS, logits
from tests.compression.compressed import HEAD_DIM, RANK, WIDTH, compressed
from tests.compression.stored import stored
from tests.models.small import small_config, small_model, weights_of

MakePlan = Callable[..., Plan]
EXACT = ("w8a16", "w4a16:32", "w3a16:64", "w2a16:32")
TYPES = {"w8a16": "Q8_0", "w4a16:32": "Q5_0", "w3a16:64": "Q4_0", "w2a16:32": "Q4_0"}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 128},  # the file says another one too, which transformers does not read
}
NEURONS = 192


def words(split: Any = None, **changed: Any) -> PreTrainedTokenizerFast:
    """One token a byte but one, one pair of letters, and special tokens: as many as the small models have."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:-1]
    vocab = {**{byte: index for index, byte in enumerate(alphabet)}, "th": 255}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h")], **changed))
    backend.pre_tokenizer = split or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template="{{ messages }}", **special)


def uniform(
    model_type: str, make_plan: MakePlan, schemes: tuple[str, ...], neurons: int = NEURONS, **changed: Any
) -> Any:
    """A small model whose weights are in these schemes in turn."""
    config = small_config(model_type, **changed)
    config.intermediate_size = neurons
    config.dtype = changed.get("dtype", torch.float32)
    dense = [(one.name, min(one.out_features, one.in_features)) for one in weights_of(config)]
    chosen = {name: ("dense", dim, schemes[at % len(schemes)]) for at, (name, dim) in enumerate(dense)}
    return stored(small_model(config), make_plan, chosen)


def opened(file: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype).eval()


def apart(model: Any, other: Any) -> float:
    """The largest difference of two models' logits, as a part of the largest logit."""
    return float((logits(other) - logits(model)).abs().max() / logits(model).abs().max())


def written(model: Any, folder: Path, **options: Any) -> tuple[Path, gac.GgufFile]:
    file = folder / "model.gguf"
    return file, gac.export_gguf(model, file, tokenizer=words(), **options)


# --- the same model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schemes", [("bf16",), EXACT], ids=["as loaded", "rounded"])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_transformers_reads_the_same_model(
    model_type: str, schemes: tuple[str, ...], make_plan: MakePlan, tmp_path: Path
) -> None:
    model = uniform(model_type, make_plan, schemes, **ARCHITECTURES[model_type])
    file, found = written(model, tmp_path)
    again = opened(file)
    assert apart(model, again) < 1e-5
    assert found.exact
    given: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    assert torch.equal(again.generate(IDS, **given), model.generate(IDS, **given))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_embedding_and_head(tied: bool, make_plan: MakePlan, tmp_path: Path) -> None:
    model = uniform("llama", make_plan, EXACT, tie_word_embeddings=tied)
    file, _ = written(model, tmp_path)
    names = {one.name for one in gguf.GGUFReader(file).tensors}
    assert ("output.weight" in names) is not tied
    assert apart(model, opened(file)) < 1e-5


def test_sixteen_bits_stay_sixteen_bits(make_plan: MakePlan, tmp_path: Path) -> None:
    model = uniform("llama", make_plan, ("bf16",), dtype=torch.bfloat16)
    file, found = written(model, tmp_path)
    assert {one.type for one in found.tensors} == {"BF16", "F32"}
    assert found.weights_bytes == found.planned_bytes
    again = opened(file, torch.bfloat16)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_narrower_mlps_of_one_width(make_plan: MakePlan, tmp_path: Path) -> None:
    config = small_config("llama")
    changes = {weight.name: ("narrow", WIDTH) for weight in weights_of(config) if weight.neurons}
    model = compressed(small_model(config), make_plan, changes)
    file, _ = written(model, tmp_path)
    again = opened(file)
    assert again.config.intermediate_size == WIDTH
    assert apart(model, again) < 1e-5


def test_pairs_and_shorter_values_are_merged(make_plan: MakePlan, tmp_path: Path) -> None:
    config = small_config("llama")
    pairs = {"model.layers.0.self_attn.q_proj": ("low_rank", RANK)}
    values = {one.name: ("head_dim", HEAD_DIM) for one in weights_of(config) if one.values and ".1." in one.name}
    model = compressed(small_model(config), make_plan, pairs | values)
    file, _ = written(model, tmp_path, merge=True)
    assert apart(model, opened(file)) < 1e-4


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
    file, found = written(model, tmp_path)
    tensors = {one.name: one for one in gguf.GGUFReader(file).tensors}
    for name, ours in (("attn_v", "self_attn.v_proj"), ("attn_q", "self_attn.q_proj"), ("ffn_down", "mlp.down_proj")):
        one = tensors[f"blk.1.{name}.weight"]
        assert one.tensor_type.name == TYPES[scheme]
        read = torch.from_numpy(gguf.dequantize(one.data, one.tensor_type))
        assert torch.equal(read, model.get_submodule(f"model.layers.1.{ours}").values(torch.float32))
    assert [(one.type, one.moved) for one in found.tensors if one.scheme == scheme] == [(TYPES[scheme], 0.0)]


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_every_number_of_a_type(kind: str) -> None:
    """As the package reads them, the least and the largest too."""
    held = BLOCK_TYPES[kind]
    numbers = torch.arange(held.least, held.most + 1, dtype=torch.int16).repeat(32).view(-1, 64)
    scale = torch.linspace(0.01, 1, 2 * len(numbers)).half().view(-1, 2)
    data = held.encoded(numbers.numpy(), scale.numpy())
    read = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    due: Tensor = numbers * scale.float().repeat_interleave(32, dim=1)
    assert torch.equal(torch.from_numpy(read), due)


def test_floating_point_of_8_bits_is_rounded_again(make_plan: MakePlan, tmp_path: Path) -> None:
    model = uniform("llama", make_plan, ("fp8",))
    file, found = written(model, tmp_path)
    rounded = next(one for one in found.tensors if one.scheme == "fp8")
    assert rounded.type == "Q8_0"
    assert 0.001 < rounded.moved < 0.01
    assert not found.exact
    assert found.inputs == ("fp8",)
    assert apart(model, opened(file)) < 0.1


@pytest.mark.parametrize(
    ("neurons", "scheme", "kind", "why"),
    [
        (176, "w4a16:32", "BF16", "176 columns, no multiple of 32"),
        (NEURONS, "w4a16:24", "Q8_0", "groups of 24, no multiple of 32"),
    ],
)
def test_dims_that_no_block_fits_are_named(
    neurons: int, scheme: str, kind: str, why: str, make_plan: MakePlan, tmp_path: Path
) -> None:
    model = uniform("llama", make_plan, (scheme,), neurons, dtype=torch.bfloat16)
    file, found = written(model, tmp_path)
    assert (kind, why) in {(one.type, one.why) for one in found.tensors if one.scheme == scheme}
    assert apart(model, opened(file, torch.bfloat16)) < 0.05


def test_the_record_counts_what_is_there(make_plan: MakePlan, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gac")
    file, found = written(uniform("llama", make_plan, EXACT), tmp_path)
    tensors = gguf.GGUFReader(file).tensors
    assert sum(one.tensors for one in found.tensors) == len(tensors)
    assert sum(one.bytes for one in found.tensors) == sum(int(one.n_bytes) for one in tensors)
    assert found.bytes == file.stat().st_size
    assert any(text.startswith(f"writing {found.bytes:,} bytes") for text in caplog.messages)
    assert found.planned_bytes < found.weights_bytes


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
    file, own = tmp_path / "model.gguf", tokenizer()
    gac.export_gguf(uniform("llama", make_plan, ("bf16",)), file, tokenizer=own)
    fields = gguf.GGUFReader(file).fields
    said = {key.rpartition(".")[2]: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}
    assert said["pre"] == name
    assert said["tokens"][:2] + said["tokens"][255:] == ["!", '"', "th", "<s>", "</s>"]
    assert said["token_type"] == [1] * 256 + [3, 3]
    assert said["merges"] == ["t h"]
    assert (said["bos_token_id"], said["eos_token_id"], said["padding_token_id"]) == (256, 257, 257)
    assert (said["add_bos_token"], said["add_eos_token"]) == (True, False)
    assert said["chat_template"] == "{{ messages }}"
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    text = "that's the 12 </s> of them"
    assert read(text, add_special_tokens=False).input_ids == own(text, add_special_tokens=False).input_ids


def test_rows_without_a_token_are_unused(make_plan: MakePlan, tmp_path: Path) -> None:
    file, _ = written(uniform("llama", make_plan, ("bf16",), vocab_size=260), tmp_path)
    fields = gguf.GGUFReader(file).fields
    assert fields["tokenizer.ggml.tokens"].contents()[258:] == ["[PAD258]", "[PAD259]"]
    assert fields["tokenizer.ggml.token_type"].contents()[258:] == [5, 5]


def _changed(change: Callable[[Any], None]) -> Any:
    found = words()
    change(found.backend_tokenizer)
    return found


@pytest.mark.parametrize(
    ("tokenizer", "why"),
    [
        (lambda: words(pre_tokenizers.Whitespace()), 'which splits text otherwise: {"type": "Whitespace"}'),
        (lambda: words(pre_tokenizers.ByteLevel(add_prefix_space=True)), "which splits text otherwise"),
        (lambda: words(ignore_merges=True), "which splits text otherwise"),
        (lambda: words(byte_fallback=True), "whose model is BPE and not byte-level"),
        (lambda: _changed(lambda own: setattr(own, "normalizer", normalizers.Lowercase())), "normalizer is Lowercase"),
        (lambda: _changed(lambda own: setattr(own, "model", models.WordLevel({"<s>": 0}))), "model is WordLevel"),
        (lambda: _changed(lambda own: own.add_tokens(["<more>"])), "a tokenizer with the token 258, '<more>'"),
        (
            lambda: _changed(
                lambda own: setattr(
                    own,
                    "post_processor",
                    processors.TemplateProcessing(single="</s> $A <s>", special_tokens=[("<s>", 256), ("</s>", 257)]),
                )
            ),
            "puts other tokens around a text than BOS and EOS",
        ),
    ],
)
def test_other_tokenizers_are_refused(
    tokenizer: Callable[[], Any], why: str, make_plan: MakePlan, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as refused:
        gac.export_gguf(uniform("llama", make_plan, ("bf16",)), tmp_path / "model.gguf", tokenizer=tokenizer())
    assert why in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_without_merges_is_refused(make_plan: MakePlan, tiny_tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="which has no merges"):
        gac.export_gguf(uniform("llama", make_plan, ("bf16",)), tmp_path / "model.gguf", tokenizer=tiny_tokenizer)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"self_attn.q_proj": ("low_rank", RANK)}, "q_proj is low_rank with dim 16"),
        (
            {"self_attn.v_proj": ("head_dim", HEAD_DIM), "self_attn.o_proj": ("head_dim", HEAD_DIM)},
            "v_proj is head_dim with dim 8",
        ),
        ({f"mlp.{name}_proj": ("narrow", WIDTH) for name in ("gate", "up", "down")}, "_proj is "),
    ],
    ids=["pairs", "shorter values", "mlps of two widths"],
)
def test_dims_that_llama_cpp_has_no_place_for(
    changes: dict[str, tuple[str, int]], found: str, make_plan: MakePlan, tmp_path: Path
) -> None:
    named = {f"model.layers.1.{name}": one for name, one in changes.items()}
    model = compressed(small_model(small_config("llama")), make_plan, named)
    with pytest.raises(CheckpointError) as refused:
        written(model, tmp_path)
    assert found in str(refused.value)
    assert "Export it merged (--merge, merge=True)" in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model_type", "changed", "found"),
    [
        (
            "gpt2",
            {},
            "a model of the architecture gpt2; expected one that has been tried in llama.cpp (llama, mistral,",
        ),
        ("llama", {"attention_bias": True}, "a llama config with attention_bias True; expected False"),
        ("llama", {"hidden_act": "gelu"}, "a llama config with hidden_act 'gelu'; expected 'silu'"),
        ("mistral", {"sliding_window": 64}, "a mistral config with sliding_window 64; expected None"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
            "a llama config with rope_type 'linear'; expected 'default'",
        ),
    ],
)
def test_what_llama_cpp_takes_for_granted(
    model_type: str, changed: dict[str, Any], found: str, make_plan: MakePlan, tmp_path: Path
) -> None:
    model = compressed(small_model(small_config(model_type, **changed)), make_plan, {})
    with pytest.raises(CheckpointError) as refused:
        written(model, tmp_path, merge=True)
    assert str(refused.value).startswith(found)
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

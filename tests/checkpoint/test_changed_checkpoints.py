"""Every kind of change to a checkpoint: refused, or loaded with equal logits; which by default, which by ``verify``."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import gac
from gac.core.errors import CheckpointError
from gac.testing import models
from tests.checkpoint.conftest import CHANGES
from tests.compression.applying import logits
from tests.compression.compressed import compressed

Change = Callable[[Path], Any]
Q, K, LAYER = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj", "model.layers"
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
DOWN, GATE, V = (
    f"{LAYER}.1.mlp.down_proj.weight",
    f"{LAYER}.1.mlp.gate_proj.weight",
    f"{LAYER}.1.self_attn.v_proj.weight",
)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HEADER_BYTES = 8


def tensors(change: Callable[[dict[str, Tensor]], Any]) -> Change:
    """Change the tensors by name; the file is whole."""

    def apply(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file(found, folder / WEIGHTS, metadata={"format": "pt"})

    return apply


def value(name: str, new: Callable[[Tensor], Tensor]) -> Change:
    return tensors(lambda found: found.update({name: new(found[name]).contiguous()}))


def swapped(one: str, other: str) -> Change:
    return tensors(lambda found: found.update({one: found[other], other: found[one]}))


def flipped(name: str, bit: int) -> Change:
    """One bit of one number."""

    def flip(values: Tensor) -> Tensor:
        changed = values.clone()
        changed.view(torch.int32).view(-1)[values.numel() // 2] ^= 1 << bit
        return changed

    return value(name, flip)


def at(name: str, number: float) -> Change:
    def put(values: Tensor) -> Tensor:
        changed = values.clone()
        changed.view(-1)[-1] = number
        return changed

    return value(name, put)


def swapped_layers(folder: Path) -> None:
    """What is of equal shape in both layers."""

    def swap(found: dict[str, Tensor]) -> None:
        for name in [name for name in found if name.startswith(f"{LAYER}.0.")]:
            other = name.replace(".0.", ".1.")
            if other in found and found[name].shape == found[other].shape:
                found[name], found[other] = found[other], found[name]

    tensors(swap)(folder)


def relabelled(old: str, new: str) -> Change:
    """The header of the weights' file says another dtype, of as many bytes."""

    def apply(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        end = HEADER_BYTES + int.from_bytes(data[:HEADER_BYTES], "little")
        (folder / WEIGHTS).write_bytes(data[:end].replace(old.encode(), new.encode(), 1) + data[end:])

    return apply


def document(name: str, change: Callable[[dict[str, Any]], Any]) -> Change:
    def apply(folder: Path) -> None:
        content = json.loads((folder / name).read_bytes())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return apply


def config(**values: Any) -> Change:
    return document("config.json", lambda found: found.update(values))


def text(name: str, old: str, new: str) -> Change:
    def apply(folder: Path) -> None:
        content = (folder / name).read_text()
        assert old in content
        (folder / name).write_text(content.replace(old, new, 1))

    return apply


def written(name: str, content: str | bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def removed(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def cut(name: str, bytes_: int) -> Change:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - bytes_)


def pipe(name: str) -> Change:
    return lambda folder: ((folder / name).unlink(missing_ok=True), os.mkfifo(folder / name))


def link(name: str, target: str) -> Change:
    return lambda folder: ((folder / name).unlink(missing_ok=True), (folder / name).symlink_to(target))


def directory(name: str) -> Change:
    return lambda folder: ((folder / name).unlink(), (folder / name).mkdir())


def both(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def sharded(mapping: Callable[[dict[str, str]], Any]) -> Change:
    """An index of one shard is put beside the weights."""

    def apply(folder: Path) -> None:
        found = dict.fromkeys(load_file(folder / WEIGHTS), WEIGHTS)
        mapping(found)
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": found}))

    return apply


def adapter(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(gac.load(folder), peft.LoraConfig(target_modules=["o_proj"], init_lora_weights=False))
    tuned.save_pretrained(folder)


OLD = removed("gac_digests.json")
"""As an older version of GAC wrote it: nothing but the structure of the files can be checked."""
DIGEST = "0" * 64


def without_digests(change: Change) -> Change:
    return both(change, OLD)


REFUSED: dict[str, Change] = {
    # dtypes and shapes
    "F32 relabelled I32": relabelled("F32", "I32"),
    "F32 relabelled U32": relabelled("F32", "U32"),
    "a tensor of int64": value(V, lambda one: one.long()),
    "a tensor of int8": value(V, lambda one: one.to(torch.int8)),
    "a tensor of bool": value(V, lambda one: one > 0),
    "a tensor of float64": value(V, lambda one: one.double()),
    "a tensor of bfloat16": value(V, lambda one: one.bfloat16()),
    "a tensor of float16": value(V, lambda one: one.half()),
    "a tensor transposed": value(DOWN, lambda one: one.T),
    "a row less": value(HEAD, lambda one: one[:-1]),
    "a tensor with a dim more": value(NORM, lambda one: one[None]),
    "an empty tensor": value(NORM, lambda one: one[:0]),
    "a rank less": both(
        value(f"{Q}.first.weight", lambda one: one[:-1]), value(f"{Q}.second.weight", lambda one: one[:, :-1])
    ),
    # names
    "a tensor missing": tensors(lambda found: found.pop(V)),
    "a tensor more": tensors(lambda found: found.update(extra=torch.zeros(2))),
    "a tensor renamed": tensors(lambda found: found.update({f"{V}.old": found.pop(V)})),
    "no tensors": tensors(dict.clear),
    # the weights' file
    "weights missing": removed(WEIGHTS),
    "weights empty": written(WEIGHTS, b""),
    "weights cut by a byte": cut(WEIGHTS, 1),
    "weights cut to half": cut(WEIGHTS, 200_000),
    "weights with a byte more": lambda folder: (folder / WEIGHTS).open("ab").write(b"x"),
    "a header of 2**60 bytes": lambda folder: (folder / WEIGHTS).open("r+b").write((2**60).to_bytes(8, "little")),
    "weights as a pickle": lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
    "weights as a pipe": pipe(WEIGHTS),
    "weights as a directory": directory(WEIGHTS),
    "weights linked to the outside": link(WEIGHTS, "/etc/hostname"),
    "weights linked to themselves": link(WEIGHTS, WEIGHTS),
    "weights linked to a device": link(WEIGHTS, "/dev/zero"),
    # an index
    "an index beside one file": sharded(lambda _: None),
    "an index that leaves one out": sharded(lambda found: found.pop(V)),
    "an index that names the outside": sharded(lambda found: found.update({V: "../model.safetensors"})),
    "an index that names no file": sharded(lambda found: found.update({V: "model-2.safetensors"})),
    "an index that names a pickle": sharded(lambda found: found.update({V: "model.bin"})),
    "an index that is none": written(INDEX, "[]"),
    "an index as a pipe": pipe(INDEX),
    # the config
    **{
        f"config: {key} {new!r}": config(**{key: new})
        for key, new in {
            "rms_norm_eps": 1e-2,
            "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
            "rope_theta": 500.0,
            "hidden_act": "gelu",
            "dtype": "bfloat16",
            "torch_dtype": "float16",
            "attention_bias": True,
            "mlp_bias": True,
            "attention_dropout": 0.5,
            "head_dim": 32,
            "hidden_size": 32,
            "intermediate_size": 160,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8,
            "initializer_range": 1.0,
            "pretraining_tp": 2,
            "tie_word_embeddings": True,
            "vocab_size": 512,
            "model_type": "gac_mistral",
            "architectures": ["GacMistralForCausalLM"],
            "sliding_window": 4,
            "layer_types": ["sliding_attention"] * 2,
            "num_labels": 7,
            "unknown": 1,
            "quantization_config": {"quant_method": "gptq", "bits": 4},
            "_attn_implementation": "evil/kernel@main:forward",
            "attn_implementation": "evil/kernel@main:forward",
            "_experts_implementation": "evil/kernel",
            "experts_implementation": "evil/kernel",
            "auto_map": {"AutoModelForCausalLM": "evil.Model"},
            "gac": {},
        }.items()
    },
    "config: a key missing": document("config.json", lambda found: found.pop("rms_norm_eps")),
    "config: another rank": document("config.json", lambda found: found["gac"]["modules"][Q].update(dim=4)),
    "config: no gac": document("config.json", lambda found: found.pop("gac")),
    "config missing": removed("config.json"),
    "config cut": cut("config.json", 100),
    "config as a pipe": pipe("config.json"),
    "config linked to itself": link("config.json", "config.json"),
    # the plan and the generation config
    "plan: a number": text("plan.json", '"loss": 0.1', '"loss": 0.2'),
    "plan: a rank": text("plan.json", '"dim": 8', '"dim": 9'),
    "plan: a space": text("plan.json", "{", "{ "),
    "plan missing": removed("plan.json"),
    "plan as a pipe": pipe("plan.json"),
    "plan linked to the outside": link("plan.json", "/etc/hostname"),
    "plan linked to a device": link("plan.json", "/dev/zero"),
    "generation: another temperature": document("generation_config.json", lambda found: found.update(temperature=9.0)),
    "generation missing": removed("generation_config.json"),
    # what lies beside
    "an adapter": adapter,
    "a pipe beside": pipe("notes.txt"),
    # the digests
    "digests cut": cut("gac_digests.json", 100),
    "digests: no object": written("gac_digests.json", "[]"),
    "digests: of another version": text("gac_digests.json", '"schema_version": 1', '"schema_version": 2'),
    "digests: a tensor missing": document("gac_digests.json", lambda found: found["tensors"].pop(V)),
    "digests: a tensor is no object": document("gac_digests.json", lambda found: found["tensors"].update({V: 3})),
    "digests: another key": document("gac_digests.json", lambda found: found["config"].update(hidden_act=DIGEST)),
    "digests as a pipe": pipe("gac_digests.json"),
    # without digests, what no older version wrote
    "old: a tensor of int64": without_digests(value(V, lambda one: one.long())),
    "old: a tensor of bool": without_digests(value(V, lambda one: one > 0)),
    "old: F32 relabelled I32": without_digests(relabelled("F32", "I32")),
    "old: a kernel": without_digests(config(_attn_implementation="evil/kernel@main:forward")),
    "old: code": without_digests(config(auto_map={"AutoModelForCausalLM": "evil.Model"})),
    "old: a quantiser": without_digests(config(quantization_config={"quant_method": "gptq", "bits": 4})),
    "old: an adapter": without_digests(adapter),
    "old: a row less": without_digests(value(HEAD, lambda one: one[:-1])),
    "old: an unknown activation": without_digests(config(hidden_act="evil/kernel")),
}
"""``gac.load`` refuses it, and so does ``gac.verify``."""

OTHER_VALUES: dict[str, Change] = {
    # a bit
    "lowest bit of an embedding": flipped(EMBEDDING, 0),
    "sign in the head": flipped(HEAD, 31),
    "exponent of a norm": flipped(NORM, 23),
    "a bit of a first factor": flipped(f"{Q}.first.weight", 3),
    "a bit of a second factor": flipped(f"{Q}.second.weight", 3),
    "a bit of a narrow weight": flipped(DOWN, 3),
    "a bit of a dense weight": flipped(V, 3),
    # values
    "zeros in one tensor": value(V, torch.zeros_like),
    "zeros everywhere": tensors(
        lambda found: found.update({name: torch.zeros_like(one) for name, one in found.items()})
    ),
    "ones in a norm": value(NORM, lambda one: 2 * torch.ones_like(one)),
    "an inf": at(DOWN, float("inf")),
    "a minus inf": at(HEAD, float("-inf")),
    "a nan": at(EMBEDDING, float("nan")),
    "a tensor doubled": value(GATE, lambda one: 2 * one),
    "a tensor negated": value(GATE, torch.neg),
    "rows in another order": value(HEAD, lambda one: one.flip(0)),
    "columns in another order": value(DOWN, lambda one: one.flip(1)),
    "a tensor rounded": value(V, lambda one: one.bfloat16().float()),
    "all random": value(V, torch.randn_like),
    # tensors that change places
    "gate and up swapped": swapped(GATE, GATE.replace("gate", "up")),
    "k of two layers swapped": swapped(f"{K}.weight", f"{K}.weight".replace(".1.", ".0.")),
    "k and v swapped": swapped(V, f"{K}.weight"),
    "q and o swapped": swapped(f"{LAYER}.1.self_attn.q_proj.weight", f"{LAYER}.1.self_attn.o_proj.weight"),
    "embedding and head swapped": swapped(EMBEDDING, HEAD),
    "layers swapped": swapped_layers,
    # the digests
    "digests: other values": document("gac_digests.json", lambda found: found["tensors"][V].update(sha256="0")),
}
"""``gac.load`` opens it, as it does not read the bytes of tensors twice; ``verify`` refuses it."""

BY_VERIFY: dict[str, Change] = {
    "no digests": OLD,
    "the entry's code": written("modeling_gac.py", "raise SystemExit"),
    "code missing": removed("modeling_gac.py"),
    "other code beside": written("configuration_evil.py", "raise SystemExit"),
    "other weights beside": lambda folder: shutil.copy(folder / WEIGHTS, folder / "model-2.safetensors"),
    "weights of an adapter beside": written("adapter_model.safetensors", b"x"),
    "a pickle beside": written("pytorch_model.bin", b"x"),
    "a tokenizer changed": text("tokenizer_config.json", "{", '{"add_bos_token": true, '),
    "a tokenizer missing": removed("tokenizer.json"),
    "digests: other SHA-256": document("gac_digests.json", lambda found: found["tensors"][V].update(sha256=DIGEST)),
    "digests: a file missing": document("gac_digests.json", lambda found: found["files"].update({"a.json": DIGEST})),
}
"""``gac.load`` opens it, with equal logits: nothing of it is read. ``gac.verify`` refuses it."""

HARMLESS: dict[str, Change] = {
    "nothing": lambda _: None,
    "the card": written("README.md", "better words"),
    "the card missing": removed("README.md"),
    "a hidden file": written(".gitattributes", "* binary"),
    "a signature beside": written("model.sig", "{}"),
    "notes beside": written("notes.md", "mine"),
    "the config indented": document("config.json", lambda _: None),
    "a tensor's place in the file": tensors(
        lambda found: found.update({name: found.pop(name) for name in [*found][::-1]})
    ),
    "weights linked within": lambda folder: (
        (folder / WEIGHTS).rename(folder / ".weights"),
        (folder / WEIGHTS).symlink_to(".weights"),
    ),
    **{
        f"config: {key} {new!r}": config(**{key: new})
        for key, new in {
            "transformers_version": "5.0.0",
            "_name_or_path": "me/mine",
            "use_cache": False,
            "bos_token_id": 1,
            "eos_token_id": [1, 2],
            "pad_token_id": 3,
        }.items()
    },
}
"""Both open it, with equal logits."""


@pytest.fixture(scope="module")
def original(make_plan: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "saved"
    gac.save(compressed(models.tiny_model(), make_plan, CHANGES), folder, tokenizer=models.tiny_tokenizer())
    return folder


@pytest.fixture(scope="module")
def said(original: Path) -> Tensor:
    return logits(gac.load(original))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Iterator[Path]:
    yield Path(shutil.copytree(original, tmp_path / "changed"))
    shutil.rmtree(tmp_path / "changed")


BY_BYTES = (gac.verify, partial(gac.load, verify=True))


def check_refused(folder: Path, checks: Iterable[Callable[[Path], Any]]) -> None:
    for check in checks:
        with pytest.raises(CheckpointError):
            check(folder)


def names(changes: dict[str, Change]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("change", changes.values(), ids=changes.keys())


@names(REFUSED)
def test_what_the_default_refuses(change: Change, folder: Path) -> None:
    change(folder)
    check_refused(folder, (gac.load, gac.verify))


@names(OTHER_VALUES)
def test_what_only_the_bytes_show(change: Change, folder: Path) -> None:
    change(folder)
    assert gac.load(folder).gac_plan.sites
    check_refused(folder, BY_BYTES)


@names(BY_VERIFY)
def test_what_verify_refuses(change: Change, folder: Path, said: Tensor) -> None:
    change(folder)
    assert torch.equal(logits(gac.load(folder)), said)
    check_refused(folder, BY_BYTES)


@names(HARMLESS)
def test_what_changes_no_logit(change: Change, folder: Path, said: Tensor) -> None:
    change(folder)
    gac.verify(folder)
    assert torch.equal(logits(gac.load(folder)), said)

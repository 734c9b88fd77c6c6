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
from tests.checkpoint.conftest import CHANGES, copied, edit
from tests.compression.applying import logits
from tests.compression.compressed import compressed

Change = Callable[[Path], Any]
Q, K, LAYER = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj", "model.layers"
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
DOWN, GATE, V = (f"{LAYER}.1.{name}_proj.weight" for name in ("mlp.down", "mlp.gate", "self_attn.v"))
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


def relabelled(old: str, new: str) -> Change:
    """The header of the weights' file says another dtype, of as many bytes."""

    def apply(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        end = HEADER_BYTES + int.from_bytes(data[:HEADER_BYTES], "little")
        (folder / WEIGHTS).write_bytes(data[:end].replace(old.encode(), new.encode(), 1) + data[end:])

    return apply


def document(name: str, change: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda folder: edit(folder / name, change)


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


REFUSED: dict[str, Change] = {
    # dtypes and shapes
    "F32 relabelled I32": relabelled("F32", "I32"),
    "a tensor of int64": value(V, lambda one: one.long()),
    "a tensor of bool": value(V, lambda one: one > 0),
    "a tensor of bfloat16": value(V, lambda one: one.bfloat16()),
    "a tensor transposed": value(DOWN, lambda one: one.T),
    "a row less": value(HEAD, lambda one: one[:-1]),
    "a tensor with a dim more": value(NORM, lambda one: one[None]),
    # names
    "a tensor missing": tensors(lambda found: found.pop(V)),
    "a tensor more": tensors(lambda found: found.update(extra=torch.zeros(2))),
    "a tensor renamed": tensors(lambda found: found.update({f"{V}.old": found.pop(V)})),
    # the weights' file
    "weights missing": removed(WEIGHTS),
    "weights empty": written(WEIGHTS, b""),
    "weights cut by a byte": cut(WEIGHTS, 1),
    "weights with a byte more": lambda folder: (folder / WEIGHTS).open("ab").write(b"x"),
    "a header of 2**60 bytes": lambda folder: (folder / WEIGHTS).open("r+b").write((2**60).to_bytes(8, "little")),
    "weights as a pickle": lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
    "weights as a pipe": pipe(WEIGHTS),
    "weights linked to the outside": link(WEIGHTS, "/etc/hostname"),
    "weights linked to a device": link(WEIGHTS, "/dev/zero"),
    # an index
    "an index beside one file": sharded(lambda _: None),
    "an index that names the outside": sharded(lambda found: found.update({V: "../model.safetensors"})),
    "an index that is none": written(INDEX, "[]"),
    # the config
    **{
        f"config: {key} {new!r}": config(**{key: new})
        for key, new in {
            "rms_norm_eps": 1e-2,
            "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
            "hidden_act": "gelu",
            "dtype": "bfloat16",
            "attention_bias": True,
            "intermediate_size": 160,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8,
            "tie_word_embeddings": True,
            "model_type": "gac_mistral",
            "sliding_window": 4,
            "unknown": 1,
            "quantization_config": {"quant_method": "gptq", "bits": 4},
            "_attn_implementation": "evil/kernel@main:forward",
            "auto_map": {"AutoModelForCausalLM": "evil.Model"},
            "gac": {},
        }.items()
    },
    "config: a key missing": document("config.json", lambda found: found.pop("rms_norm_eps")),
    "config: another rank": document("config.json", lambda found: found["gac"]["modules"][Q].update(dim=4)),
    "config: no gac": document("config.json", lambda found: found.pop("gac")),
    "config missing": removed("config.json"),
    "config as a pipe": pipe("config.json"),
    # the plan and the generation config
    "plan: a number": text("plan.json", '"loss": 0.1', '"loss": 0.2'),
    "plan: a space": text("plan.json", "{", "{ "),
    "plan missing": removed("plan.json"),
    "plan linked to a device": link("plan.json", "/dev/zero"),
    "generation: another temperature": document("generation_config.json", lambda found: found.update(temperature=9.0)),
    # what lies beside
    "an adapter": adapter,
    "a pipe beside": pipe("notes.txt"),
    # the digests
    "digests cut": cut("gac_digests.json", 100),
    "digests: no object": written("gac_digests.json", "[]"),
    "digests: a tensor missing": document("gac_digests.json", lambda found: found["tensors"].pop(V)),
    # without digests, what no older version wrote
    "old: a tensor of int64": both(OLD, value(V, lambda one: one.long())),
    "old: a tensor more": both(OLD, tensors(lambda found: found.update(extra=torch.zeros(2)))),
    "old: a tensor with a dim more": both(OLD, value(NORM, lambda one: one[None])),
    "old: a kernel": both(OLD, config(_attn_implementation="evil/kernel@main:forward")),
    "old: code": both(OLD, config(auto_map={"AutoModelForCausalLM": "evil.Model"})),
    "old: a quantiser": both(OLD, config(quantization_config={"quant_method": "gptq", "bits": 4})),
    "old: an adapter": both(OLD, adapter),
}
"""``gac.load`` refuses it, and so does ``gac.verify``."""

OTHER_VALUES: dict[str, Change] = {
    # a bit
    "lowest bit of an embedding": flipped(EMBEDDING, 0),
    "a bit of a first factor": flipped(f"{Q}.first.weight", 3),
    # values
    "zeros in one tensor": value(V, torch.zeros_like),
    "a nan": value(EMBEDDING, lambda one: one.masked_fill(one == one.max(), float("nan"))),
    "rows in another order": value(HEAD, lambda one: one.flip(0)),
    # tensors that change places
    "gate and up swapped": swapped(GATE, GATE.replace("gate", "up")),
    # the digests
    "digests: other values": document("gac_digests.json", lambda found: found["tensors"][V].update(sha256="0")),
}
"""``gac.load`` opens it, as it does not read the bytes of tensors twice; ``verify`` refuses it."""

BY_VERIFY: dict[str, Change] = {
    "no digests": OLD,
    "the entry's code": written("modeling_gac.py", "raise SystemExit"),
    "other code beside": written("configuration_evil.py", "raise SystemExit"),
    "other weights beside": lambda folder: shutil.copy(folder / WEIGHTS, folder / "model-2.safetensors"),
    "a pickle beside": written("pytorch_model.bin", b"x"),
    "a tokenizer changed": text("tokenizer_config.json", "{", '{"add_bos_token": true, '),
    "digests: other SHA-256": document("gac_digests.json", lambda found: found["tensors"][V].update(sha256=DIGEST)),
    "digests: a file missing": document("gac_digests.json", lambda found: found["files"].update({"a.json": DIGEST})),
}
"""``gac.load`` opens it, with equal logits: nothing of it is read. ``gac.verify`` refuses it."""

HARMLESS: dict[str, Change] = {
    "nothing": lambda _: None,
    "the card": written("README.md", "better words"),
    "a signature beside": written("model.sig", "{}"),
    "the config indented": document("config.json", lambda _: None),
    "a tensor's place in the file": tensors(
        lambda found: found.update({name: found.pop(name) for name in [*found][::-1]})
    ),
    "weights linked within": lambda folder: (
        (folder / WEIGHTS).rename(folder / ".weights"),
        (folder / WEIGHTS).symlink_to(".weights"),
    ),
    "config: other names and tokens": config(_name_or_path="me/mine", bos_token_id=1, eos_token_id=[1, 2]),
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
    yield from copied(original, tmp_path)


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

"""Every kind of change to a checkpoint: refused, or loaded with equal logits; which by default, which by ``verify``."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import gac
from gac.core.errors import CheckpointError
from gac.runtime.contract import DIGESTS
from gac.testing import models
from tests.checkpoint.conftest import CHANGES, copied, edit
from tests.compression.applying import logits
from tests.compression.compressed import compressed

Change = Callable[[Path], Any]
Q, LAYER = "model.layers.0.self_attn.q_proj", "model.layers"
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
DOWN, V = (f"{LAYER}.1.{name}_proj.weight" for name in ("mlp.down", "self_attn.v"))
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def tensors(change: Callable[[dict[str, Tensor]], Any]) -> Change:
    """Change the tensors by name; the file is whole."""

    def apply(folder: Path) -> None:
        result = load_file(folder / WEIGHTS)
        change(result)
        save_file(result, folder / WEIGHTS, metadata={"format": "pt"})

    return apply


def value(name: str, new: Callable[[Tensor], Tensor]) -> Change:
    return tensors(lambda found: found.update({name: new(found[name]).contiguous()}))


def flipped(name: str, bit: int) -> Change:
    """One bit of one number."""

    def flip(values: Tensor) -> Tensor:
        changed = values.clone()
        changed.view(torch.int32).view(-1)[values.numel() // 2] ^= 1 << bit
        return changed

    return value(name, flip)


def document(name: str, change: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda folder: edit(folder / name, change)


def config(**values: Any) -> Change:
    return document("config.json", lambda found: found.update(values))


def text(name: str, old: str, new: str) -> Change:
    return lambda folder: (folder / name).write_text((folder / name).read_text().replace(old, new, 1))


def written(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def both(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def indexed(folder: Path) -> None:
    """An index of one shard is put beside the weights."""
    weights = dict.fromkeys(load_file(folder / WEIGHTS), WEIGHTS)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weights}))


def adapter(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(gac.load(folder), peft.LoraConfig(target_modules=["o_proj"], init_lora_weights=False))
    tuned.save_pretrained(folder)


def old(folder: Path) -> None:
    """As an older version of GAC wrote it: nothing but the structure of the files can be checked."""
    (folder / DIGESTS).unlink()


SHA = "0" * 64
FILES = (WEIGHTS, "config.json", "plan.json", "generation_config.json", DIGESTS)
DAMAGE: dict[str, Change] = {
    "missing": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: os.truncate(file, file.stat().st_size - 2),
    "longer": lambda file: file.open("ab").write(b"x"),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "a device": lambda file: (file.unlink(), file.symlink_to("/dev/zero")),
    "a link to the outside": lambda file: (file.unlink(), file.symlink_to("/etc/hostname")),
}
REFUSED: dict[str, Change] = {
    # dtypes, shapes and names
    "F32 relabelled I32": value(V, lambda one: one.view(torch.int32)),
    "a tensor of int64": value(V, lambda one: one.long()),
    "a tensor of bool": value(V, lambda one: one > 0),
    "a tensor of bfloat16": value(V, lambda one: one.bfloat16()),
    "a tensor transposed": value(DOWN, lambda one: one.T),
    "a row less": value(HEAD, lambda one: one[:-1]),
    "a tensor with a dim more": value(NORM, lambda one: one[None]),
    "a tensor missing": tensors(lambda found: found.pop(V)),
    "a tensor more": tensors(lambda found: found.update(extra=torch.zeros(2))),
    "a tensor renamed": tensors(lambda found: found.update({f"{V}.old": found.pop(V)})),
    # the weights' file and an index
    "a header of 2**60 bytes": lambda folder: (folder / WEIGHTS).open("r+b").write((2**60).to_bytes(8, "little")),
    "weights as a pickle": lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
    "an index beside one file": indexed,
    "an index that is none": written(INDEX, "[]"),
    # the config
    "config: a kernel": config(_attn_implementation="evil/kernel@main:forward"),
    "config: code": config(auto_map={"AutoModelForCausalLM": "evil.Model"}),
    "config: a quantiser": config(quantization_config={"quant_method": "gptq", "bits": 4}),
    "config: an unknown key": config(unknown=1),
    "config: another rank": document("config.json", lambda found: found["gac"]["modules"][Q].update(dim=4)),
    # the plan, and what lies beside
    "plan: a number": text("plan.json", '"loss": 0.1', '"loss": 0.2'),
    "plan: a space": text("plan.json", "{", "{ "),
    "an adapter": adapter,
    "a pipe beside": lambda folder: os.mkfifo(folder / "notes.txt"),
    # the digests
    "digests: no object": written(DIGESTS, "[]"),
    "digests: a tensor missing": document(DIGESTS, lambda found: found["tensors"].pop(V)),
    # without digests, what no older version wrote
    "old: a tensor of int64": both(old, value(V, lambda one: one.long())),
    "old: a tensor more": both(old, tensors(lambda found: found.update(extra=torch.zeros(2)))),
    "old: a tensor with a dim more": both(old, value(NORM, lambda one: one[None])),
    "old: a kernel": both(old, config(_attn_implementation="evil/kernel@main:forward")),
    "old: code": both(old, config(auto_map={"AutoModelForCausalLM": "evil.Model"})),
    "old: a quantiser": both(old, config(quantization_config={"quant_method": "gptq", "bits": 4})),
    "old: an adapter": both(old, adapter),
}
"""``gac.load`` refuses it, and so does ``gac.verify``."""


OTHER_VALUES: dict[str, Change] = {
    "lowest bit of an embedding": flipped(EMBEDDING, 0),
    "a bit of a first factor": flipped(f"{Q}.first.weight", 3),
    "zeros in one tensor": value(V, torch.zeros_like),
    "a nan": value(EMBEDDING, lambda one: one.masked_fill(one == one.max(), float("nan"))),
    "rows in another order": value(HEAD, lambda one: one.flip(0)),
    "digests: other values": document(DIGESTS, lambda found: found["tensors"][V].update(sha256="0")),
}
"""``gac.load`` opens it, as it does not read the bytes of tensors twice; ``verify`` refuses it."""

BY_VERIFY: dict[str, Change] = {
    "no digests": old,
    "the entry's code": written("modeling_gac.py", "raise SystemExit"),
    "other code beside": written("configuration_evil.py", "raise SystemExit"),
    "other weights beside": lambda folder: shutil.copy(folder / WEIGHTS, folder / "model-2.safetensors"),
    "a pickle beside": written("pytorch_model.bin", "x"),
    "a tokenizer changed": text("tokenizer_config.json", "{", '{"add_bos_token": true, '),
    "digests: other SHA-256": document(DIGESTS, lambda found: found["tensors"][V].update(sha256=SHA)),
    "digests: a file missing": document(DIGESTS, lambda found: found["files"].update({"a.json": SHA})),
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


UNCOVERED = {"_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "use_cache"}
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


@pytest.mark.parametrize(("name", "damage"), [pair for pair in product(FILES, DAMAGE) if pair != (DIGESTS, "missing")])
def test_a_damaged_file_is_refused(name: str, damage: str, folder: Path) -> None:
    DAMAGE[damage](folder / name)
    check_refused(folder, (gac.load, gac.verify))


def test_every_key_of_the_config_is_covered_but_names_and_tokens(original: Path, folder: Path) -> None:
    saved = json.loads((original / "config.json").read_bytes())
    for key in saved.keys() - UNCOVERED:
        known = saved[key]
        other = not known if isinstance(known, bool) else 2 * known + 1 if isinstance(known, int | float) else [known]
        for changed in (saved | {key: other}, {name: saved[name] for name in saved if name != key}):
            (folder / "config.json").write_text(json.dumps(changed))
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

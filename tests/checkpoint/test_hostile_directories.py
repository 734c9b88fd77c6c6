"""A checkpoint from anyone: names stay in its directory, sizes are bounded, and configs are refused when opened."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import gac
from gac.core.errors import CheckpointError, GacError, ModelError
from gac.models.loading import load_config, load_model, load_tokenizer
from gac.runtime.contract import DIGESTS
from tests.fuzz.test_hostile_inputs import run_limited

INDEX = "model.safetensors.index.json"
HUGE = 40 * 10**9
OPENERS: dict[str, Callable[[Path], Any]] = {
    "load": gac.load,
    "verify": gac.verify,
    "repair": lambda folder: gac.repair(folder, folder.parent / "repaired"),
}
every_opener = pytest.mark.parametrize("opened", OPENERS.values(), ids=OPENERS)


READ_ALL = """
import sys
import gac
from gac.core.errors import GacError
from gac.models.loading import load_config, load_model, load_tokenizer

saved = gac.load, lambda folder: gac.load(folder, verify=True), gac.verify
dense = load_config, load_model, load_tokenizer
for folder in sys.argv[1:]:
    for read in dense if folder.endswith("dense") else saved:
        try:
            read(folder)
        except GacError as error:
            print(type(error).__name__, error)
"""


def edit(path: Path, **members: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_bytes()) | members))


def sparse(path: Path, size: int) -> None:
    path.touch()
    os.truncate(path, size)


@pytest.fixture
def dense(tiny_config: LlamaConfig, tmp_path: Path) -> Path:
    LlamaForCausalLM(tiny_config).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


# --- names in files -------------------------------------------------------------------------------------------------

OUTSIDE = ["/etc/hostname", "../secret.json", "..", "", "a\\b.json", "x\x1b.json"]


@every_opener
def test_digests_name_files_of_the_directory_alone(opened: Any, saved: Path) -> None:
    (saved.parent / "secret.json").write_text("secret")
    before = json.loads((saved / DIGESTS).read_bytes())
    for name in (*OUTSIDE, "x" * 5000 + ".json", "model.safetensors", "big.bin", "config.json"):
        edit(saved / DIGESTS, files=before["files"] | {name: "0" * 64})
        with pytest.raises(CheckpointError, match=r"names the file|holds a control character") as caught:
            opened(saved)
        assert "the digest" not in str(caught.value), name


@every_opener
def test_an_index_names_files_of_the_directory_alone(opened: Any, saved: Path) -> None:
    for name in (*OUTSIDE, "x" * 5000 + ".safetensors", "model.bin"):
        weights = dict.fromkeys(load_file(saved / "model.safetensors"), name)
        (saved / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weights}))
        with pytest.raises(CheckpointError, match=r"names the file|holds a control character"):
            opened(saved)


def test_many_files_beside_the_weights_are_not_hashed(saved: Path) -> None:
    digests = json.loads((saved / DIGESTS).read_bytes())
    for number in range(5):  # a larger one is refused by itself
        sparse(saved / f"{number}.txt", 2**28)
        digests["files"][f"{number}.txt"] = "0" * 64
    (saved / DIGESTS).write_text(json.dumps(digests))
    with pytest.raises(CheckpointError, match=r"files beside the weights of 1,342,\d+,\d+ bytes; expected at most"):
        gac.verify(saved)


# --- JSON beside the weights ----------------------------------------------------------------------------------------

NOT_STRICT: dict[str, tuple[bytes, str]] = {
    "repeated": (b'{"a": 1, "a": 1}', "the key 'a' is there twice"),
    "nan": (b'{"a": NaN}', "a: nan, which is no finite number"),
    "nul": (rb'{"a": "\u0000"}', "'a' holds a control character"),
    "integer": (b'{"a": 1' + b"0" * 400 + b"}", "a: an integer beyond 2**62"),
    "deep": (b'{"a":' + b"[" * 100_000, "Invalid JSON: maximum recursion depth exceeded"),
    "list": (b"[]", "holds a list; expected a JSON object"),
    "bytes": (b"\xff", "Invalid JSON: 'utf-8' codec can't decode"),
}


@every_opener
@pytest.mark.parametrize("name", ["config.json", INDEX, DIGESTS])
def test_json_of_a_checkpoint_is_read_strictly(name: str, opened: Any, saved: Path) -> None:
    for text, said in NOT_STRICT.values():
        (saved / name).write_bytes(text)
        with pytest.raises(CheckpointError, match=f"^{saved / name}.*{re.escape(said)}"):
            opened(saved)


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_json_of_a_dense_model_is_read_strictly(name: str, dense: Path) -> None:
    for text, said in NOT_STRICT.values():
        (dense / name).write_bytes(text)
        for read in (load_config, load_model, load_tokenizer):
            with pytest.raises(ModelError, match=re.escape(said)):
                read(str(dense))


def test_usual_generation_is_read_and_may_stop_at_line_breaks(saved: Path, dense: Path) -> None:
    model = gac.load(saved)
    model.generation_config.stop_strings = ["\n\n", "\tuser:"]
    gac.save(model, saved.parent / "again")
    assert gac.load(saved.parent / "again", verify=True).generation_config.stop_strings == ["\n\n", "\tuser:"]
    usual: dict[str, Any] = {"eos_token_id": [1, 2], "pad_token_id": -1, "temperature": 1, "do_sample": True}
    usual |= {"top_p": 0.9, "top_k": 20, "max_new_tokens": 5, "suppress_tokens": []}
    (saved / DIGESTS).unlink()
    for folder, read in ((saved, gac.load), (dense, lambda folder: load_model(str(folder)).model)):
        edit(folder / "generation_config.json", **usual)
        config = read(folder).generation_config
        assert {name: getattr(config, name) for name in usual} == usual


@pytest.mark.slow
def test_a_file_of_40_gigabytes_is_not_read(saved: Path, dense: Path, tmp_path: Path) -> None:
    folders = []
    for name in ("config.json", DIGESTS, "tokenizer.json"):
        for source in (saved, dense):
            folders.append(tmp_path / f"{name}-{source.name}")
            shutil.copytree(source, folders[-1])
            sparse(folders[-1] / name, HUGE)
    status, printed, errors = run_limited(READ_ALL, *folders)
    assert (status, errors) == (0, "")
    lines = printed.splitlines()
    assert len(lines) == 3 * len(folders)
    assert all(re.match(r"(Checkpoint|Model)Error .*(bytes|no config)", line) for line in lines)


EMPTY = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'


@pytest.mark.parametrize(
    ("names", "message"), [(range(300_000), r"commas, more than 500,000"), ("aa", "the key 'a' is there twice")]
)
def test_tensors_that_are_too_many_or_named_twice_are_refused(names: Any, message: str, saved: Path) -> None:
    header = ("{" + ",".join(f'"{name}":{EMPTY}' for name in names) + "}").encode()
    (saved / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    for opened in OPENERS.values():
        with pytest.raises(CheckpointError, match=message):
            opened(saved)
    (saved / "config.json").write_text('{"gac": [' + "0," * 1_000_000 + "0]}")
    with pytest.raises(CheckpointError, match=r"commas, more than 500,000"):
        gac.load(saved)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "notes.txt"])
def test_a_pipe_beside_dense_weights_is_not_waited_for(name: str, dense: Path) -> None:
    (dense / name).unlink(missing_ok=True)
    os.mkfifo(dense / name)
    with pytest.raises(ModelError, match=r"not a regular file|is a pipe or a device"):
        load_model(str(dense))


@pytest.mark.parametrize("name", ["x" * 5000, "a\x00b", "x/" * 3000])
def test_a_name_that_no_file_system_allows_is_refused(name: str) -> None:
    for read in (gac.load, gac.verify, load_config, load_model, load_tokenizer):
        with pytest.raises(GacError):
            read(name)


# --- configs that open and do not run ---------------------------------------------------------------------------------

WRONG_FIELDS = [
    ("layer_types", ["nonsense"] * 2),
    ("layer_types", ["sliding_attention"] * 2),
    ("layer_types", ["full_attention"]),
    ("layer_types", [None, None]),
    ("rope_parameters", {"rope_type": "nonsense", "rope_theta": 1e4}),
    ("rope_parameters", {"rope_type": "linear", "factor": "x", "rope_theta": 1e4}),
    ("rope_scaling", []),
    ("hidden_act", "nonsense"),
    ("hidden_size", -64),
    ("vocab_size", 0),
    ("num_attention_heads", "4"),
    ("head_dim", True),
    ("intermediate_size", 1.5),
    ("sliding_window", -1),
    ("attention_dropout", 2),
]


WRONG_GENERATION = [
    ("eos_token_id", [2, "3"]),
    ("pad_token_id", 1.5),
    ("pad_token_id", 2**40),
    ("suppress_tokens", ["a"]),
    ("max_new_tokens", "20"),
    ("num_beams", True),
    ("temperature", "0.7"),
    ("top_p", [0.9]),
    ("do_sample", "false"),
]


@pytest.mark.parametrize(
    ("file", "fields"),
    [("config.json", [*WRONG_FIELDS, *WRONG_GENERATION]), ("generation_config.json", WRONG_GENERATION)],
)
def test_what_cannot_run_is_refused(file: str, fields: list[tuple[str, Any]], saved: Path, dense: Path) -> None:
    (saved / DIGESTS).unlink()
    texts = {folder: (folder / file).read_text() for folder in (saved, dense)}
    for field, value in fields:
        for folder, text in texts.items():
            (folder / file).write_text(text)
            edit(folder / file, **{field: value})
        named = f"{field} is .*, and not " if (field, value) in WRONG_GENERATION else field
        named = "sliding_window|layer_types" if value == ["sliding_attention"] * 2 else named
        with pytest.raises(CheckpointError, match=named):
            gac.load(saved)
        for read in (load_config, load_model):
            with pytest.raises(ModelError, match=named):
                read(str(dense))

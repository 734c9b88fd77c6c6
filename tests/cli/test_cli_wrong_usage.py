"""Wrong usages, and what is said of each: at once, before weights are read, the network is asked or a GPU is needed."""

import json
import os
import shlex
import socket
import subprocess
import sys
from importlib.util import find_spec
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import gpu_aligned_compression
from gac.checkpoint.target import complete_directory
from gac.cli import main
from gac.core.errors import CheckpointError, GacError
from gac.core.io import complete_file, destination
from gac.forms import FORMS
from tests.cli.commands import refused, run

H100 = "nvidia-h100-80gb-hbm3"
USAGE, ERROR = 2, 1
NO_MODELS = ("é", "model-", "a--b", "a/b/c", "a" * 300, "org/" + "b" * 300, "no/such/directory")
OF_MODELS = ("frontier", "eval", "bench", "profile --model", "graph", *(["tokens"] if find_spec("kvpress") else []))

TABLE = [
    # limits that the table cannot serve, and names that are misspelt
    ("allocate MODEL --latency prefil:1x1024=0.9", ERROR, "workload 'prefil:1x1024'; expected prefill:BxS or decode"),
    ("allocate smollm2 --memory 0.3 --scheme w4a16 --latency 0.9", ERROR, "with scheme w4a16, which the profile does"),
    ("allocate MODEL --scheme w4a16,w8a16", ERROR, "Give each name by itself."),
    ("allocate MODEL --seed -1", ERROR, "Measure(seed=-1); expected a whole number, 0 to"),
    ("allocate MODEL --check-text none.txt", ERROR, "text 'none.txt' is neither known nor a file"),
    ("allocate MODEL --profile nvidia-h1000", ERROR, f"Did you mean '{H100}'?"),
    ("allocate MODEL --calibration wiki-sample:4", ERROR, "expected wiki-sample, or wiki-sample:WINDOWSxTOKENS. Ask"),
    ("graph llama-3-8b --form token", ERROR, f"{[*FORMS.names][-1]}, tokens. Did you mean 'tokens'?"),
    # names of models that are no ids of the hub
    *((f"allocate {name}", ERROR, f"model {name!r}: no such directory; expected a directory") for name in NO_MODELS),
    *((f"{command} é", ERROR, "model 'é': no such directory; expected a directory") for command in OF_MODELS),
    ("allocate smolm2", ERROR, "Did you mean 'smollm2'?"),
    ("eval smolm2", ERROR, "Did you mean 'smollm2'?"),
    ("eval llama-3-8b", ERROR, "Of llama-3-8b the shapes alone are known"),
    # a GPU is asked for when all else is right
    ("bench --shapes llama-3-8c", ERROR, "Did you mean 'llama-3-8b'?"),
    ("bench --shapes llama-3-8b --scheme w4a16 --head w4a16", ERROR, "no price of rounding a head to w4a16 is known"),
    ("bench --shapes llama-3-8b --kv-cache 0.5 --form head_dim", ERROR, "no loss curve of the form head_dim is known"),
    # options that would do nothing
    ("eval m --limit 3", USAGE, "--limit goes with --tasks."),
    ("profile --collectives --model smollm2", USAGE, "--model goes without --collectives, in a second run"),
    ("eval m --no-kl", USAGE, "--kl goes with --against."),
    ("eval m --windows none", USAGE, "'none' is not a valid number, or all."),
    ("eval m --windows 0", USAGE, "0 is not in the range x>=1."),
    ("eval m --tasks piqa --windows 3", USAGE, "--windows goes with --text."),
    ("bench --shapes llama-3-8b --kv-cache 0.5", USAGE, "--kv-cache and --form go together."),
    ("bench --shapes llama-3-8b --form latent:1 --kv-cache 1 --scheme fp8", USAGE, "--kv-cache goes without --scheme."),
    # counts that nothing reaches
    (f"profile --passes {10**40}", USAGE, "is not in the range 1<=x<=10000."),
    # command lines that click refuses
    ("allocate MODEL --budget most", ERROR, "limits.params='most'; expected a number above 0 and at most 1, or a size"),
    ("allocate MODEL --memory 6B", ERROR, "limits.memory='6B'; expected a number above 0 and at most 1, or a size of"),
    ("allocate smollm2 --memory 40MB", ERROR, "memory='40MB', of the whole model; expected more than 56,693,376 bytes"),
    ("allocate smollm2 --budget 30M", ERROR, "or more, or allow more forms"),
    ("allocate m --latency prefill:1x1", USAGE, "'prefill:1x1' is not like 0.85 or prefill:1x1024=0.85."),
    ("allocate m --latency 1 --latency decode:1@1=1", USAGE, "give one fraction for all workloads"),
    ("allocate m --no-align --align-to 16", USAGE, "--align-to goes without --no-align."),
    ("bench", USAGE, "give models, or --shapes."),
    ("bench m --turns 2", USAGE, "--turns goes with --engine vllm."),
    ("bench m --plot f.svg", USAGE, "--plot goes with --engine vllm."),
    ("bench m --engine vllm --compiled", USAGE, "--compiled goes with --engine transformers."),
    ("bench m --engine vllm --plot f.svg", USAGE, "--plot goes with --against"),
    ("bench m --engine vllm --tokens 8 --workload decode:1@8", USAGE, "--tokens goes without --workload"),
    ("bench --engine vllm", USAGE, "give models: gac bench DIR --against DENSE --engine vllm."),
    ("bench MODEL --engine vllm --engine-option model=m", ERROR, "engine option 'model=m', whose name GAC sets"),
    ("bench MODEL --engine vllm --workload decode:1@9999", ERROR, "with sequences of 10,064 tokens; expected work"),
    ("bench --shapes llama-3-8b --against smollm2", USAGE, "--against goes with models"),
    ("cliffs", USAGE, "Missing argument 'PROFILE'."),
    ("cliffs p --shape m", USAGE, "'m' is not like m=1024,k=4096."),
    ("cliffs p --shape m=0", USAGE, "'m=0' has a size outside 1 to 9223372036854775807."),
    ("cliffs p --dims 1016", USAGE, "'1016' is not like 1016:1040."),
    ("cliffs p --dims 1040:1016", USAGE, "'1040:1016' ends before it begins."),
    ("compare a.json b.json a.json", USAGE, "a.json is given more than once. Name each file once."),
    ("eval m --tasks piqa,", USAGE, "'piqa,' is not like hellaswag,piqa or task.yaml."),
    ("profile --seconds nan", USAGE, "nan is not a number."),
    ("study --profile p", USAGE, "--profile judges studies: name them, or give --all."),
    # directories in use
    ("compress m --plan p -o / --overwrite", ERROR, "/ exists and is no compressed checkpoint"),
    ("export d -o USED", ERROR, "holds a compressed checkpoint; expected a new or empty directory. Choose another dir"),
]


@pytest.fixture
def places(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What stands for a model and a checkpoint; reading weights and asking the hub fail the test."""

    never = Mock(side_effect=AssertionError("long work"))
    for called in ("requests.Session.request", "httpx.Client.send"):
        if called.partition(".")[0] in sys.modules:
            monkeypatch.setattr(called, never)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", never)
    monkeypatch.chdir(tmp_path)
    (used := tmp_path / "used").mkdir()
    (used / "config.json").write_text('{"gac": {}}')
    return {"MODEL": str(directory), "USED": str(used)}


@pytest.mark.parametrize(("words", "status", "message"), TABLE, ids=[row[0] for row in TABLE])
def test_a_wrong_usage(words: str, status: int, message: str, places: dict[str, str]) -> None:
    given = [places.get(word, word) for word in shlex.split(words)]
    result = run(*given)
    assert (result.exit_code, result.stdout) == (status, ""), result.output
    assert message in result.stderr
    as_json = run(*given, "--json")
    assert as_json.exit_code == status
    [error] = json.loads(as_json.stdout).values()
    assert set(error) == {"given", "expected", "remedy"}
    assert message.rstrip(".") in f"{error['given']}; expected {error['expected']}. {error['remedy']}"


@pytest.mark.parametrize(
    ("words", "given", "usage"),
    [
        ("squeeze", "No such command 'squeeze'", "gac [OPTIONS] COMMAND [ARGS]..."),
        ("--wat", "No such option '--wat'", "gac [OPTIONS] COMMAND [ARGS]..."),
        ("cliffs p --dims 5", "Invalid value for '--dims': '5' is not like 1016:1040", "gac cliffs [OPTIONS] PROFILE"),
        ("plot latency", "Missing argument 'PROFILE'", "gac plot latency [OPTIONS] PROFILE"),
    ],
)
def test_what_cannot_be_parsed_is_told_in_json(words: str, given: str, usage: str) -> None:
    result = run(*words.split(), "--json")
    assert (result.exit_code, result.stderr) == (2, "")
    command = usage.partition(" [")[0]
    expected = {"given": given, "expected": usage, "remedy": f"See {command} --help."}
    assert json.loads(result.stdout) == {"error": expected}


def test_without_a_network_or_a_gpu_it_is_said_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", Mock(side_effect=ConnectionError("no route")))
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    monkeypatch.chdir(tmp_path)
    result = run("eval", "smal", "--windows", "1")
    assert result.exit_code == ERROR
    assert "model 'smal': no such directory, and the hub cannot be reached (no route)" in result.stderr
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("bench", "--shapes", "llama-3-8b", "--scheme", "w4a16")
    assert result.exit_code == ERROR
    assert "expected an NVIDIA GPU to measure. Run it where there is one. On a CPU gac eval measures" in result.stderr


def test_a_home_that_is_a_file_is_refused(directory: Path, text_file: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    result = run("allocate", directory, "--calibration", f"{text_file}:4x64", "-o", tmp_path / "plan.json")
    assert result.exit_code == ERROR
    assert "saved results cannot be written to" in result.stderr
    assert "a writable place with room, which GAC_HOME names" in result.stderr


def test_no_bars_in_a_file_and_no_notes_with_quiet(directory: Path, text_file: Path, tmp_path: Path) -> None:
    words = ("allocate", directory, "--calibration", f"{text_file}:4x64", "-o", tmp_path / "plan.json")
    said = run(*words).stderr
    assert f"saved as {tmp_path / 'plan.json'}\n" in said
    assert "\r" not in said
    result = run(*words, "--quiet")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "GAC plan for" in result.stdout
    assert run("export", "none", "-o", "new", "--quiet").stderr.startswith("Error: ")


def _process(words: str) -> subprocess.CompletedProcess[str]:
    command = f"{shlex.quote(sys.executable)} -m gac {words}"
    return subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)


def test_a_closed_standard_output_is_an_error() -> None:
    result = _process("study --json >&-")
    assert (result.returncode, result.stderr.startswith("Error: standard output is closed")) == (ERROR, True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
@pytest.mark.parametrize("words", ["report -h", "study"])
def test_a_full_standard_output_is_an_error(words: str) -> None:
    result = _process(f"{words} >/dev/full")
    assert result.returncode == ERROR
    assert result.stderr == "Error: the answer cannot be written: No space left on device\n"


def test_a_closed_standard_error_and_an_output_of_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    result = _process("study --json 2>&-")
    assert result.returncode == 0
    assert json.loads(result.stdout)["studies"]
    stream = TextIOWrapper(BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setattr(main, "callback", lambda: print("é"))
    with pytest.raises(SystemExit) as ended:
        main(["profiles", "--help"])
    stream.flush()
    assert (ended.value.code, b"\\xe9\n" in stream.buffer.getvalue()) == (0, True)  # type: ignore[attr-defined]


def test_an_early_interrupt_has_no_traceback(monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    interrupted = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(main, "invoke", interrupted)
    result = run("profiles")
    assert (result.exit_code, result.stderr.strip()) == (130, "Interrupted.")
    monkeypatch.setattr(gpu_aligned_compression, "_other_tool", interrupted)  # while it loads
    monkeypatch.setattr("sys.argv", ["gac", "--version"])
    with pytest.raises(SystemExit) as ended:
        gpu_aligned_compression.main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "\nInterrupted.\n")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


SPECIAL = {"fifo": os.mkfifo, "socket": _socket, "link": lambda path: os.symlink("/dev/null", path)}
WRITES_FILE = ("allocate m", "frontier m", "report plan.json", "eval m", "profile", "study gemm-k", "plot published")
WRITES_DIRECTORY = ("compress m --plan p", "repair d", "export d")
COMMANDS = [*WRITES_FILE, *WRITES_DIRECTORY]
KINDS = [*((command, "fifo") for command in COMMANDS), ("allocate m", "socket"), ("export d", "link")]


@pytest.mark.parametrize(("command", "kind"), KINDS)
def test_what_is_no_file_is_refused(command: str, kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    target = Path("out.svg")
    SPECIAL[kind](target)
    before = target.lstat()
    what = "directory" if command in WRITES_DIRECTORY else "regular file"
    assert f"out.svg: it exists and is no {what}; expected a writable path" in refused(*command.split(), "-o", target)
    assert (target.lstat().st_ino, target.lstat().st_mode) == (before.st_ino, before.st_mode)
    target.unlink()
    result = run(*command.split(), "-o", "-")
    assert (result.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert "'-' names no file. Name one; with --json, the answer is on standard output." in result.stderr


def test_a_file_or_directory_is_written_where_symlinks_lead(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    file, link, second = tmp_path / "far" / "plan", tmp_path / "link", tmp_path / "second"
    link.symlink_to(file)
    second.symlink_to("link")
    for text in ("first", "again"):  # at first there is no file
        with complete_file(second, "plan") as temporary:
            assert temporary.parent == file.parent
            temporary.write_text(text)
        assert (file.read_text(), link.readlink(), second.readlink()) == (text, file, Path("link"))
    (tmp_path / "empty").mkdir()
    (directory := tmp_path / "directory").symlink_to("empty")
    with complete_directory(directory) as part:
        (part / "file").touch()
    assert ((tmp_path / "empty" / "file").exists(), directory.is_symlink()) == (True, True)


def test_symlinks_in_a_circle_and_devices_are_refused(tmp_path: Path) -> None:
    (link := tmp_path / "link").symlink_to(link)
    with pytest.raises(GacError, match="plan cannot be written"), complete_file(link, "plan"):
        pass
    with pytest.raises(FileExistsError, match="it exists and is no regular file"):
        destination(Path("/dev/null"))
    with pytest.raises(CheckpointError, match="cannot be written"), complete_directory(link):
        pass

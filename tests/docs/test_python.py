"""Python on a page runs on a tiny model; what cannot run here is parsed, and its arguments looked up."""

import ast
import functools
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pages import PAGES, QUOTES, ROOT, blocks, commands, is_quoted_from
from test_pages import RUN
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import gac
from gac.plan.recipe import KEYWORDS
from tests.cli.commands import run

BLOCKS = [(page, block) for page, text in PAGES.items() for block in blocks(text, "python")]
ELSEWHERE = ("openai", "peft", "tasks=", "Family(", "device_map", "torchrun")
"""What marks a block that needs a server, a package, processes, a network or a name of its own: other tests run those.
"""


def runnable(block: str) -> bool:
    return not any(mark in block for mark in ELSEWHERE)


@pytest.mark.parametrize(("page", "block"), BLOCKS)
def test_arguments_exist(page: str, block: str) -> None:
    """Every ``gac.NAME(...)`` names a function of GAC with arguments that it takes."""
    for call in ast.walk(ast.parse(block)):
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("gac.") and call.keywords:
            taken = inspect.signature(functools.reduce(getattr, ast.unparse(call.func).split(".")[1:], gac)).parameters
            known = {*taken, *(KEYWORDS if "options" in taken else ())}
            assert {keyword.arg for keyword in call.keywords} <= known, ast.unparse(call)


def test_every_public_name_is_on_a_page() -> None:
    pages = "".join(PAGES.values())
    assert [name for name in gac.__all__ if not re.search(rf"[.`]{name}\b|import [\w, ]*{name}\b", pages)] == [
        "__version__"
    ]


@pytest.fixture
def folder(
    tiny_model: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    prose: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A folder with the repository's notebooks and, under the names of the pages, a tiny model and text."""
    for saved in (tiny_model, tiny_tokenizer):
        saved.save_pretrained(tmp_path / "tiny")
    for name, text in (("prose", prose), ("notes", prose[1:] + prose[:1]), ("more-notes", "a < b; c > d. " * 500)):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    os.symlink(ROOT / "notebooks", tmp_path / "notebooks")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def at_hand(source: str) -> str:
    """The tiny model and its text instead of those that are packaged or downloaded."""
    source = re.sub(r"\bsmollm2\b", "tiny", source)
    source = re.sub(r"\b(wiki-sample|wikitext2|c4):\d+x\d+", "prose.txt:4x64", source)
    source = re.sub(r"^wiki-sample$", "prose.txt", source)
    source = re.sub(r"\bnotes.txt:\d+x\d+", "notes.txt:2x64", source)
    return re.sub(r'"(wiki-sample|wikitext2|c4)", windows=\d+', '"prose.txt", windows=2, length=64', source)


def quote_at_hand(quote: str) -> str:
    return at_hand(quote).replace("on wiki-sample:", "on prose.txt:").replace("on self:", "on notes.txt:")


def with_own_text(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """The call with the text at hand where it names none."""
    return function(*arguments, **({} if "recipe" in keywords else {"calibration": "prose.txt:4x64"}) | keywords)


@pytest.mark.parametrize("page", sorted({page for page, block in BLOCKS if runnable(block)}))
def test_python_runs(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("allocate", "frontier"):
        monkeypatch.setattr(gac, name, functools.partial(with_own_text, getattr(gac, name)), raising=False)
    gac.save(gac.compress("tiny", gac.allocate("tiny")), folder / "saved")
    os.symlink("saved", folder / "small")
    for block in blocks(PAGES[page], "python"):
        if runnable(block):
            if "gac.save(" in block:
                (folder / "small").unlink()
            names: dict[str, Any] = {}
            exec(compile(at_hand(block), page, "exec"), names)


WORKFLOW = ("allocate", "compress", "eval", "export", "frontier", "report", "compare", "verify")
NOT_HERE = re.compile(
    r"--(gguf|latency(?! any)|one-row|tasks|limit)"
    r"|\b(wikitext2|smaller|plain|notebooks|frontier\.json --plot again)\b"
)


def workflow() -> dict[str, list[list[str]]]:
    """The lines that can run on the tiny model, each on the first page that has it."""
    seen: set[str] = set()
    found: dict[str, list[list[str]]] = {}
    for page, text in PAGES.items():
        for words in commands(text):
            line = " ".join(words)
            is_general = any(word.isupper() for word in words)  # as in ``gac allocate DIR``
            if words[0] in WORKFLOW and line not in seen and not is_general and not NOT_HERE.search(line):
                found.setdefault(page, []).append(words)
            seen.add(line)
    return found


def test_every_quote_is_of_a_command_that_runs() -> None:
    run_here = {*RUN, *(tuple(words) for lines in workflow().values() for words in lines)}
    assert [" ".join(words) for words in QUOTES if words not in run_here] == []


@pytest.mark.parametrize(("page", "lines"), workflow().items())
def test_commands_run(page: str, lines: list[list[str]], folder: Path) -> None:
    plan = ("allocate", "tiny", "--calibration", "prose.txt:4x64", "-o", "plan.json")
    assert run(*plan).exit_code == 0
    if any("small" in words and words[0] != "compress" for words in lines):
        assert run("compress", "tiny", "--plan", "plan.json", "-o", "small").exit_code == 0
    for words in lines:
        text = {"allocate": ["--calibration", "prose.txt:4x64"], "eval": ["--text", "prose.txt", "--length", "64"]}
        text["frontier"] = text["allocate"]
        if "kv_bits" in words:  # whose last tokens are not rounded
            text["allocate"] = ["--calibration", "prose.txt:4x256"]
        quoted = QUOTES.get(tuple(words), [])
        if quoted and words[0] == "allocate":
            text["allocate"] = [*text["allocate"], "--calibration", "notes.txt:4x64"]
        if "--recipe" in words:
            gac.Recipe.of(calibration="prose.txt:4x64").save("recipe.json")
            text["allocate"] = []
        replace = ["--overwrite"] if words[0] == "compress" else []
        asked = text.get(words[0], [])
        asked = asked[2:] if asked and asked[0] in words else asked
        line = [at_hand(word) for word in words] + asked + replace
        result = run(*line)
        assert result.exit_code == 0, (line, result.output)
        for quote in map(quote_at_hand, quoted):
            assert is_quoted_from(result.output, quote, any_number=True), (line, result.output)

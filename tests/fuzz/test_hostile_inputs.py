"""Whatever a file or a name holds, it is read or refused with a GacError: no crash, no hang, bounded memory."""

import json
import random
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gac.core.errors import PlanError, ProfileError
from gac.core.untrusted import UnsafeJsonError, parse_strictly
from gac.plan.plan import Plan
from gac.profiling.table import Profile
from tests.cli.commands import refused
from tests.fuzz.hostile import spoiled
from tests.fuzz.targets import TARGETS, survives

CORPUS = Path(__file__).parent / "corpus"
KEPT = sorted(CORPUS.glob("*/*"))
PLAN = (CORPUS / "plan" / "changed").read_bytes()
PROFILE = (CORPUS / "profile" / "small").read_bytes()
FIRST = ("plan/changed", "plan/head_dim", "frontier/small", "profile/small", "report/small", "config/small")
WEIGHT = "sites.0.weights.0.weight"


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_kept_corpus_is_read_or_refused(path: Path) -> None:
    survives(path.parent.name, path.read_bytes())


@pytest.mark.parametrize("name", FIRST)
def test_the_first_inputs_are_read(name: str) -> None:
    assert survives(name.partition("/")[0], (CORPUS / name).read_bytes())


@pytest.mark.parametrize("target", TARGETS)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(target: str, data: bytes) -> None:
    survives(target, data)


@pytest.mark.parametrize("target", ["profile", "plan", "frontier", "checkpoint", "report", "config"])
@given(st.integers(0, 2**32))
def test_documents_with_wrong_values_are_read_or_refused(target: str, seed: int) -> None:
    draw = random.Random(seed)
    first = [path for path in KEPT if path.parent.name == target and len(path.name) < 12]
    survives(target, spoiled(draw.choice(first).read_bytes(), draw))


# --- found by the fuzzer, or by looking where it would ---------------------------------------------------------------


def changed(path: str, value: Any) -> bytes:
    """The plan with one field changed."""
    document = json.loads(PLAN)
    *parents, last = path.split(".")
    place = document
    for key in parents:
        place = place[int(key) if key.isdigit() else key]
    place[last] = value
    return json.dumps(document).encode()


def swapped(old: bytes, new: bytes) -> bytes:
    """The profile with something else in one place."""
    assert old in PROFILE
    return PROFILE.replace(old, new, 1)


def rejoined() -> bytes:
    """The profile with lines that only make sense together."""
    lines = PROFILE.split(b"\n")
    lines[4:6] = [lines[4][:-1], lines[5][1:] + b"," + lines[5]]
    return b"\n".join(lines)


SAMPLES = b'"samples": 10'
AXES = b"".join(b'"a%d": 1, ' % number for number in range(5_000))
WRONG: dict[str, list[tuple[bytes, str]]] = {
    "plan": [
        (PLAN.replace(b'"seed":0', b'"seed":1,"seed":0'), "plan: the key 'seed' is there twice;"),
        (changed("seed", 10**400), "plan: seed: an integer beyond 2**62;"),
        (changed("model", "\u202egpj"), "plan: 'model' holds a control character: '\\u202egpj';"),
        (changed("sites", []), "plan has no sites; "),
        (changed("measured.calibration.windows", -1), "plan has measured.calibration.windows=-1;"),
        (changed(f"{WEIGHT}.out_features", 0), "weight model.layers.0.self_attn.q_proj is 0 x 64 with 1 "),
        (changed("sites.0.weights.0.form", "narrow"), "weight model.layers.0.self_attn.q_proj has the form narrow;"),
        (changed("sites.0.weights.0.form", "latent:" + "9" * 5000), "form latent:999"),
        (b"[" * 100_000, "plan: Invalid JSON: maximum recursion depth exceeded"),
    ],
    "profile": [
        (swapped(SAMPLES, b'"samples": 10, "samples": 11'), "profile:5: the key 'samples' is there twice;"),
        (swapped(SAMPLES, b'"samples": 11, "sample\\u0073": 10'), "profile:5: the key 'samples' is there twice;"),
        (swapped(SAMPLES, b'"samples": 1' + b"0" * 30), "profile:5: samples: Expected `int` <= 1125899906842624"),
        (swapped(b"[[2, 132, 1, 1]", b"[[2.0, 132, 1, 1]"), "profile:6: launches[0][0]: Expected `int`, got `float`"),
        (swapped(b'"low_rank"', b'"\\u001b[2J"'), "profile:5: 'operator' holds a control character: '\\x1b[2J'"),
        (swapped(b'"launches": [', b'"launches": [' + b"0," * 5_000_000), "profile:5: a line of over 1,048,576 bytes"),
        (swapped(b'"shape": {', b'"shape": {' + AXES), "profile:5: shape: Expected `object` of length <= 16"),
        (swapped(b'"no GPU"', b'"no\n{GPU"'), "profile:12: the line: Invalid JSON"),
        (rejoined(), "profile:5: the line: Invalid JSON"),
    ],
}


@pytest.mark.parametrize(
    ("target", "data", "message"),
    [(target, *case) for target, all_of_it in WRONG.items() for case in all_of_it],
    ids=[case[1][:40] for all_of_it in WRONG.values() for case in all_of_it],
)
def test_a_file_that_cannot_be_is_refused(target: str, data: bytes, message: str) -> None:
    with pytest.raises({"plan": PlanError, "profile": ProfileError}[target], match=f"^{re.escape(message)}"):
        TARGETS[target](data)


LARGE = '{"models": [{"log_ratio": 1e308, "predicted_perplexity": 1, "perplexity": {"text": "t", "value": 1}}]}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "report r.json cannot be read: Invalid JSON: maximum recursion depth exceeded"),
        (LARGE, "r, t: predicted 1e+308, measured 1e+308; expected finite losses"),
        ("0," * 2_000_001, "report r.json cannot be read: 2,000,001 commas, more than 2,000,000"),
        ("\udcff", "report r.json cannot be read: Invalid JSON: 'utf-8' codec can't decode byte 0xff"),
    ],
    ids=["levels", "large", "commas", "bytes"],
)
def test_a_report_that_cannot_be_is_refused(text: str, message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert message in refused("plot", "prediction", "r.json", "-o", "x.png")


# --- limits ----------------------------------------------------------------------------------------------------------

HUGE: dict[str, Callable[[], bytes]] = {
    "a billion entries": lambda: PLAN.replace(b'"sites":[', b'"sites":[' + b"0," * 20_000_000),
    "many levels": lambda: PLAN.replace(b'"tiny"', b"[" * 20_000_000),
    "a late repeated key": lambda: PLAN.replace(b'"sites":[', keys(900_000) + b'"z":1,"z":1,"sites":['),
    "many entries far down": lambda: PLAN.replace(b'"tiny"', b"[" * 900 + b"0," * 1_900_000 + b"0" + b"]" * 900),
}


def keys(count: int) -> bytes:
    return b"".join(b'"%d":1,' % number for number in range(count))


def limited() -> None:
    """3 GB of address space (the interpreter and its libraries included), 30 s of processor time."""
    resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))
    resource.setrlimit(resource.RLIMIT_CPU, (30, 30))


def run_limited(code: str, *paths: Path) -> tuple[int, str, str]:
    command = [sys.executable, "-c", code, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limited, check=False)
    return done.returncode, done.stdout, done.stderr


def test_many_lines_about_few_rows_are_read_in_time(tmp_path: Path) -> None:
    first, *rows = PROFILE.split(b"\n")[:5]
    shapes = [rows[-1].replace(b'"r": 1022', f'"r": {rank}'.encode()) for rank in range(1, 40_001)]
    timed = [b'{"record": "sentinel", "row": 0, "median_ns": 9.5}'] * 200_000
    lost = [f'{{"record": "lost", "row": {row}, "error": "no GPU"}}'.encode() for row in range(40_000)]
    (tmp_path / "p.jsonl").write_bytes(b"\n".join([first, *rows[:-1], *shapes, *timed, *lost, b""]))
    code = (
        "import sys\nfrom gac.profiling.table import Profile\nfound = Profile.load(sys.argv[1])\n"
        "print(len(found.measurements), len(found.failed), sum(map(len, found.sentinels.values())))"
    )
    assert run_limited(code, tmp_path / "p.jsonl") == (0, "40000 40000 200000\n", "")


def test_what_never_ends_and_a_profile_of_a_terabyte_are_not_read_to_the_end(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="plan /dev/zero is larger than 268,435,456 bytes"):
        Plan.load("/dev/zero")
    with (tmp_path / "p.jsonl").open("wb") as file:
        file.truncate(2**40)  # takes no room on the disk
    with pytest.raises(ProfileError, match=r"p\.jsonl:1: a line of over 1,048,576 bytes"):
        Profile.load(tmp_path / "p.jsonl")


@pytest.mark.parametrize("name", HUGE)
def test_a_huge_file_is_refused_in_seconds_and_bounded_memory(name: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(HUGE[name]())
    code = (
        "import sys\nfrom gac.core.errors import PlanError\nfrom gac.plan.plan import Plan\n"
        "try: Plan.load(sys.argv[1])\nexcept PlanError as failure: print(len(str(failure)) < 10_000)"
    )
    assert run_limited(code, tmp_path / "plan.json") == (0, "True\n", "")


def test_the_fuzzer_runs(tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    command = [sys.executable, str(CORPUS.parent / "run.py"), "plan", "--runs", "500", "--seed", "1"]
    command += ["--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "plan: seed 1\n" in done.stdout
    assert "stat::number_of_executed_units: 500" in done.stderr


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 4611686018427387904, "b": -4611686018427387904}', None),
        ('{"a": 0.00012345678901234567, "b": "12345678901234567890"}', None),
        ('{"a":\n\t4611686018427387905}', "a: an integer beyond 2**62"),
        ('{"a": 1' + "0" * 400 + "}", "a: an integer beyond 2**62"),
        ('{"a": NaN}', "a: nan, which is no finite number"),
        ('[{"a": 1, "b": 2, "a": 1}]', "the key 'a' is there twice"),
        ('{"a": "\\u001b"}', "'a' holds a control character: '\\x1b'"),
        ('{"a": "' + "x" * 65537 + '"}', "a: a string of 65,537 characters"),
    ],
)
def test_what_no_file_of_ours_holds_is_seen(text: str, reason: str | None) -> None:
    for given_as in (text, text.encode()):
        if reason is None:
            parse_strictly(given_as)
        else:
            with pytest.raises(UnsafeJsonError, match=re.escape(reason)):
                parse_strictly(given_as)

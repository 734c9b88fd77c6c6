"""Fuzz a reader, guided by coverage: ``python tests/fuzz/run.py plan --seconds 600``. Needs ``pip install atheris``.

Half of the inputs are documents with some values changed, the others are libFuzzer's own mutations. It begins with the
kept corpus and adds to a folder of its own; what fails is left there as ``crash-*``, ``timeout-*`` or ``oom-*``. An
input that takes over 10 s fails too, and so does a process of over 4 GB: atheris 3.0 never frees what a comparison of
numpy arrays returns, about 2 KB a profile. It ends with the number of inputs, or at the first failure.
"""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import atheris

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

with atheris.instrument_imports(include=["gac"]):
    from tests.fuzz.hostile import spoiled
    from tests.fuzz.targets import TARGETS, survives


def mutate(data: bytes, largest: int, seed: int) -> Any:
    draw = random.Random(seed)
    if draw.random() < 0.5:
        return atheris.Mutate(data, largest)
    return spoiled(data, draw)[:largest]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", choices=list(TARGETS))
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--runs", type=int, default=-1, help="inputs at most; as many as there is time for by default")
    parser.add_argument("--seed", type=int, default=random.randrange(1, 2**31), help="drawn and printed by default")
    parser.add_argument("--folder", type=Path, default=Path("fuzzed"), help="for new inputs and for what fails")
    options = parser.parse_args()
    print(f"{options.target}: seed {options.seed}", flush=True)
    folder = options.folder / options.target
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [
        f"-seed={options.seed}",
        f"-runs={options.runs}",
        f"-max_total_time={options.seconds}",
        "-timeout=10",
        "-rss_limit_mb=4096",
        "-max_len=65536",
        f"-artifact_prefix={folder}/",
        "-print_final_stats=1",
        str(folder),
        str(HERE / "corpus" / options.target),
    ]
    void(options.target, b"")  # imports what it needs, which may take longer than an input
    atheris.Setup([sys.argv[0], *arguments], lambda data: void(options.target, data), custom_mutator=mutate)
    atheris.Fuzz()


def void(target: str, data: bytes) -> None:
    survives(target, data)


if __name__ == "__main__":
    main()

"""Seconds and memory of measuring, planning and compressing a random model of Llama-3-8B's shapes on one GPU.

    python tests/benchmarks/scale.py --output tests/benchmarks/results/scale.json

The model and its tokens are random; what runs is ``gac.allocate`` and ``gac.compress``. Parts are timed by functions of
the pipeline, with the GPU waited for on both sides; a part that begins with "of which" lies in the one above it.
With ``--schemes`` they are priced too, weights are rounded, and ``--memory`` limits the bytes.
``--layers 2 --windows 16`` is a first look. ``--shrink 64`` makes every dim smaller, for a CPU. A run that is cut short
goes on where it has a ``--home`` (37 GB on a disk for Llama-3-8B).
"""

import argparse
import functools
import hashlib
import os
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import gac
from gac.allocation import rules
from gac.compression import refit, rounding
from gac.forms import decomposition
from gac.forms.curvature import methods
from gac.forms.head_dim import torch as head_dim
from gac.forms.low_rank import torch as low_rank
from gac.forms.narrow import elimination
from gac.forms.narrow import torch as narrow
from gac.measurement import curves, layerwise, session, texts
from gac.measurement.text import Windows
from gac.models.loading import default_device
from gac.models.shapes import SHAPES
from gac.schemes import DEFAULT_SCHEME
from tests.benchmarks.harness import OPTIONS, options, write

VOCABULARY = 128_256
UNUSED = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({})))
"""The tokens are random."""
# Part, where its function is looked up, and the function's name.
PARTS: tuple[tuple[str, Any, str], ...] = (
    ("weights checked and digested", session, "check_plain"),
    ("weights checked and digested", session, "model_digest"),
    ("forward, loss", layerwise.LayerwiseBackward, "start"),
    ("layers backward, moments", layerwise.LayerwiseBackward, "through"),
    ("of which hidden states again", layerwise.LayerwiseBackward, "_inputs_of"),
    ("fit of the layers", curves, "fit_layer"),
    ("of which metrics", methods.Kfac, "metric"),
    ("of which low-rank decompositions", low_rank, "decompose"),
    ("of which of which eigh", decomposition, "eigh"),
    ("of which eliminations", narrow, "eliminate"),
    ("of which of which block updates", elimination._State, "update"),
    ("of which values", head_dim, "_shortened"),
    ("prices of rounding", curves, "_prices_of"),
    ("allocation", rules, "decide"),
    ("modules from factors", refit, "build_modules"),
    ("rounding for the dense model's inputs", refit, "store_all"),
    ("of which rounding", rounding, "store"),
    ("fitting again", refit, "refit"),
    ("of which rounding again", refit, "store"),
)


def main() -> None:
    asked = parser_of(__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="gac-scale-") as temporary:
        os.environ["GAC_HOME"] = str(asked.home or temporary)
        run(asked, Report(asked))


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """What the model, its text and its plan are like."""
    parser = options(description, "--output")
    parser.add_argument("--model", default="llama-3-8b", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, help="the model's own where not given")
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--budget", type=float, default=0.8)
    parser.add_argument("--memory", type=float)
    parser.add_argument("--schemes", nargs="*", default=[DEFAULT_SCHEME])
    parser.add_argument("--refit", default="none", choices=("none", "residual"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--home", type=Path, help="where factors are kept; a temporary directory where not given")
    return parser


class Report:
    """Seconds of every part so far; printed and written as they come, for a run may be cut short."""

    def __init__(self, asked: argparse.Namespace, silent: bool = False) -> None:
        self._output: Path | None = None if silent else asked.output
        self._silent = silent
        self.began = time.monotonic()
        self.seconds: dict[str, float] = {}
        named = {name: value for name, value in vars(asked).items() if not isinstance(value, Path)}
        self.result: dict[str, Any] = {"asked": named}

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        self.seconds.setdefault(part, 0.0)

        @functools.wraps(function)
        def run_timed(*args: Any, **kwargs: Any) -> Any:
            begun = now()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += now() - begun

        return run_timed

    def say(self, what: str, **more: Any) -> None:
        """One line, and the JSON as it stands."""
        self.result |= more
        memory = gpu_memory() | {"host_peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9}
        self.result |= {"seconds": self.seconds, "memory": memory, "elapsed": now() - self.began}
        write(self._output, **self.result)
        held = ", ".join(f"{name} {value:.1f}" for name, value in memory.items())
        if self._silent:
            return
        print(f"{now() - self.began:7.1f} s  {what}  [{held}]", flush=True)

    def parts(self) -> None:
        for part, seconds in self.seconds.items() if not self._silent else ():
            depth = part.count("of which ")
            print(f"  {'  ' * depth}{part.replace('of which ', ''):<{46 - 2 * depth}} {seconds:8.1f} s", flush=True)


def run(asked: argparse.Namespace, report: Report) -> None:
    model = model_of(asked)
    report.say(f"model of {sum(p.numel() for p in model.parameters()) / 1e9:.2f} billion parameters")
    prepare(asked, report, model.config.vocab_size)
    begun = now()
    plan = allocated(asked, report, model)
    schemes = Counter(weight.scheme for weight in plan.weights)
    forms = {form: sum(weight.form == form for weight in plan.weights) for form in ("dense", "low_rank", "narrow")}
    kept = sum(file.stat().st_size for file in Path(os.environ["GAC_HOME"]).rglob("*") if file.is_file())
    begun_compressing = now()
    gac.compress(model, plan, tokenizer=UNUSED, heal=0, progress=False)
    report.say(
        f"compressed, {forms}, {dict(schemes)}",
        schemes=schemes,
        compress_seconds=now() - begun_compressing,
        total_seconds=now() - begun,
        forms=forms,
    )
    report.parts()
    report.say(f"{kept / 1e9:.1f} GB kept on disk; {now() - begun:.1f} s in all", kept_gb=kept / 1e9)


def prepare(asked: argparse.Namespace, report: Report, vocabulary: int) -> None:
    """Random tokens for text, and every part of the pipeline timed."""
    ids = torch.randint(0, vocabulary, (asked.windows, asked.tokens), generator=torch.Generator().manual_seed(0))
    windows = Windows("wiki-sample", ids, hashlib.sha256(ids.numpy().tobytes()).hexdigest())
    texts.calibration_windows = lambda *_: windows  # type: ignore[assignment]
    for part, owner, name in PARTS:
        setattr(owner, name, report.timed(part, getattr(owner, name)))
    curves.background_writer = reporting_writer(report)  # type: ignore[assignment]


def allocated(asked: argparse.Namespace, report: Report, model: PreTrainedModel | Path) -> gac.Plan:
    begun = now()
    plan = gac.allocate(
        model,
        asked.budget,
        profile=OPTIONS["--profile"]["default"],
        calibration=f"wiki-sample:{asked.windows}x{asked.tokens}",
        tokenizer=UNUSED,
        refit=asked.refit,
        memory=asked.memory,
        schemes=asked.schemes,
        rotate=False,
        progress=False,
    )
    report.say("allocated", allocate_seconds=now() - begun, prediction=plan.prediction.loss)
    return plan


def reporting_writer(report: Report) -> Callable[[], Any]:
    """The writer of layers, timed, with a report after each."""
    opened = curves.background_writer

    @contextmanager
    def writer() -> Iterator[Callable[[Mapping[Path, Any]], None]]:
        with opened() as keep:
            store = report.timed("storing (to the host; waiting for the disk)", keep)

            def stored(files: Mapping[Path, Any]) -> None:
                store(files)
                report.say(f"{next(iter(files)).stem} stored")
                report.parts()

            yield stored

    return writer


def model_of(asked: argparse.Namespace) -> PreTrainedModel:
    """Random weights as transformers initialises them, made where they will be."""
    shapes = SHAPES[asked.model]
    sizes = asdict(shapes) | {
        "vocab_size": VOCABULARY // asked.shrink,
        "hidden_size": shapes.hidden_size // asked.shrink,
        "intermediate_size": shapes.intermediate_size // asked.shrink,
        "num_hidden_layers": asked.layers or shapes.num_hidden_layers,
        "head_dim": max(shapes.head_dim // asked.shrink, 2),
    }
    config = AutoConfig.for_model(**sizes, max_position_embeddings=8192, tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device(default_device()):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, asked.dtype)).eval()


def now() -> float:
    """Seconds once the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic()


def gpu_memory() -> dict[str, float]:
    if not torch.cuda.is_available():
        return {}
    return {
        "gpu_peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "gpu_reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
    }


if __name__ == "__main__":
    main()

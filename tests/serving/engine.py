"""Small compressed models beside vLLM: what ``generate`` of transformers writes, and what the engine does."""

import json
import os
import random
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from gac.forms import form_named
from gac.models.families import family_of
from gac.plan.plan import Plan
from gac.schemes import scheme_named
from tests.compression.compressed import compressed
from tests.compression.stored import stored
from tests.models.small import small_config, small_model

PYTHON = os.environ.get("GAC_VLLM", "")
needs_vllm = pytest.mark.skipif(not PYTHON, reason="needs an environment with vLLM: make test-vllm")
needs_torchvision = pytest.mark.skipif(
    not PYTHON
    or subprocess.run([PYTHON, "-c", "import torchvision"], capture_output=True, check=False).returncode != 0,
    reason="vLLM's multimodal classes need torchvision",
)
WORKER = Path(__file__).with_name("vllm_worker.py")
LAYERS, TOKENS = 6, 16
SCHEMES = ("w4a16:32", "w8a16", "w3a16:32", "w2a16:32", "w8a8", "fp8")
"""By layer."""
SOME = ("q_proj", "gate_proj", "gate_up_proj", "qkv_proj", "fc1", "c_fc", "c_attn", "query_key_value", "dense_h_to_4h")
EXACT = 1e-3
"""Difference of log probabilities in float32, of sums in another order."""


def changes(config: Any) -> dict[str, tuple[str, int]]:
    """A dense layer; pairs of some siblings, of the others, and of all weights; narrower MLPs; skipped blocks."""
    chosen = {}
    for site in family_of(config).sites(config):
        for weight in site.weights:
            some = weight.name.rpartition(".")[2] in SOME
            if site.layer in (1, 3) and some == (site.layer == 1):
                chosen[weight.name] = ("low_rank", 16)
            elif site.layer == 2 and weight.neurons:
                chosen[weight.name] = ("narrow", 96)
            elif site.layer == 4:
                chosen[weight.name] = ("narrow_pair:80", 24) if weight.neurons else ("low_rank", 24)
            elif weight.block and (site.layer, weight.neurons is None) in ((2, True), (5, False)):
                chosen[weight.name] = ("skip", 0)
    return chosen


def prompts() -> list[list[int]]:
    """Draw 20 prompts of 4 to 23 tokens."""
    draw = random.Random(0)
    return [[draw.randrange(3, 250) for _ in range(4 + index)] for index in range(20)]


@dataclass
class Request:
    """A compressed model in a directory, and how vLLM runs it.

    Attributes:
        name: of the files that vLLM's process writes beside the model.
        expected: ``tokens`` of ``generate``, their ``logprobs``, and ``rows`` of those of all tokens.
        config_class: ``module.Class`` of a config that transformers does not know.
        images: one for each prompt, where there are any.
    """

    directory: Path
    options: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, Any] = field(default_factory=dict)
    adapter: Path | None = None
    name: str = "answer"
    config_class: str = ""
    prompts: Sequence[list[int]] = ()
    images: Sequence[Path] = ()

    def sent(self) -> dict[str, Any]:
        options = {"dtype": "float32", "enforce_eager": True, **self.options}
        adapter = str(self.adapter) if self.adapter else None
        request = {"name": self.name, "directory": str(self.directory), "options": options, "adapter": adapter}
        images = [str(image) for image in self.images]
        given = {"prompts": self.prompts or prompts(), "images": images}
        return {**request, **given, "tokens": TOKENS, "config_class": self.config_class}

    @property
    def log(self) -> str:
        return (self.directory / f"{self.name}.log").read_text()

    def answer(self) -> dict[str, Any]:
        path = self.directory / f"{self.name}.json"
        assert path.exists(), self.log[-4000:]
        answer: dict[str, Any] = json.loads(path.read_text())
        return answer

    def gaps(self) -> list[float]:
        """Return for each sequence how much more probable the token of ``generate`` is where vLLM first wrote another.

        The difference of log probabilities is 0 where all tokens are equal.
        """
        gaps = []
        expected = zip(self.expected["tokens"], self.expected["rows"], strict=True)
        for written, (tokens, rows) in zip(self.answer()["tokens"], expected, strict=True):
            pairs = zip(written, tokens, rows, strict=True)
            gaps.append(next((float(row[token] - row[other]) for other, token, row in pairs if other != token), 0.0))
        return gaps

    def assert_same(self) -> None:
        """Fail unless vLLM wrote all tokens of ``generate``, with their probabilities, and cached what attends."""
        answer = self.answer()
        assert answer["caches"] == LAYERS - 1  # ``changes`` skips one attention
        assert answer["tokens"] == self.expected["tokens"], self.directory
        for logprobs, others in zip(answer["logprobs"], self.expected["logprobs"], strict=True):
            assert logprobs == pytest.approx(others, abs=EXACT)


def assert_served(requests: Iterable[Request], folder: Path) -> None:
    """Run vLLM on the models, and fail unless it wrote the tokens of ``generate`` for each."""
    requests = list(requests)
    serve(requests, folder)
    for request in requests:
        request.assert_same()


def serve(requests: Iterable[Request], folder: Path, environment: Mapping[str, str] = MappingProxyType({})) -> None:
    """Run vLLM on models, one after the other, with more variables in its environment; ``folder`` holds the list."""
    path = folder / "requests.json"
    path.write_text(json.dumps([request.sent() for request in requests]))
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    command = [PYTHON, str(WORKER), str(path)]
    done = subprocess.run(command, env={**inherited, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def small(model_type: str, **changed: Any) -> Any:
    """Make a small dense model of six layers."""
    return small_model(small_config(model_type, hidden_size=128, num_hidden_layers=LAYERS, **changed))


def save(model: Any, make_plan: Callable[..., Plan], folder: Path, **options: Any) -> Request:
    """Compress and save a model, in float32; ``options`` are vLLM's."""
    model = compressed(model, make_plan, changes(model.config)).float()
    model.save_pretrained(folder)
    return Request(folder, options, generate(model))


def in_schemes(
    model_type: str, make_plan: Callable[..., Plan], folder: Path, schemes: Sequence[str] = SCHEMES, **options: Any
) -> Request:
    """Save a model with the forms of ``changes``, each layer in a scheme; one has siblings of several."""
    model = small(model_type)
    forms, chosen = changes(model.config), {}
    for site in family_of(model.config).sites(model.config):
        for position, weight in enumerate(site.weights):
            form, dim = forms.get(weight.name, ("dense", form_named("dense").full(weight)))
            scheme = schemes[site.layer] if form != "skip" and (site.layer != 3 or position % 2) else "bf16"
            gemms = form_named(form).latency.gemms(weight, dim, 1)
            chosen[weight.name] = (form, dim, scheme if all(map(scheme_named(scheme).supports, gemms)) else "bf16")
    model = stored(model, make_plan, chosen).float()
    model.save_pretrained(folder)
    return Request(folder, options, generate(model))


def shorter_values(make_plan: Callable[..., Plan]) -> Any:
    """Compress a model to a form that vLLM does not run."""
    model = small_model(small_config("llama"))
    names = [f"model.layers.1.self_attn.{name}" for name in ("v_proj", "o_proj")]
    return compressed(model, make_plan, dict.fromkeys(names, ("head_dim", 8)))


def generate(model: Any) -> dict[str, Any]:
    """Return 16 greedy tokens after each prompt, their log probabilities, and those of all tokens."""
    tokens, logprobs, all_rows = zip(
        *(generate_from(model, input_ids=torch.tensor([ids])) for ids in prompts()), strict=True
    )
    return {"tokens": [*tokens], "logprobs": [*logprobs], "rows": [*all_rows]}


def generate_from(model: Any, **inputs: Any) -> tuple[list[int], list[float], Any]:
    """Return what ``generate`` says of one prompt."""
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    with torch.no_grad():
        done = model.generate(**inputs, **options)
    chosen = done.sequences[0, inputs["input_ids"].shape[1] :]
    rows = torch.cat(done.logits).float().log_softmax(-1)
    return chosen.tolist(), rows.gather(1, chosen[:, None])[:, 0].tolist(), rows

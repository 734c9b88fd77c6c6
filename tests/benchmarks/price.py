"""Where the price 1/2 tr(G E A E^T) of a compressed model goes wrong, by kind of weight (a GPU for real models).

    python tests/benchmarks/price.py --model gemma3-270m --output price.json

A plan of low-rank weights alone is made and not fitted again. Then, for the weights of each kind, on windows that were
calibrated on (``seen``) and on others (``held``), nats a token:

- ``priced``: what their curves say, with the factor that theory has (1/2);
- ``kfac``: that price with the moments of these windows themselves, not damped. More than ``priced`` on held windows:
  the plan was fitted to the text that it saw;
- ``tokens``: half the mean of (g' E x)^2 over the tokens. More than ``kfac``: errors are large where gradients are;
- ``windows``: half the mean, a token, of the square of its sum over a window and its weights of the kind. More than
  ``tokens``: errors of several tokens or layers add up (few windows make it noisy);
- ``divergence``: KL from the dense model with the weights of that kind replaced. More than ``windows``: the errors are
  too large for a second-order price.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import gac
from gac.allocation.decide import decide
from gac.compression.apply import merged
from gac.forms import form_named
from gac.measurement.runs import drawn_loss
from gac.measurement.text import calibration_windows, evaluation_windows
from gac.models.linears import linear_at
from gac.models.loading import load_model
from gac.models.modules import frozen, listening
from tests.benchmarks.harness import options, problem_of, write

Errors = Mapping[str, Tensor]


def main() -> None:
    parser = options(__doc__, "--model", "--calibration", "--profile", "--output")
    parser.add_argument("--budget", type=float, default=0.8)
    parser.add_argument("--windows", type=int, default=16, help="of each text")
    parser.set_defaults(model="gemma3-270m", profile="nvidia-h200")
    asked = parser.parse_args()
    loaded = load_model(asked.model)
    made = {"profile": asked.profile, "calibration": asked.calibration, "forms": ["low_rank"], "refit": "none"}
    problem = problem_of(loaded, **made)
    limits = replace(problem.recipe.limits, params=asked.budget)
    plan = decide(replace(problem, recipe=replace(problem.recipe, limits=limits))).plan
    errors = errors_of(loaded.model, plan, loaded.tokenizer)
    seen = calibration_windows(asked.calibration, loaded.tokenizer).ids
    seen = seen[:: max(1, len(seen) // asked.windows)][: asked.windows]
    held = evaluation_windows("wiki-sample", loaded.tokenizer, asked.windows, seen.shape[1]).ids
    priced: dict[str, float] = defaultdict(float)
    for choice in plan.weights:
        if choice.changed:
            curve = problem.curves.of(form_named(choice.form), choice.weight)
            assert curve is not None
            priced[kind(choice.name)] += curve.loss[choice.dim] * 0.5 / plan.measured.factor
    found: dict[str, dict[str, float]] = {}
    for name, windows in (("seen", seen), ("held", held)):
        for each, values in Prices(loaded.model, errors).of(windows).items():
            found.setdefault(each, {"priced": priced[each]}).update({f"{name} {k}": v for k, v in values.items()})
    for each, row in found.items():
        print(f"{each:16}", " ".join(f"{name} {value:.5f}" for name, value in row.items()), flush=True)
    write(asked.output, budget=asked.budget, windows=asked.windows, kinds=found)


def kind(name: str) -> str:
    return name.rpartition(".")[2]


def errors_of(model: Any, plan: gac.Plan, tokenizer: Any) -> Errors:
    """What compressing adds to each weight that changes."""
    small = gac.compress(copy.deepcopy(model), plan, tokenizer=tokenizer, heal=0)
    changed = [choice for choice in plan.weights if choice.changed]
    with torch.no_grad():
        return {
            choice.name: merged(choice, small.get_submodule(choice.name).state_dict())["weight"]
            - linear_at(model, choice.name).weight
            for choice in changed
        }


class Prices:
    """What errors of a model's weights cost on some windows, by kind and by way of counting."""

    def __init__(self, model: Any, errors: Errors) -> None:
        self._model, self._errors = model, errors
        self._tokens: dict[str, float] = defaultdict(float)
        self._windows: dict[str, float] = defaultdict(float)
        self._gradients: dict[str, Tensor] = {}
        self._moved: dict[str, Tensor] = {}
        self._weights: dict[str, float] = defaultdict(float)

    def of(self, windows: Tensor) -> dict[str, dict[str, float]]:
        for seed, ids in enumerate(windows):
            self._window(ids, seed)
        count = windows.numel()
        kfac: dict[str, float] = defaultdict(float)
        for name, gradients in self._gradients.items():
            kfac[kind(name)] += float((gradients * self._moved[name]).sum()) / (count * self._weights[name])
        return {
            each: {
                "kfac": kfac[each] / 2,
                "tokens": self._tokens[each] / count / 2,
                "windows": self._windows[each] / count / 2,
                "divergence": self._divergence(each, windows),
            }
            for each in kfac
        }

    def _window(self, ids: Tensor, seed: int) -> None:
        """Add one window; gradients are those of labels that the model draws, as in calibration."""
        summed: dict[str, float] = defaultdict(float)
        embedding = self._model.get_input_embeddings()
        heard = {name: partial(self._listen, summed, name) for name in self._errors}
        with frozen(self._model), torch.enable_grad(), listening(self._model, heard):
            starting = embedding.register_forward_hook(lambda _module, _args, output: output.requires_grad_(True))
            with starting:
                drawn_loss(self._model, ids, "a window", seed=seed)[1].backward()
        for each, total in summed.items():
            self._windows[each] += total**2

    def _listen(self, summed: dict[str, float], name: str, _module: nn.Module, args: Any, output: Tensor) -> None:
        x = args[0].detach()[0]
        output.register_hook(lambda gradients: self._add(summed, name, x, gradients[0]))

    def _add(self, summed: dict[str, float], name: str, x: Tensor, g: Tensor) -> None:
        moved = x @ self._errors[name].T
        changes = (g * moved).sum(1)
        self._tokens[kind(name)] += float(changes.square().sum())
        summed[kind(name)] += float(changes.sum())
        weights = g.norm(dim=1)
        self._weights[name] += float(weights.sum())
        self._gradients[name] = self._gradients.get(name, 0) + g.T @ g
        self._moved[name] = self._moved.get(name, 0) + (moved * weights[:, None]).T @ moved

    def _divergence(self, each: str, windows: Tensor) -> float:
        total = 0.0
        with torch.no_grad():
            for ids in windows.to(self._model.device):
                dense = self._model(ids[None]).logits[0].log_softmax(-1)
                with self._replaced(each):
                    ours = self._model(ids[None]).logits[0].log_softmax(-1)
                total += float((dense.exp() * (dense - ours)).sum(-1).mean())
        return total / len(windows)

    @contextmanager
    def _replaced(self, each: str) -> Iterator[None]:
        own = {name: linear_at(self._model, name).weight for name in self._errors if kind(name) == each}
        before = {name: weight.clone() for name, weight in own.items()}
        for name, weight in own.items():
            weight.add_(self._errors[name])
        try:
            yield
        finally:
            for name, weight in own.items():
                weight.copy_(before[name])


if __name__ == "__main__":
    main()

"""Fewer and narrower experts in a mixture, chosen layer by layer, beside rules that take one share everywhere.

    python tests/benchmarks/experts.py upcycled-smollm2 --output experts.json

The model is a directory, such as one of ``tests/benchmarks/upcycle.py``. All rules see the same calibration text. At
each kept share of the routed experts' parameters, all attentions as they are: excess ln(perplexity) over the dense
model on each text (``self``: written by the dense model with another seed), of

- ``chosen``: GAC's counts and widths, with the fitted down_proj of what stays; ``refitted``: with all weights fitted
  again, as ``gac.compress`` does it;
- ``one share``: GAC's order of experts, as many in every layer, and nothing else;
- ``reap``: REAP (arXiv 2510.13999, equation 9): the mean, over the tokens that an expert takes, of its weight times the
  norm of its output; the lowest go, as many in every layer. Its authors fit nothing again, and neither is done here;
- ``frequency``: the tokens that an expert takes, likewise; ``random``: drawn by a seed.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gac
from gac.forms import form_named
from gac.forms.curvature.registry import METHODS
from gac.forms.narrow.elimination import last_to_go
from gac.forms.planned_sites import targeted_sites
from gac.measurement.calibration import CalibrationRun, routed_by_layer
from gac.measurement.curves import fit_layers
from gac.measurement.samples import SAMPLE_TEXTS
from gac.measurement.session import cut_windows, targeted_digest
from gac.measurement.text import SELF
from gac.measurement.texts import Texts
from gac.models.loading import Loaded, load_model
from gac.models.modules import input_device, listening, swapped
from gac.models.sites import Site, Weight
from gac.plan.costs import fraction_of
from gac.plan.recipe import DEFAULT_TEXT, Recipe
from gac.runtime.modules import resized
from tests.benchmarks.harness import markdown, own_text, write

FORM = form_named("experts")
SHARES = (0.75, 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    parser.add_argument("--calibration", nargs="+", default=list(DEFAULT_TEXT))
    parser.add_argument("--texts", nargs="+", default=[*SAMPLE_TEXTS, SELF])
    parser.add_argument("--windows", type=int, help="of evaluation; all where not given")
    parser.add_argument("--seeds", type=int, default=3, help="draws of random experts")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    loaded = load_model(asked.model)
    files = {
        text: str(own_text(loaded, Path(f"{asked.model}.self.txt"))) if text == SELF else text for text in asked.texts
    }
    study = ExpertStudy(loaded, asked.calibration, files, asked.windows)
    rows = [row for share in asked.shares for row in study.rows(share, asked.seeds)]
    texts = [[f"{row[text]:.4f}" for text in asked.texts] for row in rows]
    cells = [[f"{row['share']:g}", row["rule"], row["experts"], *cell] for row, cell in zip(rows, texts, strict=True)]
    print(markdown(["kept", "rule", "experts", *asked.texts], cells))
    write(asked.output, dense=study.dense, rows=rows, layers=study.layers())


@dataclass
class Layer:
    """The router and the experts of a layer, and what calibration text shows of them."""

    router: Weight
    stack: Weight
    order: Tensor  # in which experts go, by GAC
    loss: list[float]
    reached: Tensor
    saliency: Tensor  # by REAP

    def kept(self, rule: str, count: int, seed: int) -> Tensor:
        """The numbers of the experts that stay, ascending."""
        if rule == "gac":
            return last_to_go(self.order, count)
        scores = {"reap": self.saliency, "frequency": self.reached.double()}
        drawn = torch.rand(self.stack.experts, generator=torch.Generator().manual_seed(seed + hash_of(self.stack.name)))
        return scores.get(rule, drawn).topk(count).indices.sort().values


def hash_of(name: str) -> int:
    return sum(map(ord, name))


class ExpertStudy:
    """A mixture, measured on calibration text, and what it loses with fewer experts on others."""

    def __init__(
        self, loaded: Loaded, calibration: Sequence[str], texts: Mapping[str, str], windows: int | None
    ) -> None:
        self.loaded, self.calibration, self.texts, self.windows = loaded, list(calibration), texts, windows
        self.model: Any = loaded.model
        self.sites = targeted_sites(self.model.config, [FORM.name])
        digest = targeted_digest(loaded, self.sites)
        windows_of = cut_windows(Texts.of(self.calibration), loaded, digest, Recipe.of(0.5).measure.seed, None)
        self.by_layer = measured(self.model, self.sites, windows_of.ids)
        self.dense = self.perplexities(self.model)

    def perplexities(self, model: Any) -> dict[str, float]:
        of = partial(gac.perplexity, model, self.loaded.tokenizer, windows=self.windows, progress=False)
        return {name: of(text).value for name, text in self.texts.items()}

    def excess(self, model: Any) -> dict[str, float]:
        return {text: math.log(value / self.dense[text]) for text, value in self.perplexities(model).items()}

    def rows(self, share: float, seeds: int) -> list[dict[str, Any]]:
        """Every rule at a kept share of the routed experts' parameters."""
        rows = []
        for rule, refit in (("chosen", "none"), ("refitted", "residual")):
            plan = self.plan(share, refit)
            sizes = [sizes_of(plan, layer.stack) for layer in self.by_layer]
            predicted = {by.text: by.loss for by in plan.prediction.by_text} | {"mean": plan.prediction.loss}
            rows.append(self.row(rule, share, sizes, self.excess(self.compressed(plan)), predicted))
        even = [round(share * layer.stack.experts) for layer in self.by_layer]
        for rule, seed in [("gac", 0), ("reap", 0), ("frequency", 0), *(("random", seed) for seed in range(seeds))]:
            name = {"gac": "one share"}.get(rule, rule if rule != "random" else f"random {seed}")
            with swapped(self.model, self.modules(rule, even, seed)):
                sizes = [(count, layer.stack.expert_width) for count, layer in zip(even, self.by_layer, strict=True)]
                rows.append(self.row(name, share, sizes, self.excess(self.model)))
        return rows

    def row(
        self,
        rule: str,
        share: float,
        sizes: Sequence[tuple[int, int]],
        excess: Mapping[str, float],
        predicted: Mapping[str, float] | None = None,
    ) -> dict[str, Any]:
        counts, neurons = ([size[axis] for size in sizes] for axis in (0, 1))
        chosen = f"{min(counts)} to {max(counts)} of {min(neurons)} to {max(neurons)}"
        row = {"share": share, "rule": rule, "experts": chosen, "by layer": list(sizes), "predicted": predicted}
        row |= excess
        print(row, flush=True)
        return row

    def plan(self, share: float, refit: str) -> gac.Plan:
        """Counts of the same parameters as that share of all experts, and of the routers' rows."""
        routed = sum(site.params for site in self.sites if site.weights[0].top_k)
        total = sum(site.params for site in self.sites)
        budget = fraction_of(total - round((1 - share) * routed), total)
        options = {"calibration": self.calibration, "tokenizer": self.loaded.tokenizer, "refit": refit}
        return gac.allocate(self.model, budget, forms=[FORM.name], latency="any", **options)

    def compressed(self, plan: gac.Plan) -> Any:
        return gac.compress(deepcopy(self.model), plan, tokenizer=self.loaded.tokenizer, heal=0, progress=False)

    def modules(self, rule: str, counts: Sequence[int], seed: int) -> dict[str, nn.Module]:
        """The routers and experts of which some are left, by name."""
        modules = {}
        for layer, count in zip(self.by_layer, counts, strict=True):
            kept = layer.kept(rule, count, seed)
            for name in (layer.router.name, layer.stack.name):
                dense = self.model.get_submodule(name)
                modules[name] = fewer = resized(dense, experts=count)
                rows = {key: values.detach()[kept.to(values.device)] for key, values in dense.named_parameters()}
                fewer.load_state_dict(rows)
        return modules

    def layers(self) -> list[dict[str, Any]]:
        return [
            {"loss": layer.loss, "reached": layer.reached.tolist(), "saliency": layer.saliency.tolist()}
            for layer in self.by_layer
        ]


def sizes_of(plan: gac.Plan, stack: Weight) -> tuple[int, int]:
    choice = next(choice for choice in plan.weights if choice.name == stack.name)
    return form_named(choice.form).routed_sizes(stack, choice.dim if choice.changed else stack.experts)


def measured(model: Any, sites: Sequence[Site], ids: Tensor) -> list[Layer]:
    """Every layer with experts, in order."""
    run = CalibrationRun(model, ids, METHODS.get("kfac"), progress=False)
    fits = fit_layers(run, sites, forms=[FORM.name])
    saliencies, layers = reap_saliencies(model, sites, ids), []
    for number, (router, stack) in sorted(routed_by_layer(sites).items()):
        artifacts = fits[number].artifacts
        order = artifacts.of(FORM, "order", stack).cpu()
        loss, reached = (fits[number].losses[f"{name}/{stack.name}"] for name in (FORM.name, "reached"))
        layers.append(Layer(router, stack, order, loss.tolist(), torch.from_numpy(reached), saliencies[stack.name]))
    return layers


@torch.no_grad()
def reap_saliencies(model: Any, sites: Sequence[Site], ids: Tensor) -> dict[str, Tensor]:
    """REAP's saliency of each expert, by the name of its stack; 0 for experts that no token takes."""
    stacks = [stack for _, stack in routed_by_layer(sites).values()]
    sums = {stack.name: torch.zeros(2, stack.experts, dtype=torch.float64) for stack in stacks}

    def hear(name: str, module: nn.Module, args: tuple[Tensor, ...], _output: Any) -> None:
        x, numbers, weights = args
        for expert in numbers.unique().tolist():
            tokens, places = (numbers == expert).nonzero(as_tuple=True)
            number = torch.full((len(tokens), 1), expert, device=x.device)
            output = type(module).forward(module, x[tokens], number, torch.ones_like(number, dtype=x.dtype))
            sums[name][0, expert] += float((weights[tokens, places].double() * output.double().norm(dim=1)).sum())
            sums[name][1, expert] += len(tokens)

    with listening(model, {stack.name: partial(hear, stack.name) for stack in stacks}):
        for window in ids:
            model(input_ids=window.to(input_device(model))[None], use_cache=False)
    return {name: total / count.clamp_min(1) for name, (total, count) in sums.items()}


if __name__ == "__main__":
    main()

"""Prices after healing: the part of what a choice loses that is left once its layer is healed, measured on a sample.

Where a model will be healed, a plan should count what healing leaves, which is not the same part of every form and
every weight. A first plan says which choices matter. A sample of its changed sites is put into the dense model, one at
a time. All weights of its layer that the plan changes learn what the dense layer makes (``gac.healing.blocks``): the
site's in their forms, the others as they are. The divergence of the whole model from the dense one is measured before
and after, on text held out. Prices are multiplied by the part that is left: of sites of the same form, scheme and place
in a layer, where there were such, else of the same form and scheme, else of all.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from statistics import geometric_mean
from typing import Any

import torch
from torch import nn

from gac.allocation.decide import decide
from gac.allocation.problem import Problem
from gac.compression.apply import build_modules, planned_sites, runs
from gac.compression.rounding import store_all
from gac.distributed.ranks import ALONE
from gac.forms import form_named
from gac.healing.attention import of_windows
from gac.healing.blocks import LayerSteps, Passage, on_host
from gac.healing.descent import Descent
from gac.healing.logits import in_training, mean_loss, windows_at_once
from gac.healing.repeatable import repeatable
from gac.healing.text import parted
from gac.healing.trainables import Trainables, learning
from gac.healing.work import Span, rate_for
from gac.models.families import family_of
from gac.models.modules import input_device, swapped
from gac.plan import Plan, WeightChoice
from gac.progress import progress_bar
from gac.sensitivity.calibration import CalibrationRun
from gac.sensitivity.curves import stream_kept
from gac.sensitivity.layerwise import frozen

logger = logging.getLogger(__name__)

SAMPLED = 24
"""Sites that are healed by themselves, about."""
BATCH, STEPS = 4096, 32
"""Tokens of a step, in whole windows, and steps for a site."""
KEPT = 0.8
"""What the first plan keeps of the parameters where nothing is limited."""
LEAST_LOST, LEAST_LEFT = 1e-7, 1e-2
"""Nats a token that a site has to lose for its part to be measured, and the smallest part that counts."""

Key = tuple[str, str, str]
"""A form, a scheme, and the last part of a weight's name."""


@dataclass(frozen=True)
class Left:
    """The parts of prices that healing leaves, by what they were measured of."""

    measured: Mapping[Key, Sequence[float]]

    def part(self, form: str, scheme: str, name: str) -> float:
        """That of a weight's curve."""
        place = name.rpartition(".")[2]
        alike = self.measured.get((form, scheme, place)) or self._of((form, scheme)) or self._of(())
        return geometric_mean(alike)

    @property
    def mean(self) -> float:
        """That of all together."""
        return geometric_mean(self._of(()))

    def _of(self, start: tuple[str, ...]) -> list[float]:
        return [one for key, parts in self.measured.items() if key[: len(start)] == start for one in parts]


def prices_after_healing(problem: Problem, run: CalibrationRun) -> Problem:
    """The problem with the prices that healing leaves.

    Args:
        run: of the dense model, which is in memory, and whose text has 10 windows at least.

    Raises:
        BudgetError: the limits cannot be met.
        TextError: there is too little text.
        HealingError: a loss is not finite.
    """
    left = run.ranks.once(lambda: _left(problem, replace(run, ranks=ALONE)))
    if not left.measured:
        logger.warning("no site loses enough for its price after healing to be measured: prices stay as they are")
        return problem
    parts = {f"{form} {scheme} {place}": geometric_mean(one) for (form, scheme, place), one in left.measured.items()}
    logger.info("healing leaves %.2f of a price; %s", left.mean, ", ".join(f"{a} {b:.2f}" for a, b in parts.items()))
    return replace(problem, curves=problem.curves.multiplied(left.part, left.mean))


def sample(sites: Sequence[tuple[WeightChoice, ...]], count: int) -> list[tuple[WeightChoice, ...]]:
    """About so many of some sites, of every kind the same number, in even steps through the model.

    Args:
        sites: by what their weights become.
    """
    kinds: dict[frozenset[Key], list[tuple[WeightChoice, ...]]] = defaultdict(list)
    for site in sites:
        kinds[frozenset(_keys(site))].append(site)
    each = -(-count // max(len(kinds), 1))
    return [own[(2 * at + 1) * len(own) // (2 * each)] for own in kinds.values() for at in _distinct(each, len(own))]


def _distinct(each: int, count: int) -> Iterable[int]:
    """The steps of so many that end at different ones of ``count``."""
    return range(each) if each <= count else [-(-at * each // count) for at in range(count)]


def _keys(site: Iterable[WeightChoice]) -> list[Key]:
    return [(one.form, one.scheme, one.name.rpartition(".")[2]) for one in site if one.changed]


def _first(problem: Problem) -> Plan:
    """The plan that says which choices matter, by prices as they were measured."""
    recipe = replace(problem.recipe, slack=0.0)
    if all(fraction >= 1 for fraction in recipe.fractions.values()):
        recipe = replace(recipe, limits=replace(recipe.limits, params=KEPT))
    return decide(replace(problem, recipe=recipe)).plan


def _left(problem: Problem, run: CalibrationRun) -> Left:
    plan = _first(problem)
    by_site = [tuple(one for one in plan.weights if one.weight in site.weights) for site in problem.sites]
    taken = sample([one for one in by_site if any(map(_trained, one))], SAMPLED)
    found: dict[Key, list[float]] = defaultdict(list)
    with repeatable(input_device(run.model)), of_windows(run.model), frozen(run.model):
        healings = _Sampled(run, plan, taken).healed()
        for site, part in progress_bar("healing sites", "site", len(taken), healings, run.progress):
            for key in set(_keys(site)) if part is not None else ():
                found[key].append(part)
    return Left(found)


def _trained(choice: WeightChoice) -> bool:
    return choice.changed and runs(choice)


class _Sampled:
    """Sites that are put into a copy of the dense model, one at a time, and healed there.

    Args:
        taken: by what their weights become.
    """

    def __init__(self, run: CalibrationRun, plan: Plan, taken: Sequence[tuple[WeightChoice, ...]]) -> None:
        self._model: Any = run.model
        self._run, self._plan, self._taken = run, plan, taken
        config: Any = self._model.config
        family = family_of(config)
        self._sites = family.sites(config)
        self._names = [f"{family.layers}.{at}" for at in range(config.num_hidden_layers)]
        train, self._held = parted("the calibration text", run.windows)
        size = max(1, BATCH // train.shape[1])
        self._train = [*islice(torch.split(train, size), STEPS)]
        self._rate = rate_for(sum(one.numel() for one in self._model.parameters()))

    def healed(self) -> Iterator[tuple[tuple[WeightChoice, ...], float | None]]:
        """Each with the part of its price that healing leaves; None where it loses next to nothing."""
        modules, small = self._modules(), deepcopy(self._model)
        waits = on_host(self._model, 2 * sum(one.numel() for one in self._train))
        dense = Passage(self._model, self._layers(self._model), self._train, waits)
        ours = Passage(small, self._layers(small), self._train[:1], waits)
        with frozen(small):
            for layer, name in enumerate(self._names):
                before = [*dense.states]
                with in_training(self._model):
                    dense.advance(layer)
                steps = LayerSteps(partial(ours.run, layer), [*zip(before, dense.states, strict=True)], layer)
                for site in [one for one in self._taken if one[0].name.startswith(f"{name}.")]:
                    with swapped(small, {one.name: modules[one.name] for one in site if one.name in modules}):
                        yield site, self._part(small, site, name, steps)

    def _part(self, small: Any, site: Sequence[WeightChoice], layer: str, steps: LayerSteps) -> float | None:
        """Divergence once the site's layer is healed over what it was."""
        before = self._divergence(small)
        if before < LEAST_LOST:
            return None
        own = {one.name for one in site}
        weights = [one if one.name in own else _dense(one) for one in self._plan.weights]
        healed = {one.name for one in self._plan.weights if one.changed and one.name.startswith(f"{layer}.")}
        trained = Trainables(small, weights, healed)
        parameters, given = trained.within(layer), trained.values()
        descent = Descent(parameters, given, self._rate, ALONE)
        span = Span(ALONE, None, STEPS * self._train[0].numel())
        with in_training(small), torch.enable_grad(), learning(parameters):
            steps.run(descent, span, f"{layer}, healed by itself with learning_rate={self._rate:g}")
        after = self._divergence(small)
        trained.restore(given)
        trained.close(changed=False)
        return min(1.0, max(after / before, LEAST_LEFT))

    def _divergence(self, small: Any) -> float:
        at_once = windows_at_once(small, int(self._held.shape[1]))
        return mean_loss(small, self._model, self._held, at_once)

    def _modules(self) -> dict[str, nn.Module]:
        """Those of the sampled sites, as they are before anything is fitted again."""
        sites = planned_sites(self._plan, self._sites)
        own = {one.name for site in self._taken for one in site}
        sampled = [site for site in sites if own.intersection(weight.name for weight in site.weights)]
        layers = {site.layer for site in sampled}
        whole = [site for site in sites if site.layer in layers]
        kept = partial(stream_kept, self._run, whole, self._plan.recipe.space.forms)
        built = build_modules(self._run, self._plan.weights, sampled, kept())
        return store_all(self._run, built, self._plan.weights, whole, kept(rounding=True))

    def _layers(self, model: nn.Module) -> list[nn.Module]:
        return [model.get_submodule(name) for name in self._names]


def _dense(choice: WeightChoice) -> WeightChoice:
    return WeightChoice(choice.weight, "dense", form_named("dense").full(choice.weight))

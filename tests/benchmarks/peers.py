"""Peers that drop layers, heads and neurons, on the same text as GAC's plans: perplexity without any recovery.

    python tests/benchmarks/peers.py --budgets 0.8 0.7 0.6 0.5 --output peers.json

Each is its published rule, applied to the dense model; what goes contributes nothing, and nothing makes up for it:

- ``ShortGPT`` (arXiv 2403.03853): whole layers, those first whose output is most like their input (block influence: 1
  less the mean cosine of both);
- ``SLEB`` (arXiv 2402.09025): whole layers, each time the one without which the calibration text has the least
  perplexity beside those that are gone;
- ``LLM-Pruner`` (arXiv 2305.11627): groups of heads and of neurons, as large a share in each but the first four layers
  and the last two, those first with the least ``|weight x gradient|``, summed over all weights of the group;
- ``uniform width`` (Minitron, arXiv 2407.14679): as large a share of heads and neurons in every layer, those first
  whose activations are smallest.

A budget is of the targeted parameters. Heads go in whole groups, then neurons until the budget is kept.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from math import floor
from typing import Any

import torch
from torch import Tensor

from gac.core.progress import progress_bar
from gac.measurement.runs import window_loss
from gac.measurement.session import targeted_digest
from gac.measurement.texts import Texts, cut_windows
from gac.models.families import family_of
from gac.models.linears import linear_at
from gac.models.loading import Loaded
from gac.models.modules import listening
from gac.models.sites import Site, Weight
from gac.plan.recipe import DEFAULT_TEXT
from gac_extensions.baselines.measurements import mean_gradients
from tests.benchmarks.harness import OF_A_STUDY, Study, options

WINDOWS = 16
"""Of the calibration text, in even steps, by which peers choose."""
FIRST, LAST = 4, 2
"""Layers that LLM-Pruner leaves as they are."""


@dataclass(frozen=True)
class Block:
    """An attention or an MLP, in groups that can go: key-value heads with their query heads, or neurons."""

    layer: int
    weights: tuple[Weight, ...]

    @classmethod
    def of(cls, sites: Sequence[Site]) -> "list[Block]":
        """The attention and the MLP of every layer, in order."""
        weights = [(site.layer, bool(weight.neurons), weight) for site in sites for weight in site.weights]
        grouped = groupby(weights, key=lambda one: one[:2])
        return [cls(layer, tuple(weight for *_, weight in found)) for (layer, _), found in grouped]

    @property
    def writes(self) -> Weight:
        return self.weights[-1]

    @property
    def is_mlp(self) -> bool:
        return self.writes.neurons is not None

    @property
    def groups(self) -> int:
        return self.writes.in_features if self.is_mlp else max(1, self.writes.groups)

    @property
    def params(self) -> int:
        return sum(weight.params for weight in self.weights)


Gone = Mapping[Block, Tensor]
"""The groups of blocks that go."""


@dataclass(frozen=True, eq=False)
class Dense:
    """The dense model, its blocks, and the text by which peers choose."""

    model: Any
    blocks: Sequence[Block]
    ids: Tensor

    @classmethod
    def of(cls, loaded: Loaded, calibration: str | list[str]) -> "Dense":
        sites = family_of(loaded.model.config).sites(loaded.model.config)
        digest = targeted_digest(loaded, sites)
        ids = cut_windows(Texts.of(calibration), loaded, digest, 0, None).ids
        return cls(loaded.model, Block.of(sites), ids[:: -(-len(ids) // WINDOWS)])

    @property
    def layers(self) -> list[int]:
        return sorted({block.layer for block in self.blocks})

    @property
    def params(self) -> int:
        return sum(block.params for block in self.blocks)

    def whole(self, layers: Sequence[int]) -> dict[Block, Tensor]:
        """These layers, all of them."""
        return {block: torch.arange(block.groups) for block in self.blocks if block.layer in layers}

    def loss(self) -> float:
        """Nats over the text."""
        with torch.no_grad():
            return sum(float(window_loss(self.model, ids)) for ids in self.ids)


def main() -> None:
    parser = options(__doc__, *OF_A_STUDY, "--budgets")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.set_defaults(calibration=[*DEFAULT_TEXT], budgets=[0.8, 0.7, 0.6, 0.5])
    asked = parser.parse_args()
    study = Peers(asked)
    dense = Dense.of(study.loaded, asked.calibration)
    for name in asked.peers:
        for budget, gone in PEERS[name](dense, sorted(asked.budgets, reverse=True)):
            study.pruned(dense, {"peer": name, "budget": budget}, gone)


class Peers(Study):
    """A study of the dense model without groups that a peer's rule takes away."""

    def pruned(self, dense: Dense, labels: dict[str, Any], gone: Gone) -> None:
        """A row."""
        kept = 1 - sum(block.params * len(of_block) / block.groups for block, of_block in gone.items()) / dense.params
        with without(dense.model, gone):
            found = self.quality(dense.model)
        whole = sum(len(of_block) == block.groups for block, of_block in gone.items())
        self.keep(labels | {"kept": kept, "blocks gone": whole} | found)


@contextmanager
def without(model: Any, gone: Gone) -> Iterator[None]:
    """The groups contribute nothing to the residual stream."""
    before = {}
    with torch.no_grad():
        for block, groups in gone.items():
            weight = linear_at(model, block.writes.name).weight
            before[weight] = weight.clone()
            weight.view(len(weight), block.groups, -1)[:, groups.to(weight.device)] = 0
        yield
        for weight, value in before.items():
            weight.copy_(value)


def shortgpt(dense: Dense, budgets: Sequence[float]) -> Iterator[tuple[float, Gone]]:
    like = dict.fromkeys(dense.layers, 0.0)
    called = {f"{family_of(dense.model.config).layers}.{layer}": layer for layer in like}

    def hear(layer: int) -> Any:
        def heard(_module: Any, given: Any, found: Any) -> None:
            like[layer] += float(torch.cosine_similarity(given[0].float(), found.float(), dim=-1).mean())

        return heard

    with listening(dense.model, {name: hear(layer) for name, layer in called.items()}):
        dense.loss()
    yield from _by_layers(dense, budgets, sorted(like, key=lambda layer: -like[layer]))


def sleb(dense: Dense, budgets: Sequence[float]) -> Iterator[tuple[float, Gone]]:
    gone: list[int] = []
    for _ in progress_bar("SLEB", "layer", steps=range(floor((1 - min(budgets)) * len(dense.layers)) + 1)):
        losses = {}
        for layer in (layer for layer in dense.layers if layer not in gone):
            with without(dense.model, dense.whole([*gone, layer])):
                losses[layer] = dense.loss()
        gone.append(min(losses, key=lambda layer: losses[layer]))
    yield from _by_layers(dense, budgets, gone)


def _by_layers(dense: Dense, budgets: Sequence[float], order: Sequence[int]) -> Iterator[tuple[float, Gone]]:
    """As many layers, in this order, as the budget asks for."""
    for budget in budgets:
        needed = -(-round((1 - budget) * dense.params) // (dense.params // len(dense.layers)))
        yield budget, dense.whole(order[:needed])


def llm_pruner(dense: Dense, budgets: Sequence[float]) -> Iterator[tuple[float, Gone]]:
    weights = [weight for block in dense.blocks for weight in block.weights]
    gradients = mean_gradients(dense.model, weights, dense.ids)

    def score(block: Block) -> Tensor:
        found = torch.zeros(block.groups, device=gradients[block.writes.name].device)
        for weight in block.weights:
            saliency = (linear_at(dense.model, weight.name).weight * gradients[weight.name]).abs()
            saliency = saliency.T if weight is block.writes else saliency
            found += saliency.reshape(block.groups, -1).sum(1)
        return found

    middle = [block for block in dense.blocks if block.layer in dense.layers[FIRST:-LAST]]
    yield from _by_width(dense, budgets, {block: score(block) for block in middle})


def uniform_width(dense: Dense, budgets: Sequence[float]) -> Iterator[tuple[float, Gone]]:
    scores: dict[Block, Tensor] = {}

    def hear(block: Block) -> Any:
        def heard(_module: Any, given: Any, _found: Any) -> None:
            size = given[0].float().reshape(-1, block.groups, block.writes.in_features // block.groups).norm(dim=-1)
            scores[block] = scores.get(block, 0) + size.mean(0)

        return heard

    with listening(dense.model, {block.writes.name: hear(block) for block in dense.blocks}):
        dense.loss()
    yield from _by_width(dense, budgets, scores)


def _by_width(dense: Dense, budgets: Sequence[float], scores: Mapping[Block, Tensor]) -> Iterator[tuple[float, Gone]]:
    """As large a share of each block's groups, those of the least scores; of heads as many whole ones as fit."""
    heads = [block for block in scores if not block.is_mlp]
    mlps = [block for block in scores if block.is_mlp]
    for budget in budgets:
        needed, found = (1 - budget) * dense.params, None
        for dropped in range(heads[0].groups):
            of_heads = sum(block.params for block in heads) * dropped / heads[0].groups
            share = (needed - of_heads) / sum(block.params for block in mlps)
            if share < 1 and (found is None or dropped / heads[0].groups <= share):
                found = dropped, share
        if found is None:
            print(f"{budget}: more than there is in these layers")
            continue
        counts = {block: -int(-found[1] * block.groups // 1) if block.is_mlp else found[0] for block in scores}
        yield budget, {block: scores[block].argsort()[:count] for block, count in counts.items()}


PEERS: Mapping[str, Callable[[Dense, Sequence[float]], Iterator[tuple[float, Gone]]]] = {
    "ShortGPT": shortgpt,
    "SLEB": sleb,
    "LLM-Pruner": llm_pruner,
    "uniform width": uniform_width,
}


if __name__ == "__main__":
    main()

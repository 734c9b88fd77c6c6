"""Models to time that are split over GPUs: each process makes its own parts, and never a whole model."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gac.checkpoint.load import load
from gac.compression.apply import empty_stored, skipped_blocks
from gac.core.distributed import launch
from gac.core.errors import ModelError
from gac.core.workloads import Workload
from gac.evaluation.latency import Held, Timer
from gac.evaluation.shapes import SCALE, StandIn, is_stored, model_of_shapes, running, sharing
from gac.models.linears import linear_at
from gac.models.loading import is_checkpoint, load_model
from gac.models.modules import swap_in
from gac.models.sites import Site
from gac.plan.plan import WeightChoice
from gac.profiling.timing.sampling import Batch, slowest
from gac.runtime.finish import Description, finish
from gac.runtime.parallel.ranks import Ranks, SplitError, started
from gac.runtime.parallel.splitting import split
from gac.runtime.plain.modeling_gac import Absent
from gac.runtime.storage.modules import Stored, stored_modules
from gac.schemes import scheme_named


@dataclass(frozen=True, eq=False)
class SplitShapes:
    """This process's part of a model of known shapes, and of what is made of it, with random weights.

    Attributes:
        whole: the dense model on the meta device, which holds nothing.
        dense: the part of it that this process has.
    """

    whole: PreTrainedModel
    ranks: Ranks
    dense: PreTrainedModel = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense", self._filled(self._split(()), {}, ()))

    @staticmethod
    def of(name: str, ranks: Ranks, dtype: torch.dtype = torch.bfloat16, layers: int | None = None) -> "SplitShapes":
        """Of these shapes.

        Raises:
            ModelError: the shapes are unknown, or nothing of them can be divided.
        """
        with _as_model_error():
            return SplitShapes(model_of_shapes(name, device="meta", dtype=dtype, layers=layers), ranks)

    def variant(
        self, choices: Sequence[WeightChoice], fused: Sequence[Site] = (), plain: bool = False
    ) -> PreTrainedModel:
        """As ``gac.evaluation.shapes.variant``, split: what does not change is shared with the dense part."""
        changed = [one for one in choices if one.form != "dense" or is_stored(one)]
        found = self._filled(self._split(changed), dict(self.dense.named_parameters()), changed)
        return running(found, choices, fused, plain)

    def without_gemms(self, choices: Sequence[WeightChoice]) -> PreTrainedModel:
        """As ``gac.evaluation.shapes.without_gemms``, split, without the collectives of the weights too."""
        found = self._split([one for one in choices if one.form != "dense"])
        outputs: dict[tuple[int, int], Tensor] = {}
        for choice in choices:
            module: Any = found.get_submodule(choice.name)
            if not isinstance(module, Absent):
                found.set_submodule(choice.name, StandIn(module.out_features, outputs))
        hollow: PreTrainedModel = self._filled(found, dict(self.dense.named_parameters()), ())
        finish(hollow, Description(skipped=skipped_blocks(hollow.config, choices)))
        return hollow

    def _split(self, changed: Sequence[WeightChoice]) -> Any:
        """The model with these choices, split; all on the meta device."""
        found = sharing(self.whole)
        dtype = self.whole.dtype
        biased = {one.name: linear_at(self.whole, one.name).bias is not None for one in changed}
        swap_in(found, {one.name: empty_stored(one, biased[one.name], "meta", dtype).eval() for one in changed})
        split(found, replace(self.ranks, device=torch.device("meta")))
        return found

    @torch.no_grad()
    def _filled(self, found: Any, known: dict[str, nn.Parameter], changed: Sequence[WeightChoice]) -> Any:
        """The model on the device: parameters that are known, and random ones where they are not."""
        names = tuple(f"{one.name}." for one in changed)
        shared = {name: one for name, one in known.items() if not name.startswith(names or "\0")}
        for module in found.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.zeros_like(buffer, device=self.ranks.device))
        for name, empty in list(found.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            own = shared.get(name)
            if own is None or own.shape != empty.shape:  # an attention or MLP that stays whole
                own = nn.Parameter(torch.empty_like(empty, device=self.ranks.device), requires_grad=False)
                nn.init.normal_(own, std=SCALE)
            setattr(found.get_submodule(owner), leaf, own)
        for module in found.modules():  # norms, and the frequencies of rotary embeddings
            if not isinstance(module, nn.Linear | nn.Embedding | Stored):
                found._init_weights(module)
        schemes = {one.name: one.scheme for one in changed}
        for name, one in stored_modules(found).items():
            scheme = next(scheme for weight, scheme in schemes.items() if f"{name}.".startswith(f"{weight}."))
            matrix = SCALE * torch.randn(one.matrix, dtype=torch.float32, device=self.ranks.device)
            one.fill(scheme_named(scheme).stored(matrix.to(self.whole.dtype)))
        return found


class SlowestTimer(Generic[Held]):
    """Times models in every process, each round as the slowest saw it: all take as many rounds, in the same order.

    Args:
        timer: of one process.
    """

    def __init__(self, timer: Timer[Held], ranks: Ranks) -> None:
        self._timer, self._ranks = timer, ranks

    def hold(self, model: PreTrainedModel, workload: Workload, compiled: bool) -> tuple[Held, int]:
        """As the timer does."""
        return self._timer.hold(model, workload, compiled)

    def round(self, held: Sequence[Held]) -> Batch:
        """Run each once, in this order, in all processes at once; ns of each."""
        found: list[Any] = [None] * self._ranks.size
        torch.distributed.all_gather_object(found, self._timer.round(held), group=self._ranks.group)
        return slowest(found)


def ranks_of_torchrun() -> Ranks | None:
    """The processes that torchrun has started; None: this one is alone."""
    return started() if launch.processes() > 1 else None


def end_together(ranks: Ranks) -> None:
    """End the run of all processes. Graphs that hold collectives are freed first, for NCCL would wait for them."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    torch.distributed.barrier(group=ranks.group)
    torch.distributed.destroy_process_group()


def open_split(name: str, ranks: Ranks) -> PreTrainedModel:
    """This process's part of a model: a dense one, or a directory that GAC wrote.

    Raises:
        GacError: it cannot be read, or nothing of it can be divided.
    """
    if is_checkpoint(name):
        return load(name, tp_plan="auto")
    model = load_model(name, device="cpu").model
    with _as_model_error():
        split(model, ranks)
    return model


@contextmanager
def _as_model_error() -> Iterator[None]:
    try:
        yield
    except SplitError as failure:
        raise ModelError(failure.given, failure.expected, failure.remedy) from failure

"""Whole steps of a dense model in an engine: rows of a table that ``gac profile --engine`` measures in the engine."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gac.plan.engines import STEPS
from gac.profiling.operators.base import Axes, Operand, Operator

if TYPE_CHECKING:
    from torch import Tensor


class EngineStep(Operator):
    """A step of ``b`` sequences with ``s`` new tokens each and ``t`` tokens in the cache, by the model's sizes."""

    axes = ("layers", "hidden", "neurons", "h", "kv", "d", "vocabulary", "b", "s", "t")
    compressed_axis = "layers"
    cublas = False

    def __init__(self, name: str) -> None:
        self.name = name

    def inputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        return ()

    def outputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        return ()

    def run(self, inputs: Sequence["Tensor"], outputs: Sequence["Tensor"]) -> Sequence["Tensor"]:
        raise RuntimeError("an engine runs whole steps: gac profile --engine vllm")

    def compare(self, inputs: Sequence["Tensor"], result: Sequence["Tensor"]) -> tuple["Tensor", "Tensor"]:
        raise RuntimeError("an engine runs whole steps: gac profile --engine vllm")


OPERATORS = tuple(map(EngineStep, STEPS))

"""Whole steps of a dense model in an engine: rows of a table that ``gac profile --engine`` measures in the engine."""

from typing import Any, NoReturn

from gac.plan.engines import MIXTURE_STEPS, STEPS
from gac.profiling.operators.base import Operator
from gac.schemes import scheme_timed_as


class EngineStep(Operator):
    """A step of ``b`` sequences with ``s`` new tokens each and ``t`` tokens in the cache, by the model's sizes.

    GAC's plugin also serves it with every weight of attentions and MLPs in a scheme, and experts where it runs these.
    """

    axes: tuple[str, ...] = ("layers", "hidden", "neurons", "h", "kv", "d", "vocabulary", "b", "s", "t")
    compressed_axis = "layers"
    cublas = False

    def __init__(self, name: str) -> None:
        self.name = name

    def takes(self, dtype: str) -> bool:
        return dtype in self.dtypes or (
            self.name in (STEPS[1], MIXTURE_STEPS[1]) and scheme_timed_as(dtype) is not None
        )

    def run(self, *_tensors: Any) -> NoReturn:
        raise RuntimeError("an engine runs whole steps: gac profile --engine vllm")

    def compare(self, *tensors: Any) -> NoReturn:
        self.run(*tensors)


class MixtureStep(EngineStep):
    """The same of a mixture: ``neurons`` are those of an expert, and ``top_k`` of ``experts`` work on a token."""

    axes = (*EngineStep.axes, "experts", "top_k")


OPERATORS = (*map(EngineStep, STEPS), *map(MixtureStep, MIXTURE_STEPS))

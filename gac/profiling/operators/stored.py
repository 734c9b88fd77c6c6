"""Products with weights in the storage of a scheme, through the modules in which models hold them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gac.core.errors import ProfileError
from gac.profiling.operators.base import WORST_ROUNDED_ERROR, Axes, Operand, Operator, Runner, edges, name_of
from gac.schemes import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from gac.runtime.storage.modules import StoredLinear


class StoredRunner(Runner):
    """Multiply the activations with one weight after the other; every launch reads its own tensors.

    A token's blocks of a batched GEMM are adjacent, as in a model: the memory of x ``(b, m, k)`` is read as
    ``(m, b * k)``, and that of the result likewise. ProfileError where the operator's weights cannot be stored.
    """

    def __init__(self, operator: Operator, scheme: Scheme) -> None:
        from gac.runtime.storage.eight_bits import READERS
        from gac.schemes.base import storage_of

        if not operator.stored:
            problem, dtypes = f"{operator.name} in scheme {scheme.name}", ", ".join(operator.dtypes)
            raise ProfileError(problem, f"one of {dtypes}", "Measure it in numbers alone.")
        storage = storage_of(scheme)
        assert storage is not None, f"scheme {scheme.name} has no storage"
        self.operator, self._storage = operator, storage
        self._read = None if scheme.input_quantiser is None else READERS[scheme.input_quantiser]
        if self._read is not None:
            self.worst_error = WORST_ROUNDED_ERROR

    def operands(self, axes: Axes, dtype: str, cut: Callable[[Operand], "Tensor"]) -> Sequence[Any]:
        if (reason := self.operator.refusal(axes, dtype)) is not None:
            raise RuntimeError(reason)
        x, *weights = self.operator.inputs(axes, dtype)
        return [cut(x), *(self._stored(weight.shape, cut) for weight in weights)]

    def run(self, inputs: Sequence[Any], outputs: Sequence["Tensor"]) -> Sequence["Tensor"]:
        x, *weights = inputs
        y = _by_token(x)
        for weight in weights:
            y = weight(y)
        return [y.reshape(outputs[-1].shape)]

    def compare(self, inputs: Sequence[Any], result: Sequence["Tensor"]) -> tuple["Tensor", "Tensor"]:
        """Compare all columns of the first and last rows: their product takes the whole weight."""
        x, *weights = inputs
        rows = edges(x.shape[-2], x.device)
        y = _by_token(x)[rows]
        for weight in weights:
            expected = self._product(y, weight)
            y = expected.to(x.dtype)
        return _by_token(result[0])[rows], expected

    def _stored(self, shape: tuple[int, ...], cut: Callable[[Operand], "Tensor"]) -> "StoredLinear":
        from gac.runtime.modules import BlockLinear, empty_linear
        from gac.runtime.storage.modules import StoredLinear

        *blocks, rows, columns = shape
        build: Any = partial(BlockLinear, blocks[0]) if blocks else empty_linear
        plain = build(columns, rows, bias=False, device="meta")
        module = StoredLinear.of(self._storage, plain)
        layout = self._storage.tensors(*module.matrix)
        tensors = {name: cut(Operand(size, name_of(dtype))) for name, (size, dtype) in layout.items()}
        scale = tensors.get("weight_scale")
        if scale is not None and name_of(scale.dtype) == "uint8":  # exponents: of random ones few products are finite
            tensors["weight_scale"] = scale % 16 + 112
        module.fill(tensors)
        return module

    def _product(self, x: "Tensor", weight: "StoredLinear") -> "Tensor":
        import torch

        from gac.runtime.plain.modeling_gac import multiply_blocks

        if self._read is not None:
            numbers, scale = self._read(x)
            x = numbers.float() * scale
        values = weight.values(torch.float32)
        return multiply_blocks(x.float(), values.view(-1, *values.shape[-2:]), None)


def _by_token(x: "Tensor") -> "Tensor":
    return x.reshape(x.shape[-2], -1)

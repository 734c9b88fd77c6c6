"""Operations: an operator and a shape, which is what latency tables know."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """One timed shape of an operator.

    ``linear`` has axes m, k, n: ``x[m, k] @ W[n, k].T``. ``low_rank`` has axes m, k, r, n:
    ``x[m, k] -> r -> n``, two GEMMs. m is the number of rows (tokens).
    """

    operator: str
    shape: tuple[tuple[str, int], ...]

    @property
    def axes(self) -> dict[str, int]:
        return dict(self.shape)


def linear(m: int, k: int, n: int) -> Operation:
    """A GEMM ``x[m, k] @ W[n, k].T``."""
    return Operation("linear", (("m", m), ("k", k), ("n", n)))


def batched_gemm(b: int, m: int, k: int, n: int) -> Operation:
    """``x[b, m, k] @ W[b, n, k].T`` for every b."""
    return Operation("batched_gemm", (("b", b), ("m", m), ("k", k), ("n", n)))

"""Operations: an operator and a shape, the keys of latency tables."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """One timed shape of an operator.

    ``linear`` has axes m, k, n: ``x[m, k] @ W[n, k].T``. ``low_rank`` has axes m, k, r, n:
    ``x[m, k] -> r -> n``, two GEMMs. m is the number of rows (tokens). Collectives have axes gpus, m, n.
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


EXPERTS = "experts"
"""The operator of a layer's routed experts."""


def routed(m: int, e: int, t: int, k: int, n: int) -> Operation:
    """Routed experts of m tokens, each through t of e experts of n neurons, with k features."""
    return Operation(EXPERTS, (("m", m), ("e", e), ("t", t), ("k", k), ("n", n)))


def round_inputs(numbers: str, m: int, k: int) -> Operation:
    """Quantise every row of ``x[m, k]`` from 16 bits to 8 (``fp8``, ``int8``), with a scale."""
    return Operation(f"round_to_{numbers}", (("m", m), ("k", k)))


def attend(b: int, h: int, kv: int, t: int, d: int) -> Operation:
    """Attention of h query heads of one new token of each of b sequences over kv heads of t cached ones, of size d."""
    return Operation("sdpa", (("b", b), ("h", h), ("kv", kv), ("s", 1), ("t", t), ("d", d)))


def attend_latents(
    b: int, h: int, kv: int, t: int, d: int, g: int, k: int, v: int, bits: int | None = None
) -> Operation:
    """The same over latents of g groups of heads: k numbers of each group's keys, and v of its values.

    They are in the dtype of the model, or quantised to ``bits``, with a scale for each token and group.
    """
    axes = {"b": b, "h": h, "kv": kv, "t": t, "d": d, "g": g, "k": k, "v": v}
    return Operation("latent_attention" if bits is None else f"latent_attention_int{bits}", tuple(axes.items()))


def all_reduce(gpus: int, m: int, n: int) -> Operation:
    """``x[m, n]`` of every GPU becomes their sum, on each of them."""
    return Operation("all_reduce", (("gpus", gpus), ("m", m), ("n", n)))


def all_gather(gpus: int, m: int, n: int) -> Operation:
    """The columns ``x[m, n / gpus]`` of every GPU become one ``x[m, n]``, on each of them."""
    return Operation("all_gather", (("gpus", gpus), ("m", m), ("n", n)))

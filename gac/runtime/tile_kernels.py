"""What Triton kernels do where several programs share a tile (``gac.runtime.tiles.Sharing``)."""

try:
    import triton
    import triton.language as tl
except ImportError as failure:  # transformers looks for what files import, but not here: a CPU needs no Triton
    raise RuntimeError("Triton is not installed") from failure


@triton.jit  # type: ignore[untyped-decorator]
def clear(counters, count, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write zeros, a power of two at most."""
    at = tl.arange(0, MOST)
    tl.store(counters + at, tl.zeros((MOST,), tl.int32), mask=at < count)


@triton.jit  # type: ignore[untyped-decorator]
def together(own, sums, counters, tile, part, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of all programs of a tile, added in order, for the last of them that comes; and whether this one is.

    Counters are zeros again afterwards, so that the next launch can have them.

    Args:
        own: what this program, number ``part``, found.
    """
    last = True
    if SPLIT > 1:
        down: tl.constexpr = own.shape[0]
        across: tl.constexpr = own.shape[1]
        inside = tl.arange(0, down)[:, None] * across + tl.arange(0, across)[None, :]
        first = sums + tile.to(tl.int64) * SPLIT * down * across + inside
        tl.store(first + part * down * across, own)
        tl.debug_barrier()
        last = tl.atomic_add(counters + tile, 1) == SPLIT - 1
        if last:
            tl.store(counters + tile, 0)
            own = tl.zeros((down, across), own.dtype)
            for one in range(SPLIT):
                own += tl.load(first + one * down * across, cache_modifier=".cg")
    return own, last

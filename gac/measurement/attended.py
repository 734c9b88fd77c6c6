"""Errors of keys and values as attention sees them: second moments of gradients that are summed over cached tokens.

K-FAC takes tokens as independent. An error E of k_proj or v_proj changes every cached vector, and a query that reads
many of them meets the sum of these changes. So gradients are summed over tokens before they are squared. For a block b
of neighbouring queries, with the gradients that back-propagation brings to what their attention mixed,

    D_b = sum_s g_bs x_s^T        A = E[D^T D]        G = E[D D^T] / E[|D|^2]

x_s is the input of the weight at the cached token s, and g_bs the gradient at its output there that comes through these
queries alone: through the softmax for keys, through its weights for values, and through norms and rotary embedding as
the model has them. E is the sum over blocks, for each token of the text. The loss of an error is 1/2 E[<D, E>^2], and
A (x) G has the partial traces of E[vec D vec D^T], and its trace. Blocks count as independent. YAQA (arXiv 2505.22988)
sums over whole sequences so, of any weight; docs/kv-cache.md has what blocks of several sizes measured.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from gac.core.errors import ModelError
from gac.core.linalg import add_square, fits_tf32, mirrored, tf32_products
from gac.measurement.attention_rows import Blocks, hearing
from gac.measurement.sums import RunningSums, first_half
from gac.models.sites import Weight

QUERIES = 32
"""In a block."""
HELD_TOKENS = 1024
"""Tokens that are held out, in two windows at least: between windows of 512 the divergences, summed over SmolLM2's
weights, differed by 7 %."""
HELD_SHARE = 6
"""One of so many windows is held out at most."""


def held_out(windows: int, length: int) -> list[int]:
    """The numbers of the windows that the moments of keys and values leave out, in even steps; none of few windows.

    What is chosen by these moments is measured there (``gac.forms.latent.anchors``): on the text that chose it, 12
    windows of 512, SmolLM2 lost half as much.

    Args:
        length: tokens of a window.
    """
    count = min(max(2, -(-HELD_TOKENS // length)), windows // HELD_SHARE)
    return [(2 * index + 1) * windows // (2 * count) for index in range(count)]


def seen_windows(windows: int, half: int, out: Collection[int]) -> list[int]:
    """Count the windows of each half of the text that are not held out; ``half`` windows are in the first."""
    halves = [range(half), range(half, windows)]
    return [sum(window not in out for window in part) for part in halves if part]


def cached_weights(weights: Iterable[Weight]) -> list[Weight]:
    """The k_proj and v_proj among them, where these are weights of their own."""
    return [weight for weight in weights if weight.cached and weight.heads]


class AttendedSums(RunningSums):
    """The sums of one layer's keys and values, without the windows that are held out.

    Args:
        weights: of the layer; others than k_proj and v_proj, where these are apart, are passed over.
        shape: windows and tokens of the text.
        first: the number of the first window that this process runs.
    """

    def __init__(self, weights: Sequence[Weight], shape: Sequence[int], first: int) -> None:
        windows, self._length = shape
        self._weights, self._window, self._half = cached_weights(weights), first, first_half(windows)
        self._held_out = held_out(windows, self._length)
        self._counts = seen_windows(windows, self._half, self._held_out)
        sizes = {"inputs": "in_features", "gradients": "out_features"}
        super().__init__(
            {
                _name(what, half, weight.name): 2 * (getattr(weight, size),)
                for weight in self._weights
                for half in range(len(self._counts))
                for what, size in sizes.items()
            }
        )

    @contextmanager
    def listening(self, model: nn.Module) -> Iterator[None]:
        """Add each window that runs back through the layer inside the block; ModelError if none does."""
        names = [weight.name for weight in self._weights]
        with ExitStack() as stack:
            for attention in {weight.input_group for weight in self._weights if weight.input_group}:
                stack.enter_context(hearing(model, attention, names, QUERIES, self._add))
            yield
        if names and not self.sums:
            raise ModelError(
                f"{names[0]} in an attention that calls no function of transformers' attention interface",
                "an attention that calls the one which its config names, so that it can be heard",
                "Leave the form latent out, or use a model class of transformers.",
            )

    def means(self) -> dict[str, Tensor]:
        """The float32 moments by name; the sums are gone."""
        means: dict[str, Tensor] = {}
        for weight in self._weights:
            names = [
                [_name(what, half, weight.name) for what in ("inputs", "gradients")]
                for half in range(len(self._counts))
            ]
            pairs = [[mirrored(self.sums.pop(name)) for name in pair] for pair in names]
            squared = sum(float(inputs.trace()) for inputs, _ in pairs) / (self._length * sum(self._counts))
            for pair, sums, windows in zip(names, pairs, self._counts, strict=True):
                for name, total, over in zip(pair, sums, (1.0, squared or 1.0), strict=True):
                    means[name] = total.div_(self._length * windows * over).float()
        return means

    def _add(self, blocks: Iterator[Blocks]) -> None:
        half, excluded = self._window // self._half, self._window in self._held_out
        self._window += 1
        for some in blocks:
            for name, (gradients, inputs) in some.items():
                totals = [self.total(_name(what, half, name), inputs.device) for what in ("inputs", "gradients")]
                if excluded:
                    continue
                with tf32_products(fits_tf32(inputs)):
                    summed = gradients.mT.float() @ inputs.float()  # (blocks, out, in)
                    for total, sums in zip(totals, (summed, summed.mT), strict=True):
                        add_square(total, sums.flatten(0, 1))


def _name(what: str, half: int, weight: str) -> str:
    return f"attended-{what}/{half}/{weight}"

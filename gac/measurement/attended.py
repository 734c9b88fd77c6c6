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

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from gac.core.errors import ModelError
from gac.core.linalg import add_square, fits_tf32, mirrored, tf32_products
from gac.measurement.sums import RunningSums, first_half
from gac.models.examples import TokenWindows, sizes_of
from gac.models.sites import Weight
from gac.runtime.latents.attention import own_interface

QUERIES = 32
"""In a block."""
HELD_TOKENS = 1024
"""Tokens that are held out, in two windows at least: between windows of 512 the divergences, summed over SmolLM2's
weights, differed by 7 %."""
HELD_SHARE = 6
"""One of so many windows is held out at most."""
_ATTENTION = "gac_listened"
OFF = 0.05
"""The largest relative difference between the output of an attention, which is 16-bit, and what is computed here."""

AT_ONCE = 8
"""Blocks that are differentiated together: in fewer and larger products, with tokens that the first do not read."""

Blocks = Mapping[str, tuple[Tensor, Tensor]]
"""Of each projection, by its name: the gradients at its output that come through each block of queries alone,
``(blocks, tokens, out)``, and its inputs, ``(tokens, in)``; of the tokens that these queries may read."""


def held_out(windows: int, length: int) -> list[int]:
    """The numbers of the windows that the moments of keys and values leave out, in even steps; none of few windows.

    What is chosen by these moments is measured there (``gac.forms.latent.torch``): on the text that chose it, 12
    windows of 512, SmolLM2 lost half as much.
    """
    count = min(max(2, -(-HELD_TOKENS // length)), windows // HELD_SHARE)
    return [(2 * index + 1) * windows // (2 * count) for index in range(count)]


def seen_windows(sizes: Sequence[float], half: int, out: Collection[int]) -> list[float]:
    """Sum the sizes of the windows in each half of the text that are not held out; ``half`` are in the first."""
    halves = [range(half), range(half, len(sizes))]
    return [sum(sizes[window] for window in part if window not in out) for part in halves if part]


def cached_weights(weights: Iterable[Weight]) -> list[Weight]:
    return [weight for weight in weights if weight.cached and weight.heads]


class AttendedSums(RunningSums):
    """The sums of one layer's keys and values, without the windows that are held out; see ``MomentSums``."""

    def __init__(self, weights: Sequence[Weight], text: TokenWindows, first: int) -> None:
        windows, self._length = text.shape
        self._weights, self._window, self._half = cached_weights(weights), first, first_half(windows)
        self._held_out = held_out(windows, self._length)
        self._counts = seen_windows(sizes_of(text), self._half, self._held_out)
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
                stack.enter_context(_hearing(model, attention, names, QUERIES, self._add))
            yield
        if names and not self.sums:
            raise ModelError(
                f"{names[0]} in an attention that calls no function of transformers' attention interface",
                "an attention that calls the one which its config names, so that it can be heard",
                "Leave the form latent out, or use a model class of transformers.",
            )

    def means(self) -> dict[str, Tensor]:
        means: dict[str, Tensor] = {}
        for weight in self._weights:
            means["attended-windows"] = torch.tensor([*self._counts, 0][:2], dtype=torch.float64)
            names = [
                [_name(what, half, weight.name) for what in ("inputs", "gradients")]
                for half in range(len(self._counts))
            ]
            pairs = [[mirrored(self.sums.pop(name)) for name in pair] for pair in names]
            squared = sum(float(inputs.trace()) for inputs, _ in pairs) / (self._length * sum(self._counts))
            means[f"attended-power/{weight.name}"] = torch.tensor(squared or 1.0, dtype=torch.float64)
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


@contextmanager
def _hearing(
    model: nn.Module, attention: str, names: Sequence[str], size: int, heard: Callable[[Iterator[Blocks]], None]
) -> Iterator[None]:
    """Listen to an attention: ``heard`` is called with the blocks of each window, when its gradient comes.

    Other hooks of the projections have to be there already: what follows is differentiated to views of their outputs,
    so that those hooks hear no gradient of single blocks. ``names`` are those of its k_proj and v_proj.
    ModelError, while the model runs, if it mixes values in another way than by softmax.
    """
    AttentionInterface.register(_ATTENTION, _listened)
    module: Any = model.get_submodule(attention)
    config, listening = module.config, _Listening(module.config, attention, size, heard)
    with ExitStack() as stack:
        for name in names:
            hook = partial(listening.project, name)
            stack.enter_context(model.get_submodule(name).register_forward_hook(hook))
        stack.callback(setattr, module, "config", config)
        module.config = listening
        yield


class _Listening:
    """Config that names ``_listened`` as the attention, and records inputs and outputs of its projections."""

    _attn_implementation = _ATTENTION

    def __init__(self, config: Any, name: str, size: int, heard: Callable[[Iterator[Blocks]], None]) -> None:
        self.wrapped, self.name, self._size, self._heard = config, name, size, heard
        self._read: dict[str, Tensor] = {}
        self._wrote: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def project(self, name: str, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        self._read[name], self._wrote[name] = inputs[0].detach(), output.view_as(output)
        return self._wrote[name]

    def attended(self, call: "_Call", output: Tensor) -> None:
        call.check(self.name, output.detach())
        read, wrote, self._read, self._wrote = self._read, self._wrote, {}, {}
        blocks = partial(_blocks, call, self._size, read, wrote)
        output.register_hook(lambda gradients: self._heard(blocks(gradients)))  # type: ignore[no-untyped-call]


def _listened(attention: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    listening: _Listening = attention.config
    attended = own_interface(attention, listening.wrapped)(attention, query, key, value, mask, **options)
    if attended[0].requires_grad:
        listening.attended(_Call(query.detach(), key, value, mask, options), attended[0])
    return attended


def _blocks(
    call: "_Call", size: int, read: Mapping[str, Tensor], wrote: Mapping[str, Tensor], gradients: Tensor
) -> Iterator[Blocks]:
    """Yield all blocks, ``AT_ONCE`` at a time, from gradients ``(1, tokens, heads, length)`` of the mixed values."""
    tokens = gradients.shape[1]
    for start in range(0, tokens, AT_ONCE * size):
        rows = slice(start, min(start + AT_ONCE * size, tokens))
        through = call.through(rows, gradients[:, rows].float(), size)
        of = zip(read.items(), _back((call.key, call.value), through, list(wrote.values())), strict=True)
        yield {name: (observed[:, 0, : rows.stop], inputs[0, : rows.stop]) for (name, inputs), observed in of}


def _back(ends: Sequence[Tensor], gradients: Sequence[Tensor], begin: Sequence[Tensor]) -> Sequence[Tensor]:
    """Back-propagate gradients ``(blocks, ...)``; one by one where a kernel takes no batch."""
    back = partial(torch.autograd.grad, ends, begin, retain_graph=True)
    try:
        return back(gradients, is_grads_batched=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return [torch.stack(each) for each in zip(*map(back, zip(*gradients, strict=True)), strict=True)]


@dataclass(frozen=True, eq=False)
class _Call:
    """Arguments of an attention: query, keys and values ``(1, heads, tokens, length)``, mask and options."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    options: Mapping[str, Any]

    @property
    def _scale(self) -> Any:
        scale = self.options.get("scaling")
        return self.query.shape[-1] ** -0.5 if scale is None else scale

    def _shares(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Shares that queries take of each token up to the last of them, ``(1, heads, queries, tokens)``; and the
        factors by which a softcap multiplies gradients of their scores."""
        scores = self.query[:, :, rows].float() @ self._of_queries(self.key, rows).mT * self._scale
        slope = scores.new_ones(())
        if cap := self.options.get("softcap"):
            bent = torch.tanh(scores / cap)
            scores, slope = cap * bent, 1 - bent.square()
        return self._masked(scores, rows).softmax(-1), slope

    def _of_queries(self, tensor: Tensor, rows: slice) -> Tensor:
        return tensor[:, :, : rows.stop].detach().float().repeat_interleave(self.query.shape[1] // tensor.shape[1], 1)

    def _masked(self, scores: Tensor, rows: slice) -> Tensor:
        if isinstance(self.mask, Tensor) and self.mask.ndim == 4:
            mask = self.mask[:, :, rows, : rows.stop]
            return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        late = torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
        seen = torch.arange(rows.stop, device=scores.device)
        hidden = seen > late
        if window := self.options.get("sliding_window"):
            hidden |= seen <= late - window
        return scores.masked_fill(hidden, -math.inf)

    def through(self, rows: slice, gradients: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """The gradients at keys and values that come through each block of ``size`` queries, of all tokens.

        ``gradients`` are at what they mixed, ``(1, queries, heads, length)``; the result is of keys and of values,
        ``(blocks, 1, heads, tokens, length)``, in their dtype.
        """
        with torch.no_grad():
            grad_rows = gradients.transpose(1, 2)
            shares, slope = self._shares(rows)
            inner = grad_rows @ self._of_queries(self.value, rows).mT
            scores = shares * (inner - (shares * inner).sum(-1, keepdim=True)) * slope * self._scale
            queries = self.query[:, :, rows].float()
            return _by_block(self.key, scores, queries, size), _by_block(self.value, shares, grad_rows, size)

    def check(self, name: str, output: Tensor) -> None:
        """Refuse an attention, called ``name``, whose last queries mixed something else than is computed here."""
        rows = slice(max(0, output.shape[1] - 16), output.shape[1])
        if isinstance(self.mask, Tensor) and self.mask.ndim == 4 and self._seen_early():
            raise ModelError(
                f"attention {name}, in which tokens of an image attend to later ones",
                "attention to tokens before alone, with the form latent",
                "Leave the form latent out, or calibrate on text.",
            )
        with torch.no_grad():
            mixed = (self._shares(rows)[0] @ self._of_queries(self.value, rows)).transpose(1, 2)
        off = float((mixed - output[:, rows].float()).norm() / mixed.norm().clamp_min(1e-30))
        if math.isfinite(off) and off > OFF:
            raise ModelError(
                f"attention {name}, which mixed values {off:.0%} off those that softmax of its scores mixes",
                "softmax attention over all tokens before, or those of a window, with a mask that is a tensor",
                "Leave the form latent out, or load the model with attn_implementation='sdpa' or 'eager'.",
            )

    def _seen_early(self) -> bool:
        visible = self.mask if self.mask.dtype == torch.bool else self.mask > torch.finfo(self.mask.dtype).min / 2
        return bool(visible.triu(1).any())


def _by_block(tensor: Tensor, weights: Tensor, of: Tensor, size: int) -> Tensor:
    """Sum ``of (1, heads, queries, length)`` over the queries of each block, and over those that share a head.

    ``weights`` are of each token, ``(1, heads, queries, tokens)``; the result is ``(blocks, *tensor.shape)``.
    """
    count, heads = -(-weights.shape[2] // size), tensor.shape[1]
    shape, more = (heads, weights.shape[1] // heads, count, size), count * size - weights.shape[2]
    padded = (pad(operand, (0, 0, 0, more)).view(*shape, -1) for operand in (weights, of))
    parts, summed = (operand.transpose(1, 2).flatten(2, 3) for operand in padded)  # (heads, blocks, queries, ...)
    products = (parts.mT @ summed).transpose(0, 1)  # (blocks, heads, tokens, length)
    return pad(products, (0, 0, 0, tensor.shape[2] - products.shape[2]))[:, None].to(tensor.dtype)

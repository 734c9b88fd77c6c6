"""Listening to an attention: what its projections read and wrote, and their gradients through some queries alone."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from gac.core.errors import ModelError
from gac.runtime.latents.attention import own_interface

_ATTENTION = "gac_listened"
OFF = 0.05
"""The largest relative difference between the output of an attention, which is 16-bit, and what is computed here."""

AT_ONCE = 8
"""Blocks that are differentiated together: in fewer and larger products, with tokens that the first do not read."""

Blocks = Mapping[str, tuple[Tensor, Tensor]]
"""Of each projection, by its name: the gradients at its output that come through each block of queries alone,
``(blocks, tokens, out)``, and its inputs, ``(tokens, in)``; of the tokens that these queries may read."""


@contextmanager
def hearing(
    model: nn.Module, attention: str, names: Sequence[str], size: int, heard: Callable[[Iterator[Blocks]], None]
) -> Iterator[None]:
    """With what hears an attention, one window at a time, when its gradient comes.

    Other hooks of the projections have to be there already: what follows is differentiated to views of their outputs,
    so that those hooks hear no gradient of single blocks.

    Args:
        names: those of its k_proj and v_proj.
        size: queries of a block, but for the last one, which may have fewer.
        heard: is given the blocks of a window.

    Raises:
        ModelError: while the model runs, of an attention that mixes values in another way than by softmax.
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
        """A hook of a projection."""
        self._read[name], self._wrote[name] = inputs[0].detach(), output.view_as(output)
        return self._wrote[name]

    def attended(self, call: "_Call", output: Tensor) -> None:
        """The attention has run, to ``output (1, tokens, heads, length)``."""
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
        """Repeat keys or values of the tokens up to the last of some queries for each query head, float32."""
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
        """The gradients at keys and values that come through each block of some queries, of all tokens.

        Args:
            gradients: at what they mixed, ``(1, queries, heads, length)``.
            size: queries of a block; the last one may have fewer.

        Returns:
            of keys and of values, ``(blocks, 1, heads, tokens, length)``, in their dtype.
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
        with torch.no_grad():
            mixed = (self._shares(rows)[0] @ self._of_queries(self.value, rows)).transpose(1, 2)
        off = float((mixed - output[:, rows].float()).norm() / mixed.norm().clamp_min(1e-30))
        if math.isfinite(off) and off > OFF:
            raise ModelError(
                f"attention {name}, which mixed values {off:.0%} off those that softmax of its scores mixes",
                "softmax attention over all tokens before, or those of a window, with a mask that is a tensor",
                "Leave the form latent out, or load the model with attn_implementation='sdpa' or 'eager'.",
            )


def _by_block(tensor: Tensor, weights: Tensor, of: Tensor, size: int) -> Tensor:
    """Sum over the queries of each block, and over those that share a head: ``(blocks, *tensor.shape)``.

    Args:
        weights: of each token, ``(1, heads, queries, tokens)``.
        of: what is summed, ``(1, heads, queries, length)``.
    """
    count, heads = -(-weights.shape[2] // size), tensor.shape[1]
    shape, more = (heads, weights.shape[1] // heads, count, size), count * size - weights.shape[2]
    padded = (pad(operand, (0, 0, 0, more)).view(*shape, -1) for operand in (weights, of))
    parts, summed = (operand.transpose(1, 2).flatten(2, 3) for operand in padded)  # (heads, blocks, queries, ...)
    products = (parts.mT @ summed).transpose(0, 1)  # (blocks, heads, tokens, length)
    return pad(products, (0, 0, 0, tensor.shape[2] - products.shape[2]))[:, None].to(tensor.dtype)

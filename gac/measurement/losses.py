"""The loss of a model on one window of tokens, and the one whose gradients make the Fisher matrix."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

from gac.core.linalg import check_measured
from gac.models.modules import run_on


def window_loss(model: nn.Module, ids: Tensor, what: str = "a calibration window") -> Tensor:
    """The summed token loss of one window in nats, ids ``(tokens,)``; the first token is not predicted.

    ``what`` names the window in the error that the loss is not finite.
    """
    logits = _logits(model, ids)
    loss = cross_entropy(logits, ids[1:].to(logits.device), reduction="sum")
    check_measured(loss, f"the loss of {what} is {loss.item()}", "a finite loss")
    return loss


def drawn_loss(model: nn.Module, ids: Tensor, what: str, seed: int) -> tuple[Tensor, Tensor]:
    """The summed token loss of one window, and that under labels which the model itself draws; nats, both.

    E[g g^T] over gradients of the second is the Fisher matrix; over those of the first, the empirical one, which fits
    the text that it is measured on (K-FAC, arXiv 1503.05671, section 5).

    Args:
        ids, what: as for ``window_loss``.
        seed: of the draw; the same labels every time on the same kind of device.
    """
    chances = _logits(model, ids).log_softmax(-1)
    fixed = chances.detach()
    observed = nll_loss(fixed, ids[1:].to(fixed.device), reduction="sum")
    check_measured(observed, f"the loss of {what} is {observed.item()}", "a finite loss")
    dice = torch.Generator(fixed.device).manual_seed(seed)
    upto = fixed.exp().cumsum(-1)  # torch.multinomial takes longer on a CPU than the rest of the loss
    thresholds = torch.rand(len(upto), 1, generator=dice, dtype=upto.dtype, device=upto.device) * upto[:, -1:]
    drawn = torch.searchsorted(upto, thresholds, right=True).clamp_max(upto.shape[1] - 1)[:, 0]
    return observed, nll_loss(chances, drawn, reduction="sum")


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits that predict a token of the window, float32, ``(tokens - 1, vocabulary)``."""
    logits: Tensor = run_on(model, ids[None]).logits[0, :-1]
    return logits.float()

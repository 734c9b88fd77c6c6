"""The loss of a model on one window of tokens."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gac.errors import ModelError


def window_loss(model: nn.Module, ids: Tensor, what: str = "a calibration window") -> Tensor:
    """The summed token loss of one window in nats, ids ``(tokens,)``; the first token is not predicted.

    Args:
        what: what an error calls the window, and the model where it was changed for it.

    Raises:
        ModelError: it is not finite.
    """
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    logits = model(input_ids=ids.to(embedding.weight.device).unsqueeze(0), use_cache=False).logits[0, :-1]
    loss = cross_entropy(logits.float(), ids[1:].to(logits.device), reduction="sum")
    if not torch.isfinite(loss):
        raise ModelError(
            f"the loss of {what} is {loss.item()}",
            "a finite loss",
            "Load the model in bfloat16 or float32, and check its weights.",
        )
    return loss

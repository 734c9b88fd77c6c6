"""The model ``gac`` of lm-evaluation-harness: dense models and compressed checkpoints alike.

Importing this module registers it, for ``lm_eval.simple_evaluate("gac", model_args="pretrained=DIR", ...)``. The
harness's own command, knowing it::

    python -m gac.evaluation.harness --model gac --model_args pretrained=DIR --tasks hellaswag
"""

import logging
from functools import partialmethod
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from gac.checkpoint.load import open_model
from gac.core.errors import ModelError
from gac.models.loading import load_tokenizer

# Its constructor warns about models that are loaded already; here they always are.
logging.getLogger(HFLM.__module__).addFilter(lambda record: record.funcName != "__init__")


@register_model("gac")
class GacLM(HFLM):  # type: ignore[misc]
    """A causal LM as the harness's Hugging Face model runs it.

    Args:
        pretrained: a directory that ``gac.save`` wrote, any other name that ``gac.allocate`` takes, or a loaded model.
        tokenizer: a tokenizer, or the name of one; None takes the model's own.
        dtype: such as ``bfloat16``; ``auto`` takes the checkpoint's own.
        options: of the harness's Hugging Face model (``batch_size``, ``max_length``, ``add_bos_token``).

    Raises:
        GacError: the model or its tokenizer cannot be read.
    """

    add_bos_token: bool | None

    def __init__(
        self, pretrained: Any, tokenizer: Any = None, device: str | None = None, dtype: str = "auto", **options: Any
    ) -> None:
        if isinstance(pretrained, str | Path):
            if tokenizer is None or isinstance(tokenizer, str | Path):
                tokenizer = load_tokenizer(str(tokenizer or pretrained))
            pretrained = open_model(pretrained, device=device, dtype=_dtype(dtype)).model
        super().__init__(pretrained, tokenizer=tokenizer, **options)

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """As the harness; a ModelError if one is NaN or infinite."""
        answers = super().loglikelihood(requests, disable_tqdm)
        _check_finite(value for value, _ in answers)
        return answers

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """As the harness, whose own BOS is the only one: its Hugging Face model would predict the tokenizer's too."""
        before, self.add_bos_token = self.add_bos_token, False
        try:
            answers = super().loglikelihood_rolling(requests, disable_tqdm)
        finally:
            self.add_bos_token = before
        _check_finite(answers)
        return answers


def _dtype(name: str) -> torch.dtype | None:
    dtype = None if name == "auto" else getattr(torch, name, name)
    if isinstance(dtype, str):
        raise ModelError(f"dtype {name!r}", "auto, or one of PyTorch's, like bfloat16", "Name another dtype.")
    return dtype


def _check_finite(values: Any) -> None:
    for number, value in enumerate(values):
        if not isfinite(value):
            problem, remedy = f"the log-likelihood of request {number} is {value}", "Check the weights and the dtype."
            raise ModelError(problem, "a finite log-likelihood", remedy)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.config.evaluate_config import EvaluatorConfig

    config: Any = EvaluatorConfig  # whose default device is cuda:0, even without a GPU
    config.__init__ = partialmethod(config.__init__, device=None)
    cli_evaluate()

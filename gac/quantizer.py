"""Compress while loading: transformers' ``from_pretrained`` with a plan, through its seam for quantisers."""

from pathlib import Path
from typing import Any

from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from gac.api import compress
from gac.measurement.texts import CalibrationText
from gac.plan.plan import Plan

METHOD = "gac"


class GacConfig(QuantizationConfigMixin):
    """``from_pretrained(base, quantization_config=gac.GacConfig("plan.json"))``: the base model, compressed.

    The dense weights are loaded whole and on one device, then compressed by ``gac.compress``, which also says what the
    arguments are. The result is what that returns, and keeps nothing of this config.
    """

    def __init__(
        self, plan: Plan | str | Path, calibration: CalibrationText | None = None, tokenizer: Any = None
    ) -> None:
        self.quant_method: Any = METHOD
        self.plan = Plan.opened(plan)
        self.calibration, self.tokenizer = calibration, tokenizer


register_quantization_config(METHOD)(GacConfig)  # as a decorator it would hide the class from type checkers


@register_quantizer(METHOD)
class GacQuantizer(HfQuantizer):
    """Compresses a model that transformers loads with a ``GacConfig``, once all weights are there."""

    def postprocess_model(self, model: Any, **_: Any) -> None:
        """Compress the loaded model in place; errors as ``gac.compress``."""
        quantizer: Any = self
        config = quantizer.quantization_config
        quantizer.remove_quantization_config(model)
        compress(model, config.plan, calibration=config.calibration, tokenizer=config.tokenizer, progress=False)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

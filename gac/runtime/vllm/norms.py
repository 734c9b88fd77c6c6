"""Norms that prepare the inputs of the stored layer that reads them: quantised, or in the order of its kernel.

They are those of vLLM's decoder layers whose ``forward`` hands each norm to one linear layer, and to nothing else.
"""

from torch import nn
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.mistral import MistralDecoderLayer
from vllm.model_executor.models.qwen2 import Qwen2DecoderLayer
from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer

from gac.runtime.vllm.stored import StoredLinearMethod

_READ_ONCE = {layer.forward for layer in (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)}
_READERS = {"input_layernorm": "self_attn.qkv_proj", "post_attention_layernorm": "mlp.gate_up_proj"}
"""Layers by the norms that they read."""


def stored_readers(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the stored layers that alone read a norm, by that norm."""
    readers = {}
    for module in model.modules():
        if type(module).forward in _READ_ONCE:
            parts = dict(module.named_modules())  # without those of a block that is left out
            for norm, name in _READERS.items():
                if isinstance(getattr(parts.get(name), "quant_method", None), StoredLinearMethod):
                    readers[parts[norm]] = parts[name]
    return readers

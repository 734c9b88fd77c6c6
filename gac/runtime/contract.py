"""Names and sizes that plans and running models share. Loads no torch, so that planning reads it too."""

from typing import Any

SCHEMA = 3  # version of the key ``gac`` of a checkpoint's ``config.json``

COMPRESSED = "gac_"  # the beginning of the ``model_type`` of a compressed checkpoint; the dense one's follows

DIGESTS = "gac_digests.json"  # the file beside a checkpoint's weights that says what every file was when it was saved

LAYOUT = "compression_config"
"""The attribute of a compressed model's config that holds what its file calls ``QUANTIZATION``. Transformers looks for
a quantiser under that name; vLLM looks for one under either."""

QUANTIZATION = "quantization_config"  # the key of ``config.json`` that tells other readers how weights of few bits lie

COMPRESSED_TENSORS = "compressed-tensors"  # the ``quant_method`` that it names

CACHES = ("cache", "past_key_values")
"""Names of the cache among the arguments of an attention in transformers: from 5.24 on, and before."""

FEW_ROWS = 64
"""The most rows of a GEMM that the kernels of ``gac.runtime.kernels.few_rows`` run."""

SERVED_EXPERTS = ("Floats8",)
"""Storages of routed experts that vLLM's kernel reads, which GAC's plugin runs them in."""

_ENOUGH_OUTPUTS = 1 << 22

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def chooses_code(key: str) -> bool:
    """Return whether a key of a config makes transformers fetch or choose code: kernels of attention and of experts."""
    return key.lstrip("_").startswith(
        ("attn_implementation", "experts_implementation", "custom_pipelines", "kernel_config")
    )


def experts_of(config: Any) -> int:
    """Return the largest number of experts of a layer that a config of transformers states; 0 where that is below 2."""
    text = getattr(config, "text_config", None) or config
    if "nemotron_h" in str(getattr(text, "model_type", "")) and "moe" not in (getattr(text, "layer_types", None) or ()):
        return 0  # its configs state a number all the same
    parts = (config, text, getattr(config, "ffn_config", None))
    counts = (getattr(part, name, None) for part in parts for name in _EXPERTS)
    most = max((max(count) if isinstance(count, (list, tuple)) else count for count in counts if count), default=0)
    return most if most > 1 else 0


def apart_from(rows: int) -> int:
    """Output features from which a weight is multiplied by itself, though it shares a GEMM with others.

    4 Mi outputs, 256 tiles of 128 x 128, fill a GPU alone. Sharing wins nothing then, and its part would lie scattered
    in the shared output, which slows down what reads it: gate and up of Llama-3-8B at 1,024 tokens.
    """
    return -(-_ENOUGH_OUTPUTS // rows)

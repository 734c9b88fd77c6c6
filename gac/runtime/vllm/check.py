"""Checkpoints that the engine runs, and the refusals of others, before it starts."""

import logging
from typing import Any

from gac.runtime.contract import COMPRESSED, SERVED_EXPERTS, experts_of
from gac.runtime.header import header_of
from gac.runtime.modules import KINDS

TESTED = ("0.26", "0.32")
NOT_SERVED = (
    *("apertus1p5_text", "bamba", "biogpt", "bloom", "codegen", "exaone", "falcon", "falcon_h1", "gemma4_text"),
    *("gemma4_unified_text", "gpt_bigcode", "granitemoehybrid", "internlm3", "iquestcoder", "lfm2"),
    *("modernbert-decoder", "mpt", "nemotron_h", "olmo_hybrid", "qwen3_5_text", "xglm", "youtu"),
)
"""Architectures whose classes in vLLM 0.32 do not run compressed models; transformers runs all of them."""
SERVED_MULTIMODAL = (
    *("gemma3", "idefics3", "internvl", "llava", "llava_next", "llava_onevision", "mistral3", "qwen2_5_vl", "qwen3_vl"),
    "smolvlm",
)
"""Multimodal architectures whose classes in vLLM 0.32 were seen to run compressed decoders."""
SERVED_MIXTURES = ("glm4_moe", "gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Mixtures of experts whose classes in vLLM 0.32 were seen to run compressed models; Mixtral and Qwen 3 in 0.26 too."""
FEWER_EXPERTS = ("gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Those of which it was seen to run plans with fewer or narrower experts."""
_ROUTED = ("Router", "Experts")
_RUN = ("Linear", "LowRankLinear", "Absent", "Constant", *_ROUTED)
"""Modules that the engine runs, as ``config.json`` calls them."""
_logger = logging.getLogger("gac")


def refusal(config: Any) -> tuple[str, str, str] | None:
    """Return why the engine does not run a model with the key ``gac``, as an error; None where it does.

    It is the value, what is expected, and the remedy.
    """
    try:
        header = header_of(config)
    except ValueError as failure:
        problem, _, expected = str(failure).rstrip(".").partition("; expected ")
        return problem, expected or "a key that GAC wrote", "Or compress the model again."
    model_type = str(getattr(config, "model_type", "")).removeprefix(COMPRESSED)
    if not is_served(config):
        remedy = "Run this checkpoint in transformers, or serve gac export --merge, of the dense model's size."
        kind = ", a multimodal model" if is_multimodal(config) else ""
        kind += ", a mixture of experts" if experts_of(config) else ""
        return f"model type {model_type!r}{kind}", "an architecture that the plugin serves", remedy
    if header is None:
        return "config.json has no key gac", "a model that GAC compressed", "Serve the dense model."
    modules: dict[str, Any] = {**header.modules, **({"the LM head": header.head} if header.head else {})}
    for name, module in modules.items():
        kind = getattr(module, "module", _RUN[0])
        if kind not in KINDS:
            problem = f"config.json, key gac: {name} is {kind!r}, which this version of GAC does not know"
            remedy = "Install the version of GAC that wrote it: pip install --upgrade gpu-aligned-compression."
            return problem, f"one of {', '.join(KINDS)}", remedy
        if kind in _ROUTED and model_type not in FEWER_EXPERTS:
            remedy = "Plan without the form, or run this checkpoint in transformers."
            return f"{name} of a {model_type} has form {module.form}", f"one of {', '.join(FEWER_EXPERTS)}", remedy
        if kind == "Experts" and module.storage not in (None, *SERVED_EXPERTS):
            problem = f"{name} has scheme {module.scheme}, in which vLLM does not run experts"
            return problem, "experts in bf16 or fp8", "Plan without it, or run this checkpoint in transformers."
        form = getattr(module, "form", "")
        if kind not in _RUN or (form == "heads" and is_multimodal(config)):
            remedy = "Plan with gac allocate --engine vllm, or run this checkpoint in transformers."
            where = " in multimodal models" if kind in _RUN else ""
            return f"{name} has form {form}, which vLLM does not run{where}", "a plan made for vLLM", remedy
    return None


def is_served(config: Any) -> bool:
    """Return whether the plugin serves compressed models of the architecture."""
    model_type = str(getattr(config, "model_type", "")).removeprefix(COMPRESSED)
    if experts_of(config):
        return model_type in SERVED_MIXTURES and not is_multimodal(config)
    return model_type in SERVED_MULTIMODAL if is_multimodal(config) else model_type not in NOT_SERVED


def is_multimodal(config: Any) -> bool:
    return any(getattr(config, name, None) is not None for name in ("text_config", "vision_config"))


def warn_of_version() -> None:
    """Warn where GAC's plugin was tested with other versions of vLLM."""
    import vllm  # not there where models are checked alone

    if not vllm.__version__.startswith(TESTED):
        _logger.warning("vLLM %s; GAC's plugin was tested with %s", vllm.__version__, " and ".join(TESTED))

"""Greedy tokens of vLLM, run by vLLM's own Python: ``python vllm_worker.py DIRECTORY REQUEST.json ANSWER.json``."""

import json
import os
import sys
from importlib import import_module
from pathlib import Path


def main() -> None:
    from transformers import AutoConfig
    from vllm import LLM, SamplingParams

    directory, request, answer = map(Path, sys.argv[1:])
    asked = json.loads(request.read_text())
    if path := asked["options"].pop("config_class", None):
        module, _, name = path.rpartition(".")
        config_class = getattr(import_module(module), name)
        AutoConfig.register(config_class.model_type, config_class)
    engine = LLM(str(directory), skip_tokenizer_init=True, max_model_len=64, disable_log_stats=True, **asked["options"])
    sampling = SamplingParams(max_tokens=asked["tokens"], temperature=0.0, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in asked["prompts"]], sampling, use_tqdm=False)
    answer.write_text(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))


if __name__ == "__main__":
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    main()

"""Greedy tokens of vLLM, and the number of its KV caches: ``python vllm_worker.py REQUESTS.json``, by its own Python.

Each request runs in a process of its own, forked after the imports, which take longer than a small model.
"""

import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any


def main() -> None:
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401

    for request in json.loads(Path(sys.argv[1]).read_text()):
        sys.stdout.flush()
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        log = os.open(Path(request["directory"], f"{request['name']}.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            answer = Path(request["directory"], f"{request['name']}.json")
            answer.write_text(json.dumps(run(request)))
        except BaseException:  # noqa: BLE001 - the test reads it
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def run(request: dict[str, Any]) -> dict[str, Any]:
    from PIL import Image
    from transformers import AutoConfig
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    if path := request["config_class"]:
        module, _, name = path.rpartition(".")
        config_class = getattr(import_module(module), name)
        AutoConfig.register(config_class.model_type, config_class)
    options = {"skip_tokenizer_init": True, "max_model_len": 64, "disable_log_stats": True} | request["options"]
    engine = LLM(request["directory"], **options)
    sampling = SamplingParams(
        max_tokens=request["tokens"], temperature=0.0, ignore_eos=True, logprobs=1, detokenize=False
    )
    adapter = LoRARequest("adapter", 1, request["adapter"]) if request["adapter"] else None
    prompts: list[dict[str, Any]] = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    for prompt, image in zip(prompts, request["images"], strict=False):
        prompt["multi_modal_data"] = {"image": Image.open(image)}
    outputs = [each.outputs[0] for each in engine.generate(prompts, sampling, use_tqdm=False, lora_request=adapter)]
    tokens = [list(output.token_ids) for output in outputs]
    logprobs = [
        [chosen[token].logprob for token, chosen in zip(output.token_ids, output.logprobs, strict=True)]
        for output in outputs
    ]
    caches = len(engine.collective_rpc("get_kv_cache_spec")[0])
    return {"tokens": tokens, "logprobs": logprobs, "caches": caches}


if __name__ == "__main__":
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    main()

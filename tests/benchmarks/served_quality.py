"""A model's tokens and perplexity in vLLM beside those of transformers, on the same prompts and windows.

    python tests/benchmarks/served_quality.py small --reference reference.json          # by transformers
    python tests/benchmarks/served_quality.py small --reference reference.json --vllm   # by vLLM, beside the reference

The reference holds the text's tokens, so that the second run needs no text.
"""

import argparse
import json
import os
from math import exp, inf
from pathlib import Path
from typing import Any

import torch

PROMPTS, PROMPT, ANSWER = 20, 32, 16


def by_transformers(folder: str, text: str, windows: int, length: int, dtype: str) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import gac
    from gac.evaluation.perplexity import perplexity_on, take_sample

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "gac" in json.loads(Path(folder, "config.json").read_text(encoding="utf-8")):
        model: Any = gac.load(folder, device, getattr(torch, dtype))
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device)
    sample = take_sample(AutoTokenizer.from_pretrained(folder), text, windows, length)
    rows = sample.cut.ids.tolist()
    tokens = []
    for row in rows[:PROMPTS]:
        prompt = torch.tensor([row[:PROMPT]], device=device)
        answer = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=ANSWER, do_sample=False, eos_token_id=None
        )
        tokens.append(answer[0, PROMPT:].tolist())
    result = perplexity_on(model, sample)
    return {"dtype": dtype, "perplexity": result.value, "windows": rows, "tokens": tokens}


def by_vllm(folder: str, reference: dict[str, Any]) -> dict[str, Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    length = len(reference["windows"][0])
    llm = LLM(folder, dtype=reference["dtype"], max_model_len=length + 1, max_num_seqs=PROMPTS, disable_log_stats=True)
    greedy = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True, logprobs=2)
    prompts: Any = [{"prompt_token_ids": row[:PROMPT]} for row in reference["windows"][:PROMPTS]]
    gaps = []  # in log probability, where a sequence first differs from the expected one
    for output, expected in zip(llm.generate(prompts, greedy, use_tqdm=False), reference["tokens"], strict=True):
        written = list(output.outputs[0].token_ids)
        if written == expected:
            continue
        first = next(index for index, pair in enumerate(zip(written, expected, strict=True)) if pair[0] != pair[1])
        likely = output.outputs[0].logprobs[first]
        other = likely.get(expected[first])
        gaps.append(inf if other is None else likely[written[first]].logprob - other.logprob)
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    losses = []
    windows: Any = [{"prompt_token_ids": row} for row in reference["windows"]]
    for output in llm.generate(windows, scored, use_tqdm=False):
        for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            losses.append(-entry[token].logprob)
    return {
        "prompts": len(prompts),
        "gaps": sorted(gaps),
        "perplexity": exp(sum(losses) / len(losses)),
        "bytes": llm.apply_model(weight_bytes)[0],
    }


def weight_bytes(model: torch.nn.Module) -> int:
    tensors = (*model.parameters(), *model.buffers())
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--text", default="wiki-sample", help="a named text, or a file")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--dtype", default="bfloat16")
    chosen = parser.parse_args()
    if not chosen.vllm:
        reference = by_transformers(chosen.folder, chosen.text, chosen.windows, chosen.length, chosen.dtype)
        chosen.reference.write_text(json.dumps(reference), encoding="utf-8")
        print(f"perplexity {reference['perplexity']:.4f} by transformers in {reference['dtype']}")
        return
    reference = json.loads(chosen.reference.read_text(encoding="utf-8"))
    served = by_vllm(chosen.folder, reference)
    share = served["perplexity"] / reference["perplexity"] - 1
    gaps = ", ".join(f"{gap:.3f}" for gap in served["gaps"]) or "none"
    same = served["prompts"] - len(served["gaps"])
    print(f"{same} of {served['prompts']} sequences the same; gaps of the others where they first differ: {gaps}")
    values = f"{served['perplexity']:.4f}, by transformers {reference['perplexity']:.4f}"
    print(f"perplexity {values} ({100 * share:+.3f} %)")
    stored = sum(file.stat().st_size for file in Path(chosen.folder).glob("*.safetensors"))
    print(f"weights {served['bytes']:,} bytes, on disk {stored:,} ({100 * (served['bytes'] / stored - 1):+.2f} %)")


if __name__ == "__main__":
    main()

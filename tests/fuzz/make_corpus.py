"""Write the first inputs of the fuzzer: ``python -m tests.fuzz.make_corpus``. A valid file of each kind, small."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

from transformers import LlamaConfig

from gac.allocation.frontier import frontier
from gac.checkpoint.header import header_of
from gac.core.io import to_json
from gac.plan.costs import KV_NUMBERS
from gac.plan.plan import Limit, Plan, WorkloadLatency
from gac.runtime.contract import COMPRESSED
from tests.allocation.small_problems import problem
from tests.changed import changed_recipe
from tests.cli.commands import ranks, write_profile
from tests.fixtures import _make_plan
from tests.fuzz.targets import SEPARATOR

MEASURED = {"log_ratio": 0.05, "predicted_perplexity": 12, "perplexity": {"text": "wiki", "value": 12}}
CORPUS = Path(__file__).parent / "corpus"
CHANGES = {
    "model.layers.0.self_attn.q_proj": ("low_rank", 24),
    "model.layers.0.mlp.gate_proj": ("narrow", 96),
    "model.layers.0.mlp.up_proj": ("narrow", 96),
    "model.layers.0.mlp.down_proj": ("narrow", 96),
}


def main() -> None:
    config = LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=176, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    plan = _make_plan(config, CHANGES)
    heads = _make_plan(config, {f"model.layers.0.self_attn.{name}": ("head_dim", 8) for name in ("v_proj", "o_proj")})
    for name, content in {
        "profile/small": _profile(),
        "plan/changed": to_json(plan),
        "plan/head_dim": to_json(_with_cache(heads)),
        "frontier/small": to_json(frontier(problem([[8, 4, 2, 1, 0.5]], [10, 20, 30, 40, 50, 60]), points=3)),
        "checkpoint/small": _checkpoint(config, plan),
        "config/small": json.dumps(config.to_dict()).encode(),
        "report/small": json.dumps({"models": [MEASURED]}).encode(),
        "name/prefill": b"prefill:1x1024",
        "name/decode": b"decode:1@1024",
        "name/latent": b"latent:2",
        "name/rule": b"fisher:nearest32",
    }.items():
        path = CORPUS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _profile() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        content = write_profile(Path(folder) / "p", ranks(range(1022, 1027)), lambda point: point.operation.axes["r"])
        later = [
            {"record": "again", "row": 0, "median_ns": 9.5},
            {"record": "sentinel", "row": 1, "median_ns": 9.5},
            {"record": "lost", "row": 2, "error": "no GPU"},
            {"record": "shared", "shared_with": "1 process"},
            {"record": "host", "link": "NVLink", "others": ["fedcba9876543210"]},
        ]
        return content.read_bytes() + b"".join(json.dumps(line).encode() + b"\n" for line in later)


def _with_cache(plan: Plan) -> Plan:
    kept, whole = plan.kv_numbers
    known = WorkloadLatency("decode:1@1024", 200, 150, 7, 0, 0)
    return replace(
        plan,
        recipe=changed_recipe(plan.recipe, kv_cache=0.75, workloads=["decode:1@1024"]),
        limits=(*plan.limits, Limit(KV_NUMBERS, 0.75, kept, kept, whole)),
        certificate=replace(plan.certificate, multipliers=(0.0, 0.0)),
        workloads=(known,),
    )


def _checkpoint(config: LlamaConfig, plan: Plan) -> bytes:
    plan_text, config_text = header_files(config, plan)
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    return SEPARATOR.join([config_text.encode(), plan_text.encode(), json.dumps(index).encode()])


def header_files(config: LlamaConfig, plan: Plan) -> tuple[str, str]:
    """``plan.json`` and ``config.json`` of a checkpoint."""
    text = to_json(plan).decode()
    header = header_of(plan, config, text)
    document = json.loads(config.to_json_string()) | {"model_type": f"{COMPRESSED}{config.model_type}", "gac": header}
    return text, json.dumps(document)


if __name__ == "__main__":
    main()

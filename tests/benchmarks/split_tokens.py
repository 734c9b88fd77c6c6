"""Greedy tokens in bfloat16 of models split over 2 and 4 GPUs, beside those of the whole model on one.

    python tests/benchmarks/split_tokens.py --ranks 2 4 --output split-tokens.json
    python tests/benchmarks/split_tokens.py --ranks 2 --hidden 128 --output split-tokens-cpu.json

Models of three families have random weights and every form in them, each family in three schemes. The whole model
continues 20 prompts of random tokens; then torchrun starts each number of processes once, with a GPU for each, or all
on the CPU where there is none.

Sums in another order round otherwise, and two words that are nearly as likely change places. So the file has, of each
prompt whose tokens part, the ``gap`` between the whole model's first two words there, in standard deviations of its
logits; ``error`` is the largest difference of the prompts' first logits in the same unit. ``exact`` counts prompts to
which the whole model gives the same tokens in float32: what bfloat16 alone changes. Random weights leave words much
nearer to one another than trained ones do. ``alike`` says whether all processes have the same tokens.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gac
from gac.forms import form_named
from gac.models.families import family_of
from gac.models.loading import default_device
from tests.benchmarks.harness import markdown, options, write
from tests.compression.stored import stored
from tests.fixtures import _make_plan
from tests.models.small import small_config, small_model, weights_of

FAMILIES = ("llama", "qwen3", "gemma3_text")
PROMPTS, LENGTH = 20, 64
COLUMNS = ("model", "processes", "equal", "largest gap", "error", "exact", "alike")


def main() -> None:
    parser = options(__doc__, "--output")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--hidden", type=int, default=1024, help="of the random models; dims follow it")
    parser.add_argument("--tokens", type=int, default=32, help="that each prompt is continued by")
    asked = parser.parse_args()
    with TemporaryDirectory(prefix="gac-split-") as name:
        folder = Path(name)
        checkpoints = [*made(folder, asked.hidden)]
        wholes = {path: whole(path, asked.tokens) for path in checkpoints}
        rows = []
        for count in asked.ranks:
            found = split(checkpoints, count, asked.tokens, folder / f"{count}.pt")
            rows += [row(path.name, count, wholes[path], found[str(path)]) for path in checkpoints]
            write(asked.output, prompts=PROMPTS, length=LENGTH, tokens=asked.tokens, hidden=asked.hidden, rows=rows)
    print(markdown(COLUMNS, [[shown(one[name]) for name in COLUMNS] for one in rows]))


def made(folder: Path, hidden: int) -> Iterator[Path]:
    """Random models in which every form is, each in a folder of its own name."""
    forms: dict[int, tuple[tuple[str, int], ...]] = {
        0: (("latent:1", hidden // 32), ("low_rank", hidden // 4)),
        1: (("latent:2", hidden // 16), ("narrow", 2 * hidden)),
        2: (("head_dim", hidden // 32), (f"narrow_pair:{2 * hidden}", hidden // 4)),
        3: (("heads", 4),),
        4: (("skip", 0),),
        5: (),
    }
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": hidden // 16}
    sizes = heads | {"hidden_size": hidden, "num_hidden_layers": len(forms), "vocab_size": 4096}
    for family in FAMILIES:
        for scheme in ("bf16", "w8a16", f"w4a16:{hidden // 8}"):
            config = small_config(family, **sizes)
            setattr(config, family_of(config).neurons, 3 * hidden)
            config.dtype = torch.bfloat16
            chosen = {}
            for weight in weights_of(config):
                full = ("dense", form_named("dense").full(weight))
                wanted = forms[int(weight.name.split(".layers.")[1].split(".")[0])]
                form, dim = next((one for one in wanted if form_named(one[0]).applies_to(weight)), full)
                chosen[weight.name] = form, dim, scheme
            path = folder / f"{family}-{scheme}"
            stored(small_model(config), _make_plan, chosen).save_pretrained(path)
            yield path


def whole(path: Path, tokens: int) -> dict[str, Any]:
    """What the whole model continues the prompts by, in 16 bits and in 32."""
    found = [continued(gac.load(path, default_device(), dtype=dtype), tokens) for dtype in (None, torch.float32)]
    return found[0] | {"exact": found[1]["tokens"]}


def continued(model: Any, tokens: int) -> dict[str, Tensor]:
    """Tokens and gaps ``(prompts, tokens)``, and the prompts' first logits in standard deviations of each row."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (PROMPTS, LENGTH), generator=draw).to(model.device)
    asked = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "output_logits": True}
    with torch.no_grad():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **asked)
    logits = torch.stack(found.logits, 1).float()
    unit = logits.std(-1, keepdim=True)
    first, second = (logits / unit).topk(2).values.unbind(-1)
    own = {"tokens": found.sequences[:, LENGTH:], "gaps": first - second, "logits": (logits / unit)[:, 0]}
    return {name: values.cpu() for name, values in own.items()}


def split(checkpoints: list[Path], count: int, tokens: int, output: Path) -> dict[str, Any]:
    """What so many processes continue the prompts by."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count))
    given = (__file__, "--worker", output, tokens, *checkpoints)
    subprocess.run([*torchrun, *map(str, given)], check=True)
    return dict(torch.load(output))


def work(output: str, tokens: str, *checkpoints: str) -> None:
    """What each process does."""
    found: dict[str, Any] = {}
    for path in checkpoints:
        found[path] = continued(gac.load(path, tp_plan="auto"), int(tokens))
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, found[path]["tokens"].tolist())
        found[path]["alike"] = all(one == everybody[0] for one in everybody)
    if dist.get_rank() == 0:
        torch.save(found, output)
    dist.destroy_process_group()


def row(model: str, count: int, one: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """How far the tokens of the split model are those of the whole one."""
    differs = one["tokens"] != parts["tokens"]
    gaps = [float(one["gaps"][at, differs[at].int().argmax()]) for at in differs.any(1).nonzero().flatten().tolist()]
    return {
        "model": model,
        "processes": count,
        "equal": PROMPTS - len(gaps),
        "gaps": sorted(gaps),
        "largest gap": max(gaps, default=0.0),
        "median gap of all": float(one["gaps"].median()),
        "error": float((one["logits"] - parts["logits"]).abs().max()),
        "exact": int((one["tokens"] == one["exact"]).all(1).sum()),
        "alike": parts["alike"],
    }


def shown(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    work(*sys.argv[2:]) if sys.argv[1:2] == ["--worker"] else main()

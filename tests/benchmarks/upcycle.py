"""SmolLM2 as a mixture of experts (Mixtral's architecture), written as an ordinary directory: a model to test with.

    python tests/benchmarks/upcycle.py upcycled-smollm2 --output upcycle.json

No mixture with trained weights comes as a package, so this makes one. **It is no published model**: figures measured on
it say so. Each layer's MLP becomes 8 experts of 1344 of its 1536 neurons, two of which run for each token. The inputs
of an MLP are clustered (k-means by cosine), an expert takes the neurons that write most for the tokens of its cluster,
and the centroids begin as the router (neurons copied and split, as in arXiv 2212.05055 and 2110.01786). Then all of it
is trained towards the logits of the dense model, on its own text and the calibration part of ``wiki-sample``, with
Mixtral's loss for a balanced load. The same seed, GPU and versions give the same model.

``--output`` has its perplexity over SmolLM2's on three texts; for each layer the tokens of each expert, and the mean
cosine between the outputs of two experts for the same inputs, which is 1 where experts are alike.
"""

import argparse
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig

import gac
from gac.core.distributed.ranks import ALONE
from gac.measurement.own_text import sampled_windows
from gac.measurement.samples import SAMPLE_TEXTS
from gac.measurement.session import targeted_digest
from gac.measurement.text import every_window
from gac.models.families import family_of
from gac.models.loading import Loaded, load_model
from tests.benchmarks.harness import write

EXPERTS, TOP_K, WIDTH = 8, 2, 1344
LENGTH = 1024
CLUSTERING, ITERATIONS = 16, 20
"""Windows whose tokens are clustered, and the rounds of k-means."""
TEMPERATURE = 8.0
"""Router logits are cosines to the centroids times this, at first."""
BALANCE = 0.01
BATCH = 32
"""Windows of a training step."""
RATE, WARM_UP = 2e-4, 20
KEPT = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
"""Of SmolLM2's config."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--steps", type=int, default=600, help="of training, each on 32 windows of 1024 tokens")
    parser.add_argument("--own-windows", type=int, default=2048, help="of text that SmolLM2 writes")
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--windows", type=int, help="of evaluation; all where not given")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.manual_seed(asked.seed)
    loaded = load_model("smollm2")
    ids = training_windows(loaded, asked.own_windows, asked.length, asked.seed)
    dense = loaded.model.to(torch.bfloat16) if torch.cuda.is_available() else loaded.model
    model = upcycled(dense, ids[:: max(1, len(ids) // CLUSTERING)][:CLUSTERING])
    begun = time.monotonic()
    losses = train(model, dense, ids, asked.steps, asked.seed)
    figures = {"steps": asked.steps, "training_seconds": time.monotonic() - begun, "losses": losses}
    model.save_pretrained(asked.directory)
    loaded.tokenizer.save_pretrained(asked.directory)
    ratios = {
        text: evaluated(model, loaded, text, asked.windows) / evaluated(dense, loaded, text, asked.windows)
        for text in SAMPLE_TEXTS
    }
    figures |= {"ratios": ratios, "mean_ratio": math.exp(fmean(map(math.log, ratios.values())))}
    layers = [layer_figures(layer, inputs) for layer, inputs in mlp_inputs(model, ids[:4])]
    print(figures["mean_ratio"], ratios, *layers, sep="\n")
    write(asked.output, **figures, layers=layers)


def training_windows(loaded: Loaded, sampled: int, length: int, seed: int) -> Tensor:
    """Windows of both texts, shape ``(windows, length)``, in an order of their own."""
    model, tokenizer = loaded.model, loaded.tokenizer
    digest = targeted_digest(loaded, family_of(model.config).sites(model.config))
    wiki = every_window(SAMPLE_TEXTS[0], tokenizer, length).ids
    written = sampled_windows(model, tokenizer, digest, seed, ALONE, True, sampled, length).ids
    ids = torch.cat([wiki, written])
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]


def upcycled(dense: Any, ids: Tensor) -> Any:
    """The mixture, before it is trained."""
    source = dense.config
    config = MixtralConfig(
        **{name: getattr(source, name) for name in KEPT},
        intermediate_size=WIDTH,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        router_aux_loss_coef=BALANCE,
        sliding_window=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dense.dtype).to(dense.device).eval()
    state = {name: value for name, value in dense.state_dict().items() if ".mlp." not in name}
    left = model.load_state_dict(state, strict=False)
    if left.unexpected_keys or not all(".mlp." in name for name in left.missing_keys):
        raise SystemExit(f"the mixture's names are not SmolLM2's: {left}")
    with torch.no_grad():
        for (source_layer, inputs), layer in zip(mlp_inputs(dense, ids), model.model.layers, strict=True):
            fill(layer.mlp, source_layer.mlp, inputs)
    return model


def mlp_inputs(model: Any, ids: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """Each layer and the inputs of its MLP, but for each window's first token, which is like no other."""
    heard: dict[int, list[Tensor]] = {number: [] for number in range(len(model.model.layers))}
    hooks = [
        layer.mlp.register_forward_pre_hook(
            lambda _, args, number=number: heard[number].append(args[0][:, 1:].flatten(0, 1))
        )
        for number, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        for window in ids.to(model.device):
            model(window[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    for number, layer in enumerate(model.model.layers):
        yield layer, torch.cat(heard.pop(number)).float()


def fill(mixture: Any, mlp: Any, inputs: Tensor) -> None:
    """The router and the experts of a layer, from its dense MLP."""
    centroids, clusters = k_means(inputs, EXPERTS)
    mixture.gate.weight.copy_(TEMPERATURE * centroids / inputs.norm(dim=1).mean())
    gate, up, down = (getattr(mlp, f"{name}_proj").weight for name in ("gate", "up", "down"))
    activations = F.silu(inputs @ gate.float().T) * (inputs @ up.float().T)
    lengths = down.float().norm(dim=0)
    for expert in range(EXPERTS):
        written = activations[clusters == expert].square().mean(dim=0).sqrt() * lengths
        neurons = written.topk(WIDTH).indices.sort().values
        mixture.experts.gate_up_proj[expert].copy_(torch.cat([gate[neurons], up[neurons]]))
        mixture.experts.down_proj[expert].copy_(down[:, neurons])


def k_means(inputs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Centroids of unit length, and the cluster of each input, by cosine."""
    points = F.normalize(inputs)
    centroids = points[torch.linspace(0, len(points) - 1, count).long()]
    for _ in range(ITERATIONS):
        clusters = (points @ centroids.T).argmax(dim=1)
        sums = torch.zeros_like(centroids).index_add_(0, clusters, points)
        centroids = torch.where(sums.norm(dim=1, keepdim=True) > 0, F.normalize(sums), centroids)
    return centroids, (points @ centroids.T).argmax(dim=1)


def train(model: Any, dense: Any, ids: Tensor, steps: int, seed: int) -> list[float]:
    """Train all parameters towards the dense model's logits, with weights in float32; the loss of every tenth step."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = [parameter.detach().float().clone() for parameter in parameters]
    optimizer = torch.optim.AdamW(weights, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / max(1, steps)))
    )
    model.train()
    kept, order = [], batches(len(ids), seed)
    for step in range(steps):
        batch = ids[next(order)].to(model.device)
        with torch.no_grad():
            expected = dense(batch, use_cache=False).logits.float().log_softmax(dim=-1)
        output = model(batch, use_cache=False, output_router_logits=True)
        divergence = F.kl_div(
            output.logits.float().log_softmax(dim=-1).flatten(0, 1),
            expected.flatten(0, 1),
            log_target=True,
            reduction="batchmean",
        )
        loss = divergence + BALANCE * load_loss(output.router_logits)
        if not torch.isfinite(loss):
            raise SystemExit(f"step {step}: the loss is {float(loss)}")
        loss.backward()
        for weight, parameter in zip(weights, parameters, strict=True):
            weight.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for weight, parameter in zip(weights, parameters, strict=True):
                parameter.copy_(weight)
        if step % 10 == 0 or step == steps - 1:
            kept.append(float(divergence.detach()))
            print(f"step {step}: {kept[-1]:.4f}", flush=True)
    model.eval()
    return kept


def batches(count: int, seed: int) -> Iterator[Tensor]:
    """Positions of the windows of each step, every window once an epoch."""
    for epoch in itertools.count():
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + 1 + epoch))
        yield from (order[first : first + BATCH] for first in range(0, count, BATCH))


def load_loss(router_logits: tuple[Tensor, ...]) -> Tensor:
    """The mean over layers of Switch Transformers' loss (arXiv 2101.03961, equation 4), for the experts that run."""
    losses = []
    for logits in router_logits:
        shares = logits.float().softmax(dim=-1)
        taken = F.one_hot(shares.topk(TOP_K, dim=-1).indices, EXPERTS).sum(dim=1).float().mean(dim=0)
        losses.append(EXPERTS * (taken / TOP_K * shares.mean(dim=0)).sum())
    return torch.stack(losses).mean()


def evaluated(model: Any, loaded: Loaded, text: str, windows: int | None) -> float:
    return gac.perplexity(model, loaded.tokenizer, text, windows=windows).value


@torch.no_grad()
def layer_figures(layer: Any, inputs: Tensor) -> dict[str, Any]:
    """Shares of the tokens that each expert takes, and the mean cosine of two experts' outputs."""
    mixture = layer.mlp
    inputs = inputs.to(mixture.gate.weight.dtype)
    chosen = (inputs @ mixture.gate.weight.T).topk(TOP_K, dim=1).indices
    shares = torch.bincount(chosen.flatten(), minlength=EXPERTS) / len(inputs)
    outputs = []
    for gate_up, down in zip(mixture.experts.gate_up_proj, mixture.experts.down_proj, strict=True):
        gate, up = F.linear(inputs[:256], gate_up).chunk(2, dim=-1)
        outputs.append(F.normalize(F.linear(F.silu(gate) * up, down).float(), dim=-1))
    pairs = [float((a * b).sum(dim=-1).mean()) for a, b in itertools.combinations(outputs, 2)]
    return {"shares": [round(share, 4) for share in shares.tolist()], "cosine": fmean(pairs)}


if __name__ == "__main__":
    main()

"""A compressed model as DeciLM: a Llama whose layers have MLPs and key-value heads of their own, or skip a block.

The number of query heads is the same in all its layers. So where groups of heads were removed, query heads of zeros
take their places. A skipped block writes nothing: its constant goes into the bias of the last block before it in the
residual stream. Outputs stay the same up to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from gac.compression.apply import runs, skipped_blocks
from gac.core.errors import CheckpointError
from gac.models.attentions import Heads, heads_of, sliding_layers
from gac.models.families import family_of
from gac.plan.plan import Plan, WeightChoice
from gac.runtime.contract import COMPRESSED
from gac.runtime.storage.modules import plain_state
from gac.schemes import DEFAULT_SCHEME

_ARCHITECTURES = ("llama", "mistral", "qwen2")
_ROTATIONS = ("default", "llama3")
_KINDS = ("Linear", "Absent", "Constant")
_COPIED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings", "rope_parameters"),
)
_EXPECTED = "MLPs of any width, fewer key-value heads and skipped blocks, in 16 or 32 bits, as in DeciLM"
_REMEDY = "Plan with gac allocate MODEL --form narrow --form skip, without a scheme."
_STEP = 256  # readers of ``ffn_mult`` round widths up to its multiples


class DeciLMConfig(LlamaConfig):  # type: ignore[no-untyped-call]
    """Llama's config with the sizes of every layer in ``block_configs``; transformers itself has no such class."""

    model_type = "nemotron-nas"


@dataclass(frozen=True)
class LayerSizes:
    """The sizes in which layers differ."""

    groups: int  # key-value heads; 0: the attention is skipped
    neurons: int  # width of the MLP; 0: it is skipped


@dataclass(frozen=True, eq=False)
class DeciModel:
    """A model as DeciLM; ``state`` has its tensors by the names of Llama's."""

    config: DeciLMConfig
    layers: tuple[LayerSizes, ...]
    state: dict[str, Tensor]

    def empty(self) -> Any:
        """A model of its class on ``meta``, to save config and tensors with."""
        kind = type("DeciLMForCausalLM", (LlamaForCausalLM,), {"config_class": DeciLMConfig})
        with torch.device("meta"):
            return kind(self.config)


def deci_model(model: Any, plan: Plan) -> DeciModel:
    """A compressed model as DeciLM, in the model's dtype.

    A CheckpointError names the first value of the config, or the first weight, that DeciLM cannot express.
    """
    config, heads = model.config, heads_of(model.config)
    _check_config(config)
    _check_weights(plan)
    state = plain_state(model, model.dtype)
    _fold_constants(state, plan.weights)
    skipped = [(block["block"], *block["norms"]) for block in skipped_blocks(config, plan.weights)]
    left_out = tuple(f"{name}." for names in skipped for name in names)
    state = {name: value for name, value in state.items() if not name.startswith(left_out)}
    choices, family = {choice.name: choice for choice in plan.weights}, family_of(config)
    layers = []
    for layer in range(config.num_hidden_layers):
        prefix = f"{family.layers}.{layer}."
        attention = [choices[prefix + name] for name in (*family.qkv, family.output)]
        down = choices[prefix + family.down]
        groups = _fill_heads(state, attention, heads) if runs(attention[-1]) else 0
        layers.append(LayerSizes(groups, down.module.sizes["in_features"] if runs(down) else 0))
    attention_bias = _fill_biases(state, [choice for choice in plan.weights if not choice.weight.neurons])
    mlp_bias = _fill_biases(state, [choice for choice in plan.weights if choice.weight.neurons])
    return DeciModel(_config(model, layers, attention_bias, mlp_bias), tuple(layers), state)


def _check_config(config: Any) -> None:
    kind, rope = config.model_type.removeprefix(COMPRESSED), config.rope_parameters or {}
    remedy = "Open the checkpoint as it is."
    if kind not in _ARCHITECTURES:
        raise CheckpointError(f"a model of the architecture {kind}", " or ".join(_ARCHITECTURES), remedy)
    for name, value, expected in (
        ("hidden_act", config.hidden_act, ("silu",)),
        ("sliding_window", config.sliding_window if sliding_layers(config) else None, (None,)),
        ("rope_type", rope.get("rope_type", "default"), _ROTATIONS),
        ("partial_rotary_factor", rope.get("partial_rotary_factor", 1), (1,)),
    ):
        if value not in expected:
            due = f"{' or '.join(map(repr, expected))}, as in DeciLM"
            raise CheckpointError(f"a {kind} config with {name} {value!r}", due, remedy)


def _check_weights(plan: Plan) -> None:
    for choice in plan.weights:
        if choice.scheme != DEFAULT_SCHEME or choice.module.module not in _KINDS:
            raise _refused(choice)
    if plan.measured.head is not None:
        raise CheckpointError(f"embedding and head in {plan.measured.head.scheme}", _EXPECTED, _REMEDY)


def _refused(choice: WeightChoice) -> CheckpointError:
    return CheckpointError(f"{choice.description} in {choice.scheme}", _EXPECTED, _REMEDY)


def _fold_constants(state: dict[str, Tensor], weights: Sequence[WeightChoice]) -> None:
    """Add the constants of skipped blocks to the bias of the last block before them that runs."""
    target = ""  # the first attention always runs
    for choice in weights:
        if not choice.weight.to_residual:
            continue
        bias = f"{choice.name}.bias"
        if runs(choice):
            target = bias
        elif bias in state:
            constant = state.pop(bias)
            state[target] = state[target] + constant if target in state else constant


def _fill_heads(state: dict[str, Tensor], attention: Sequence[WeightChoice], heads: Heads) -> int:
    """Fill an attention with zeros up to the dense number of query heads; returns its number of key-value heads."""
    queries = heads.queries // heads.cached * heads.length  # numbers of a group of heads
    kept = attention[1].module.sizes["out_features"] // heads.length
    filled = next(groups for groups in range(kept, heads.queries + 1) if heads.queries % groups == 0)
    of_queries = (kept, queries), (filled, heads.queries // filled * heads.length)
    of_keys = (kept, heads.length), (filled, heads.length)
    for choice, (before, after) in zip(attention, (of_queries, of_keys, of_keys, of_queries), strict=True):
        columns = choice is attention[-1]
        if choice.module.sizes["in_features" if columns else "out_features"] != before[0] * before[1]:
            raise _refused(choice)
        weight, bias = state[f"{choice.name}.weight"], state.get(f"{choice.name}.bias")
        if columns:
            state[f"{choice.name}.weight"] = _with_zeros(weight.T, before, after).T.contiguous()
            continue
        state[f"{choice.name}.weight"] = _with_zeros(weight, before, after)
        if bias is not None:
            state[f"{choice.name}.bias"] = _with_zeros(bias, before, after)
    return filled


def _with_zeros(rows: Tensor, before: tuple[int, int], after: tuple[int, int]) -> Tensor:
    """Rows of ``before`` = (groups, rows of each) with zeros behind each group and behind all, up to ``after``."""
    if before == after:
        return rows
    filled = rows.new_zeros(*after, *rows.shape[1:])
    filled[: before[0], : before[1]] = rows.reshape(*before, *rows.shape[1:])
    return filled.flatten(0, 1)


def _fill_biases(state: dict[str, Tensor], weights: Sequence[WeightChoice]) -> bool:
    """Give biases of zeros to all weights that run, if one has a bias; returns if so."""
    biased = any(f"{choice.name}.bias" in state for choice in weights)
    for choice in filter(runs, weights if biased else ()):
        weight = state[f"{choice.name}.weight"]
        state.setdefault(f"{choice.name}.bias", weight.new_zeros(len(weight)))
    return biased


def _config(model: Any, layers: Sequence[LayerSizes], attention_bias: bool, mlp_bias: bool) -> DeciLMConfig:
    config = model.config
    blocks = [block_config(layer, config.num_attention_heads, config.hidden_size) for layer in layers]
    copied: dict[str, Any] = {name: getattr(config, name) for name in _COPIED}
    return DeciLMConfig(
        **copied | {"block_configs": blocks},
        head_dim=heads_of(config).length,
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
        dtype=model.dtype,
    )


def block_config(layer: LayerSizes, queries: int, hidden: int) -> dict[str, dict[str, Any]]:
    """A layer's entry in ``block_configs``, in a model with so many query heads and of this hidden size."""
    attention: dict[str, Any] = {"no_op": not layer.groups, "replace_with_linear": False, "n_heads_in_group": None}
    ffn: dict[str, Any] = {"no_op": not layer.neurons, "replace_with_linear": False}
    ffn["intermediate_size"] = layer.neurons or None
    if layer.groups:
        attention["n_heads_in_group"] = queries // layer.groups
    if layer.neurons % _STEP == 0:  # read as int(2 / 3 * ffn_mult * hidden), rounded up
        ffn["ffn_mult"] = 1.5 * layer.neurons / hidden if layer.neurons else None
    return {"attention": attention, "ffn": ffn}

"""Families: the linear weights of each architecture, read from its config alone."""

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from gac.core.errors import ModelError, PlanError
from gac.models.attentions import heads_of
from gac.models.mixers import GATED_DELTA_NET, Mixer
from gac.models.sites import LARGEST_SIZE, Side, Site, Weight, check_weight
from gac.runtime.contract import COMPRESSED

MOST_LAYERS = 4096
_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_CACHED = ("multi_query", "new_decoder_architecture", "num_kv_heads")  # which tell the key-value heads of some


@dataclass(frozen=True)
class ResidualPath:
    """The norm (its dotted name) and the factor between the output of a weight and the residual stream, if any."""

    norm: str | None = None
    factor: float = 1.0


@dataclass(frozen=True)
class Family:
    """One layout of decoder layers: the names of their linear weights, and which of these are stacked in one.

    All else may differ: norms, biases, rotary embeddings, the activation. Names are those in a layer, unless said.
    """

    model_types: tuple[str, ...]  # of the transformers configs of causal language models
    layers: str = "model.layers"  # the list of layers in the model
    # The norm in the model that the last layer's output passes before the head; see ``modules.last_norm_of``.
    last_norm: str = "model.norm"
    # The projections of queries, keys and values, in this order; or the one of all three.
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # to the MLP's neurons: gate and up, or the only one
    down: str = "mlp.down_proj"
    blocks: int = 1  # consecutive vectors of neurons in the output of each of ``up``: 2 where it is gate above up
    neurons: str = "intermediate_size"  # the config's key; without one, or a number there, 4 times the hidden size
    norms: tuple[str, str] | None = None  # between the outputs of ``output`` and ``down`` and the residual stream
    normed: str | None = None  # the config's flag without which there are no ``norms``
    # The input norms of the attention and the MLP alone; no name where there is no such norm.
    before: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    factor: str | None = None  # the config's key for the factor of those outputs before the stream
    pre_norm: str | None = None  # the config's flag without which the residual stream itself passes norms
    skips: bool = True  # attentions and MLPs only return what is added to the residual stream, and do not add it
    gated: bool = False  # a gate comes with the queries, and multiplies what the output weight of attention reads
    mixer: Mixer | None = None  # in the place of attention in layers of another kind
    towers: tuple[str, ...] = ()  # model types of configs that only multimodal models have, in ``text_config``
    inside: str = ""  # the name of the decoder within a multimodal model; empty where the model is the decoder alone

    def sites(self, config: Any) -> tuple[Site, ...]:
        """Every site in model order, from a transformers config; a ModelError if no model can have these sizes."""
        config = text_config(config)
        self._check(config)
        sites: list[Site] = []
        # transformers asks the first attention of each kind how many tokens are cached, so these are never skipped.
        kinds = getattr(config, "layer_types", None) or ["attention"]
        counting = {kinds.index(kind) for kind in kinds}
        for layer in range(config.num_hidden_layers):
            prefix, mixer = f"{self.layers}.{layer}.", self._mixer(config, layer)
            from_norms = {name for names in self._readers_of_norms(config, layer).values() for name in names}
            mixing = self._attention(config) if mixer is None else mixer.weights(config)
            for weight in self._blocked(mixing, layer not in counting):
                named = _with_prefix(prefix, weight, from_norms)
                sites.append(Site(named.name, layer, named.name.rpartition(".")[2], (named,)))
            mlp = self._blocked(self._mlp(config), layer > 0 and "." in self.down)
            weights = tuple(_with_prefix(prefix, weight, from_norms) for weight in mlp)
            sites.append(Site(_owner(weights[-1].name), layer, "mlp", weights))
        return tuple(sites)

    def sizes(self, config: Any) -> tuple[Any, ...]:
        """The values of the config that determine the sizes in ``sites``; errors as there."""
        config = text_config(config)
        self._check(config)
        model_type = _model_type(config)
        names = ["num_hidden_layers", *_SIZES, *_CACHED, *filter(None, [self.neurons, self.pre_norm, self.normed])]
        names += ["layer_types", *self.mixer.keys] if self.mixer else []
        return (model_type, *(getattr(config, name, None) for name in names))

    def within(self, decoder: str) -> "Family":
        """The family of a multimodal model whose decoder has this name in it."""
        layers, last_norm = (f"{decoder}.{name.partition('.')[2]}" for name in (self.layers, self.last_norm))
        return replace(self, layers=layers, last_norm=last_norm, inside=decoder)

    def residual_path(self, config: Any, weight: str) -> ResidualPath:
        config = text_config(config)
        prefix, layer, name = re.split(r"\.(\d+)\.", weight, maxsplit=1)
        norm = f"{prefix}.{layer}.{self.norms[name == self.down]}" if self.norms and self._has_norms(config) else None
        return ResidualPath(norm, getattr(config, self.factor) if self.factor else 1.0)

    def norms_of(self, block: str) -> tuple[str, ...]:
        """The input and output norms of this attention or MLP alone, given by its name."""
        layer, _, name = block.rpartition(".")
        index = int(name == _owner(self.down))
        norms = (self.before[index], (self.norms or ("", ""))[index])
        return tuple(f"{layer}.{norm}" for norm in norms if norm)

    def norm_outputs(self, config: Any) -> Iterator[tuple[str, list[str]]]:
        """Norms that can quantise their output, with the weights whose input it is, and nothing else's."""
        config = text_config(config)
        for layer in range(config.num_hidden_layers):
            prefix = f"{self.layers}.{layer}."
            for norm, consumers in self._readers_of_norms(config, layer).items():
                yield prefix + norm, [prefix + name for name in consumers]

    def _readers_of_norms(self, config: Any, layer: int) -> dict[str, tuple[str, ...]]:
        if _model_type(config) in LAYER_NORMS:
            return {}
        mixer = self._mixer(config, layer)
        readers = (self.qkv if mixer is None else mixer.readers, self.up)
        return {norm: names for norm, names in zip(self.before, readers, strict=True) if norm}

    def _mixer(self, config: Any, layer: int) -> Mixer | None:
        return self.mixer if self.mixer and config.layer_types[layer] == self.mixer.kind else None

    def _blocked(self, weights: Iterable[Weight], skippable: bool) -> Iterator[Weight]:
        # The last weight writes to the residual stream.
        *first, last = weights
        for weight in (*first, last):
            side: Side = "in" if weight is last else "out"
            yield replace(weight, block=side) if skippable and self.skips and last.to_residual else weight

    def _check(self, config: Any) -> None:
        sizes = [(name, LARGEST_SIZE) for name in (*_SIZES, self.neurons) if name]
        for name, most in (("num_hidden_layers", MOST_LAYERS), *sizes):
            size = getattr(config, name, None)
            if size is not None and not 1 <= size <= most:
                raise ModelError(f"a config with {name} {size}", f"1 to {most:,}", "Check config.json.")
        try:
            others = self.mixer.weights(config) if self.mixer else ()
            for weight in (*self._attention(config), *others, *self._mlp(config)):
                check_weight(weight)
        except PlanError as failure:
            raise ModelError(f"a config whose {failure.given}", failure.expected, "Check config.json.") from failure

    def _attention(self, config: Any) -> Iterator[Weight]:
        hidden, sizes, output = config.hidden_size, heads_of(config), self._writing(config)
        heads, groups = sizes.queries, sizes.cached
        query, key = sizes.length * heads, sizes.length * groups
        if len(self.qkv) == 1:
            yield Weight(self.qkv[0], query + 2 * key, hidden, cached=True, queries=query)
            yield output(self.output, hidden, query)
            return
        q_proj, k_proj, v_proj = self.qkv
        shared = partial(Weight, in_features=hidden, input_group=_owner(q_proj))
        if self.gated:  # values, heads and queries do not change alone then
            yield shared(q_proj, 2 * query)
            yield from (shared(name, key, cached=True) for name in (k_proj, v_proj))
            yield output(self.output, hidden, query)
            return
        drops_heads = _model_type(config) not in FIXED_HEADS and not getattr(config, "use_qk_norm", False)
        dropped = groups if drops_heads and heads % groups == 0 else 0
        shared = partial(shared, groups=dropped)
        yield shared(q_proj, query)
        yield shared(k_proj, key, heads=groups, cached=True, query_heads=heads)
        yield shared(v_proj, key, heads=groups, cached=True, query_heads=heads, values="out")
        yield output(self.output, hidden, query, values="in", heads=heads, groups=dropped)

    def _writing(self, config: Any) -> partial[Weight]:
        to_residual = self.pre_norm is None or bool(getattr(config, self.pre_norm))
        return partial(Weight, to_residual=to_residual, normed=self.norms is not None and self._has_norms(config))

    def _has_norms(self, config: Any) -> bool:
        return self.normed is None or bool(getattr(config, self.normed))

    def _mlp(self, config: Any) -> Iterator[Weight]:
        hidden = config.hidden_size
        neurons = (getattr(config, self.neurons) if self.neurons else None) or 4 * hidden
        group = _owner(self.up[0]) if len(self.up) > 1 else None
        for name in self.up:
            yield Weight(name, self.blocks * neurons, hidden, neurons="out", input_group=group, blocks=self.blocks)
        yield self._writing(config)(self.down, hidden, neurons, neurons="in")


def _with_prefix(prefix: str, weight: Weight, from_norms: Container[str]) -> Weight:
    group = None if weight.input_group is None else prefix + weight.input_group
    return replace(weight, name=prefix + weight.name, input_group=group, input_from_norm=weight.name in from_norms)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


LLAMA = (  # architectures whose layers are named and shaped as Llama's: q/k/v/o and a gated MLP, GQA, any head_dim
    *("cwm", "ernie4_5", "exaone", "gemma", "helium", "hunyuan_v1_dense", "internlm3", "iquestcoder", "llama"),
    *("ministral", "ministral3", "mistral", "olmo", "qwen2", "qwen3", "seed_oss", "smollm3"),
)

LLAMA_TOWERS = (
    *("emu3_text_model", "hunyuan_vl_text", "paddleocr_vl_text", "qwen2_5_omni_text", "qwen2_5_vl_text"),
    *("qwen2_vl_text", "qwen3_vl_text"),
)
"""The same within multimodal models, and nowhere else."""

LLAMA_PARALLEL = ("cohere", "cohere2", "stablelm")
"""The same, but attention and MLP share one norm, in StableLM where the config says so."""

LLAMA_NORMED = ("exaone4", "olmo2", "olmo3")
"""The same, but norms stand behind o_proj and down_proj, and none before attention and MLP."""

LAYER_NORMS = (
    *("biogpt", "bloom", "codegen", "ctrl", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "jais2"),
    *("modernbert-decoder", "mpt", "nanochat", "nemotron", "olmo", "opt", "persimmon", "starcoder2", "xglm"),
)
"""Architectures with a LayerNorm, or a norm without gains, before attention and MLP; no kernel quantises its output."""

FIXED_HEADS = ("biogpt", "gptj", "nemotron", "olmo2", "olmo3", "opt", "stablelm", "xglm")
"""Architectures whose attention needs the number of heads of the config, or whose norms pass over all heads."""

_OPT = partial(Family, output="self_attn.out_proj", up=("fc1",), down="fc2", before=("self_attn_layer_norm", ""))
_GPT = partial(Family, layers="transformer.h", last_norm="transformer.ln_f")
_GPT_J = partial(_GPT, output="attn.out_proj", up=("mlp.fc_in",), down="mlp.fc_out", neurons="n_inner", before=("", ""))
_FOUR_TIMES: dict[str, Any] = {"up": ("mlp.dense_h_to_4h",), "down": "mlp.dense_4h_to_h"}
_BLOOM = partial(
    _GPT, qkv=("self_attention.query_key_value",), output="self_attention.dense", skips=False, **_FOUR_TIMES
)

_ALL = (
    Family(LLAMA, towers=LLAMA_TOWERS),
    Family(("qwen3_5_text",), gated=True, mixer=GATED_DELTA_NET),
    Family(LLAMA_PARALLEL, before=("", "")),
    Family(LLAMA_NORMED, norms=("post_attention_layernorm", "post_feedforward_layernorm"), before=("", "")),
    Family(
        ("gemma2", "gemma3_text"),
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        before=("input_layernorm", "pre_feedforward_layernorm"),
    ),
    Family(
        ("granite", "granite_swa"),
        factor="residual_multiplier",
        towers=("granite4_vision_text", "granite_docling_text"),
    ),
    Family(("hyperclovax",), norms=("post_norm1", "post_norm2"), normed="use_post_norm", factor="residual_multiplier"),
    Family(("vaultgemma",), before=("input_layernorm", "pre_feedforward_layernorm")),
    Family(
        ("apertus", "apertus1p5_text"), up=("mlp.up_proj",), before=("attention_layernorm", "feedforward_layernorm")
    ),
    Family(("arcee", "jais2", "nemotron"), up=("mlp.up_proj",)),
    Family(("nanochat",), up=("mlp.fc1",), down="mlp.fc2", towers=("cosmos3_edge_text",)),
    Family(("starcoder2",), up=("mlp.c_fc",), down="mlp.c_proj"),
    Family(
        ("phi",),
        last_norm="model.final_layernorm",
        output="self_attn.dense",
        up=("mlp.fc1",),
        down="mlp.fc2",
        before=("", ""),
    ),
    _OPT(
        ("opt",),
        "model.decoder.layers",
        "model.decoder.final_layer_norm",
        neurons="ffn_dim",
        pre_norm="do_layer_norm_before",
    ),
    _OPT(("xglm",), last_norm="model.layer_norm", neurons="ffn_dim"),
    _OPT(("biogpt",), "biogpt.layers", "biogpt.layer_norm"),
    Family(("glm",), up=("mlp.gate_up_proj",), blocks=2),
    Family(
        ("glm4",),
        up=("mlp.gate_up_proj",),
        blocks=2,
        norms=("post_self_attn_layernorm", "post_mlp_layernorm"),
        towers=("glm4v_text", "glm_ocr_text"),
    ),
    Family(
        ("phi3",),
        qkv=("self_attn.qkv_proj",),
        up=("mlp.gate_up_proj",),
        blocks=2,
        towers=("phi4_multimodal",),
    ),
    _GPT(
        ("gpt2", "gpt_bigcode"),
        qkv=("attn.c_attn",),
        output="attn.c_proj",
        up=("mlp.c_fc",),
        down="mlp.c_proj",
        neurons="n_inner",
        before=("ln_1", "ln_2"),
    ),
    _GPT_J(("gptj",), qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj")),
    _GPT_J(("codegen",), qkv=("attn.qkv_proj",)),
    _GPT(
        ("ctrl",),
        last_norm="transformer.layernorm",
        qkv=("multi_head_attention.Wq", "multi_head_attention.Wk", "multi_head_attention.Wv"),
        output="multi_head_attention.dense",
        up=("ffn.0",),
        down="ffn.2",
        neurons="dff",
        before=("layernorm1", "layernorm2"),
    ),
    Family(
        ("modernbert-decoder",),
        last_norm="model.final_norm",
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        output="attn.Wo",
        up=("mlp.Wi",),
        down="mlp.Wo",
        blocks=2,
        before=("attn_norm", "mlp_norm"),
    ),
    _BLOOM(("bloom",), neurons=""),
    _BLOOM(("falcon",), neurons="ffn_hidden_size", before=("", "")),
    Family(
        ("mpt",),
        layers="transformer.blocks",
        last_norm="transformer.norm_f",
        qkv=("attn.Wqkv",),
        output="attn.out_proj",
        up=("ffn.up_proj",),
        down="ffn.down_proj",
        neurons="",
        before=("norm_1", "norm_2"),
        skips=False,
    ),
    Family(
        ("persimmon",),
        last_norm="model.final_layernorm",
        qkv=("self_attn.query_key_value",),
        output="self_attn.dense",
        **_FOUR_TIMES,
    ),
    Family(
        ("gpt_neox",),
        layers="gpt_neox.layers",
        last_norm="gpt_neox.final_layer_norm",
        qkv=("attention.query_key_value",),
        output="attention.dense",
        **_FOUR_TIMES,
    ),
)
_FAMILIES: Mapping[str, Family] = MappingProxyType(
    {model_type: family for family in _ALL for model_type in (*family.model_types, *family.towers)}
)

_DECODERS = {
    "model.language_model": (
        *("apertus1p5", "aya_vision", "cohere2_vision", "cosmos3_edge", "cosmos3_omni", "deepseek_vl"),
        *("deepseek_vl_hybrid", "exaone4_5", "fuyu", "gemma3", "glm46v", "glm4v", "glm_ocr", "glmga", "got_ocr2"),
        *("granite4_vision", "hunyuan_vl", "hyperclovax_vision_v2", "internvl", "janus", "lighton_ocr", "llava"),
        *("llava_next", "llava_next_video", "llava_onevision", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7"),
        *("mistral3", "moss_transcribe_diarize", "ovis2", "paddleocr_vl", "paligemma", "pp_chart2table"),
        *("qianfan_ocr", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl", "video_llama_3"),
        *("video_llava", "vipllava"),
    ),
    "model": ("phi4_multimodal",),
    "model.text_model": ("emu3", "granite_docling", "idefics2", "idefics3", "smolvlm"),
}
_WRAPPERS: Mapping[str, str] = MappingProxyType(
    {model_type: decoder for decoder, model_types in _DECODERS.items() for model_type in model_types}
)
"""Multimodal models that run on text alone, by model type, and the name of the decoder in each."""


def supported() -> tuple[str, ...]:
    """Model types of the causal language models that GAC takes."""
    return tuple(sorted(model_type for family in _ALL for model_type in family.model_types))


def wrappers() -> tuple[str, ...]:
    """Model types of the multimodal models that GAC takes around a decoder of a supported layout."""
    return tuple(sorted(_WRAPPERS))


def is_supported(model_type: str) -> bool:
    """Return whether this is the type of a model that GAC takes, or of a decoder within one."""
    return model_type in _FAMILIES or model_type in _WRAPPERS


def text_config(config: Any) -> Any:
    """The language model's part of a config: a multimodal one (Gemma 3's, say) keeps it in ``text_config``."""
    return getattr(config, "text_config", None) or config


def _model_type(config: Any) -> str:
    return str(getattr(config, "model_type", None)).removeprefix(COMPRESSED)


def family_of(config: Any) -> Family:
    """The family of a transformers config, dense or compressed; of a multimodal one, that of its decoder within it.

    A ModelError names what makes it another kind of model.
    """
    model_type = _model_type(config)
    decoder, experts = _WRAPPERS.get(model_type), _experts(config)
    family = _FAMILIES.get(model_type if decoder is None else _model_type(text_config(config)))
    if family is not None and not experts:
        return family if decoder is None else family.within(decoder)
    kind, expected, remedy = "", f"a supported architecture ({', '.join(supported())})", _OTHER
    if experts:
        kind = f", a mixture of experts ({experts} experts a layer)"
        expected = "one MLP a layer, which every token passes"
        remedy = "Use a dense model: mixture-of-experts models are not supported."
    if family is None:
        kind, expected, remedy = _another_kind(config) or (kind, expected, remedy)
    raise ModelError(f"model type {model_type!r}{kind}", expected, remedy)


_OTHER = "Use a model of one of these architectures."
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_RECURRENT = re.compile(
    r"mamba_\w+|ssm_\w+|state_size|conv_kernel|conv_L_cache|linear_num_\w+|block_types|rescale_every|qk_dim_factor"
)
_RECURRENT_LAYERS = {"linear_attention", "recurrent", "mamba", "conv", "hybrid"}


def _another_kind(config: Any) -> tuple[str, str, str] | None:
    text = text_config(config)
    kinds = {str(kind) for kind in getattr(text, "layer_types", None) or ()}
    if getattr(config, "is_encoder_decoder", False):
        return ", an encoder-decoder", "a decoder alone", _DECODER
    if kinds & _RECURRENT_LAYERS or any(map(_RECURRENT.fullmatch, dir(text))):
        return ", with layers of state spaces, convolutions or linear attention", "attention in every layer", _DECODER
    if _experts(config):
        return None
    if text is not config or hasattr(config, "vision_config"):
        kind = f", a multimodal model {_NOT_TAKEN.get(_model_type(config), f'around a {_model_type(text)}')}"
        remedy = "Use its language model, saved as a model of its own, if its architecture is supported."
        return kind, f"a language model, or a multimodal one of {', '.join(wrappers())}, around one", remedy
    if getattr(config, "kv_lora_rank", None):
        expected = "keys and values that are projected from the hidden state"
        return ", with multi-head latent attention", expected, _DECODER
    if getattr(config, "is_decoder", None) is False:
        return ", an encoder", "a decoder", _DECODER
    return None


_IMAGES = "that runs on no text without an image"
_NOT_TAKEN = {
    **dict.fromkeys(("blip-2", "instructblip", "instructblipvideo"), _IMAGES),
    **dict.fromkeys(("fast_vlm", "perception_lm"), "whose images are read by a model of the package timm"),
    "shieldgemma2": "that classifies images and writes no text",
}
"""Multimodal models around a decoder of a supported layout, and what keeps them from being taken."""
_DECODER = "Use a decoder that transformers loads as a causal language model, such as Llama."


def _experts(config: Any) -> int:
    parts = (config, text_config(config), getattr(config, "ffn_config", None))
    counts = (getattr(part, name, None) for part in parts for name in _EXPERTS)
    most = max((max(count) if isinstance(count, (list, tuple)) else count for count in counts if count), default=0)
    return most if most > 1 else 0

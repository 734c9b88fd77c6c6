"""A family: the linear weights of decoder layers of one layout, read from a config alone."""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gac.core.errors import ModelError, PlanError
from gac.models.attentions import heads_of, of_layer
from gac.models.experts import ROUTED, Experts, RoutedParams
from gac.models.mixers import LatentAttention, Mixer, Width
from gac.models.sites import LARGEST_SIZE, Side, Site, Weight, check_weight
from gac.runtime.contract import COMPRESSED

MOST_LAYERS = 4096
_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_CACHED = ("multi_query", "new_decoder_architecture", "num_kv_heads")  # which tell the key-value heads of some
ALONE = "mlp"  # the kind of layers that are an MLP alone

LAYER_NORMS = (
    *("biogpt", "bloom", "codegen", "ctrl", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "jais2"),
    *("modernbert-decoder", "mpt", "nanochat", "nemotron", "olmo", "opt", "persimmon", "phimoe", "starcoder2", "xglm"),
)
"""Architectures with a LayerNorm, or a norm without gains, before attention and MLP; no kernel quantises its output."""

FIXED_HEADS = (
    *("biogpt", "flex_olmo", "flint", "gpt_oss", "gptj", "granite_swa", "granitemoe_swa", "minimax_m2", "nemotron"),
    *("olmo2", "olmo3", "olmo_hybrid", "olmoe", "opt", "stablelm", "xglm"),
)
"""Architectures whose attention needs the number of heads of the config, as those with sinks do, or whose norms pass
over all heads."""


def text_config(config: Any) -> Any:
    """The language model's part of a config: a multimodal one (Gemma 3's, say) keeps it in ``text_config``."""
    return getattr(config, "text_config", None) or config


def model_type_of(config: Any) -> str:
    return str(getattr(config, "model_type", None)).removeprefix(COMPRESSED)


@dataclass(frozen=True)
class ResidualPath:
    """The norm (its dotted name) and the factor between the output of a weight and the residual stream, if any.

    ``blended``: on the way it is gated, or passes a norm with what routed experts write.
    """

    norm: str | None = None
    factor: float = 1.0
    blended: bool = False


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
    width: Width | None = None  # the number of neurons, where it is not that number itself
    norms: tuple[str, str] | None = None  # between the outputs of ``output`` and ``down`` and the residual stream
    normed: str | None = None  # the config's flag without which there are no ``norms``
    # The input norms of the attention and the MLP alone; no name where there is no such norm.
    before: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    # The config's key for the factor of those outputs before the stream; or the factors of each of them, by its name.
    factor: str | Callable[[Any], Mapping[str, float]] | None = None
    pre_norm: str | None = None  # the config's flag without which the residual stream itself passes norms
    # Attentions (and mixers), and MLPs, return what the output weight wrote, and neither multiply nor add it.
    skips: tuple[bool, bool] = (True, True)
    gated: bool = False  # a gate comes with the queries, and multiplies what the output weight of attention reads
    gate: str | None = None  # the linear weight of that gate, where it is not in that of the queries
    window: str = "sliding_attention"  # the config's word for the attention of a window
    normed_values: bool = False  # values pass a norm, and are the keys before theirs if the config says so
    mixer: Mixer | LatentAttention | None = None  # in the place of attention, or beside it, in layers of another kind
    experts: Experts | None = None  # in the place of the MLP, in layers that route their tokens
    divided: bool = False  # a layer is an attention, a mixer or an MLP alone, as its kind says
    towers: tuple[str, ...] = ()  # model types of configs that only multimodal models have, in ``text_config``
    inside: str = ""  # the name of the decoder within a multimodal model; empty where the model is the decoder alone

    def sites(self, config: Any, routed: bool = False) -> tuple[Site, ...]:
        """Every site in model order, from a transformers config; a ModelError if no model can have these sizes.

        ``routed``: with those of routed experts and their routers, where experts can go.
        """
        config = text_config(config)
        self._check(config)
        sites: list[Site] = []
        # transformers asks the first attention of each kind how many tokens are cached, so these are never skipped.
        kinds = getattr(config, "layer_types", None) or ["attention"]
        counting = {kinds.index(kind) for kind in kinds}
        for layer in range(config.num_hidden_layers):
            prefix, family = f"{self.layers}.{layer}.", self._in_layer(config, layer)
            from_norms = {name for names in self._readers_of_norms(config, layer).values() for name in names}
            for mixing in self._mixing(config, layer):
                for weight in self._blocked(mixing, self.skips[0] and layer not in counting):
                    named = _with_prefix(prefix, weight, from_norms)
                    sites.append(Site(named.name, layer, named.name.rpartition(".")[2], (named,)))
            if self.divided and config.layer_types[layer] not in (ALONE, ROUTED):
                continue
            if mlp := tuple(family._feed_forward(config, layer)):
                routes = self._routes(config, layer)
                skippable = (
                    self.skips[1] and layer > 0 and "." in mlp[-1].name and not (routes and self._blends(routes))
                )
                weights = tuple(_with_prefix(prefix, each, from_norms) for each in self._blocked(mlp, skippable))
                sites.append(Site(_owner(weights[-1].name), layer, "mlp", weights))
            routes = self._routes(config, layer) if routed else None
            if routes is not None and routes.removable:
                weights = tuple(_with_prefix(prefix, each, ()) for each in routes.weights(config))
                sites.append(Site(weights[-1].name, layer, "experts", weights))
        return tuple(sites)

    def is_plain_mixture(self, config: Any) -> bool:
        """Return whether every layer is an attention and routed experts, which may become fewer."""
        plain = replace(self, experts=None).is_plain and self.experts is not None and not self.experts.shared
        return plain and all(self._routes(config, layer) for layer in range(config.num_hidden_layers))

    def routed_params(self, config: Any) -> RoutedParams | None:
        """Parameters of all routed experts, which no choice changes; None where there are none."""
        layers = len(self.routing_blocks(config))
        if self.experts is None or not layers:
            return None
        each = self.experts.params(text_config(config))
        return RoutedParams(layers * each.params, layers * each.active)

    def routing_blocks(self, config: Any) -> dict[int, str]:
        """The names of the modules that route tokens to experts, by layer."""
        config = text_config(config)
        routes = {layer: self._routes(config, layer) for layer in range(config.num_hidden_layers)}
        return {layer: f"{self.layers}.{layer}.{experts.block}" for layer, experts in routes.items() if experts}

    def sizes(self, config: Any) -> tuple[Any, ...]:
        """The values of the config that determine the sizes in ``sites``; errors as there."""
        config = text_config(config)
        self._check(config)
        names = ["num_hidden_layers", *_SIZES, *_CACHED, *filter(None, [self.neurons, self.pre_norm, self.normed])]
        names += ["layer_types", *self.mixer.keys] if self.mixer else []
        names += [*(self.width.keys if self.width else ()), *(self.experts.keys if self.experts else ())]
        names += ["layer_types", "attention_k_eq_v"] if self.normed_values else []
        layers = range(config.num_hidden_layers if getattr(config, "is_heterogeneous", False) else 1)
        first, *others = (tuple(getattr(of_layer(config, layer), name, None) for name in names) for layer in layers)
        return (model_type_of(config), *first, *others)

    def within(self, decoder: str) -> "Family":
        """The family of a multimodal model whose decoder has this name in it."""
        layers, last_norm = (f"{decoder}.{name.partition('.')[2]}" for name in (self.layers, self.last_norm))
        return replace(self, layers=layers, last_norm=last_norm, inside=decoder)

    def residual_path(self, config: Any, weight: str) -> ResidualPath:
        config = text_config(config)
        prefix, layer, name = re.split(r"\.(\d+)\.", weight, maxsplit=1)
        family, routes = self._in_layer(config, int(layer)), self._routes(config, int(layer))
        behind = name == self.down or (routes is not None and name.startswith(routes.block))
        if routes and routes.shared and name == f"{routes.shared.name}.{routes.shared.down}" and self._blends(routes):
            return ResidualPath(blended=True)
        norm = f"{prefix}.{layer}.{family.norms[behind]}" if family.norms and self._has_norms(config) else None
        if callable(self.factor):
            return ResidualPath(norm, self.factor(config)[name])
        return ResidualPath(norm, getattr(config, self.factor) if self.factor else 1.0)

    def norms_of(self, config: Any, block: str) -> tuple[str, ...]:
        """The input and output norms of this attention or MLP alone, given by its name."""
        layer, _, name = block.rpartition(".")
        if self.experts and self.experts.shared and block.endswith(f".{self.experts.shared.name}"):
            return ()  # the routed experts read what the norm puts out
        family = self._in_layer(text_config(config), int(layer.rpartition(".")[2]))
        index = int(name == _owner(self.down))
        norms = (family.before[index], (family.norms or ("", ""))[index])
        return tuple(f"{layer}.{norm}" for norm in norms if norm)

    def norm_outputs(self, config: Any) -> Iterator[tuple[str, list[str]]]:
        """Norms that can quantise their output, with the weights whose input it is, and nothing else's."""
        config = text_config(config)
        for layer in range(config.num_hidden_layers):
            prefix = f"{self.layers}.{layer}."
            for norm, consumers in self._readers_of_norms(config, layer).items():
                yield prefix + norm, [prefix + name for name in consumers]

    def _readers_of_norms(self, config: Any, layer: int) -> dict[str, tuple[str, ...]]:
        if model_type_of(config) in LAYER_NORMS or self.divided:
            return {}
        # Mixers mask the states of padding before they read them, so they read no output of a norm.
        readers = (
            () if self._mixer(config, layer) else self._attending(config, layer),
            () if self._routes(config, layer) else self.up,
        )
        before = self._in_layer(config, layer).before
        return {norm: names for norm, names in zip(before, readers, strict=True) if norm and names}

    def _in_layer(self, config: Any, layer: int) -> "Family":
        """Return the family as it is in a layer: of another kind its norms may be others."""
        mixer = self._mixer(config, layer)
        return replace(self, before=mixer.before, norms=None) if mixer and mixer.before else self

    def _mixer(self, config: Any, layer: int) -> Mixer | LatentAttention | None:
        everywhere = self.mixer is not None and not self.mixer.kind
        return self.mixer if everywhere or (self.mixer and config.layer_types[layer] == self.mixer.kind) else None

    def _routes(self, config: Any, layer: int) -> Experts | None:
        return self.experts if self.experts and self.experts.are_in(config, layer) else None

    def _mixing(self, config: Any, layer: int) -> Iterator[Iterator[Weight]]:
        """The weights of what stands before the MLP: the mixer's, then those of attention."""
        mixer = self._mixer(config, layer)
        if mixer is not None:
            yield mixer.weights(config)
        if (mixer is None or mixer.parallel) and not (self.divided and config.layer_types[layer] in (ALONE, ROUTED)):
            yield self._attention(config, layer)

    def _attending(self, config: Any, layer: int) -> tuple[str, ...]:
        """The weights that read the input of attention."""
        joint = self.normed_values and config.attention_k_eq_v and config.layer_types[layer] == "full_attention"
        return self.qkv[:2] if joint else self.qkv

    @property
    def is_plain(self) -> bool:
        """True if all layers have attention alike, whose values reach its output as they are, and an MLP."""
        return not (self.gated or self.mixer or self.normed_values or self.experts)

    def _blocked(self, weights: Iterable[Weight], skippable: bool) -> Iterator[Weight]:
        # The last weight writes to the residual stream.
        *first, last = weights
        for weight in (*first, last):
            side: Side = "in" if weight is last else "out"
            yield replace(weight, block=side) if skippable and last.to_residual else weight

    def _check(self, config: Any) -> None:
        sizes = [(name, LARGEST_SIZE) for name in (*_SIZES, self.neurons) if name]
        first = config  # as a whole for the number of layers, and then as the first of them reads it
        for name, most in (("num_hidden_layers", MOST_LAYERS), *sizes):
            size = getattr(first, name, None)
            if size is not None and not 1 <= size <= most:
                raise ModelError(f"a config with {name} {size}", f"1 to {most:,}", "Check config.json.")
            first = of_layer(config, 0)
        layers = range(config.num_hidden_layers if first is not config else 1)
        try:
            if self.experts:
                self.experts.check(config)
            kinds = {bool(self._routes(config, layer)): layer for layer in range(config.num_hidden_layers)}
            others = self.mixer.weights(config) if self.mixer else ()
            mlps = (weight for layer in kinds.values() for weight in self._feed_forward(config, layer))
            attending = (weight for layer in layers for weight in self._attention(config, layer))
            for weight in (*attending, *others, *mlps):
                check_weight(weight)
        except PlanError as failure:
            raise ModelError(f"a config whose {failure.given}", failure.expected, "Check config.json.") from failure

    def _attention(self, config: Any, layer: int) -> Iterator[Weight]:
        hidden, sizes, output = config.hidden_size, heads_of(of_layer(config, layer)), self._writing(config)
        heads, groups = sizes.queries, sizes.cached
        query, key = sizes.length * heads, sizes.length * groups
        if len(self.qkv) == 1:
            yield Weight(self.qkv[0], query + 2 * key, hidden, cached=True, queries=query)
            yield output(self.output, hidden, query)
            return
        q_proj, k_proj, v_proj = self.qkv
        shared = partial(Weight, in_features=hidden, input_group=_owner(q_proj))
        if self.gated or self.normed_values:  # values, heads and queries do not change alone then
            _, *cached = self._attending(config, layer)
            yield shared(q_proj, 2 * query if self.gated and not self.gate else query)
            yield from (shared(name, key, cached=True, as_values=len(cached) == 1) for name in cached)
            if self.gate:
                yield shared(self.gate, query)
            yield output(self.output, hidden, query)
            return
        drops_heads = model_type_of(config) not in FIXED_HEADS and not getattr(config, "use_qk_norm", False)
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

    def _feed_forward(self, config: Any, layer: int) -> Iterator[Weight]:
        """The weights of a layer's MLP, or of its shared expert; none where every expert is routed."""
        routes, writing = self._routes(config, layer), self._writing(config)
        if routes is None:
            yield from _mlp(config.hidden_size, self._neurons(config), self.up, self.down, self.blocks, writing)
        elif (width := routes.shared_width(config)) and (shared := routes.shared):
            up, down = tuple(f"{shared.name}.{name}" for name in shared.up), f"{shared.name}.{shared.down}"
            yield from _mlp(config.hidden_size, width, up, down, shared.blocks, writing)

    def _blends(self, routes: Experts) -> bool:
        return self.norms is not None or (routes.shared is not None and not routes.shared.adds)

    def _neurons(self, config: Any) -> int:
        if self.width is not None:
            return self.width.of(*(getattr(config, key) for key in self.width.keys))
        stated = getattr(config, self.neurons) if self.neurons else None
        return int(stated or 4 * config.hidden_size)


def _mlp(
    hidden: int, neurons: int, up: tuple[str, ...], down: str, blocks: int, writing: partial[Weight]
) -> Iterator[Weight]:
    group = _owner(up[0]) if len(up) > 1 else None
    for name in up:
        yield Weight(name, blocks * neurons, hidden, neurons="out", input_group=group, blocks=blocks)
    yield writing(down, hidden, neurons, neurons="in")


def _with_prefix(prefix: str, weight: Weight, from_norms: Container[str]) -> Weight:
    group = None if weight.input_group is None else prefix + weight.input_group
    return replace(weight, name=prefix + weight.name, input_group=group, input_from_norm=weight.name in from_norms)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]

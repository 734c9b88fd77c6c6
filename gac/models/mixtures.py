"""Families of mixtures of experts, and those of DeepSeek's latent attention."""

from dataclasses import replace
from functools import partial

from gac.models.experts import ALONE, BETWEEN, BY_KIND, EVERYWHERE, LISTED, STEPPED, Experts, SharedExpert, behind
from gac.models.family import Family
from gac.models.mixers import GATED_DELTA_NET, LATENT_ATTENTION, QWEN3_NEXT, SHORT_CONVOLUTION

_SHARED = SharedExpert("mlp.shared_experts", ("moe_intermediate_size", "n_shared_experts"))
_QWEN_SHARED = SharedExpert(
    "mlp.shared_expert", ("shared_expert_intermediate_size",), adds=False, gate="mlp.shared_expert_gate"
)
_QWEN_STEPPED = Experts(STEPPED, shared=_QWEN_SHARED, removable=True)
GRANITE = Experts(
    EVERYWHERE,
    count="num_local_experts",
    width="intermediate_size",
    shared=SharedExpert("shared_mlp", ("shared_intermediate_size",), ("input_linear",), "output_linear", blocks=2),
    block="block_sparse_moe",
    router="block_sparse_moe.router",
    stack="block_sparse_moe.experts",
    removable=True,
)
NEMOTRON = Experts(
    ALONE,
    count="n_routed_experts",
    shared=SharedExpert("mixer.shared_experts", ("moe_shared_expert_intermediate_size",), ("up_proj",)),
    block="mixer",
    router="mixer.gate",
    stack="mixer.experts",
    matrices=2,
)
_NUMBERED = Experts(BY_KIND, shared=replace(_SHARED, width=("moe_intermediate_size", "num_shared_experts")))
_WIDE = partial(Experts, EVERYWHERE, width="intermediate_size")
_REMOVABLE = partial(_WIDE, removable=True)
_ROUTED = partial(Experts, count="n_routed_experts", shared=_SHARED, removable=True)
_DENSE_FIRST = _ROUTED(behind("first_k_dense_replace"))
_LATENT = partial(Family, mixer=LATENT_ATTENTION, skips=(False, True))

MIXTURES = (
    Family(
        ("qwen3_moe",), experts=Experts(STEPPED, removable=True), towers=("qwen3_omni_moe_text", "qwen3_vl_moe_text")
    ),
    Family(("qwen2_moe",), experts=_QWEN_STEPPED),
    Family(("qwen3_next",), gated=True, mixer=QWEN3_NEXT, experts=_QWEN_STEPPED),
    Family(
        ("qwen3_5_moe_text",), gated=True, mixer=GATED_DELTA_NET, experts=replace(_QWEN_STEPPED, routing=EVERYWHERE)
    ),
    Family(("mixtral",), experts=_REMOVABLE(count="num_local_experts")),
    Family(("minimax_m2",), experts=_WIDE(count="num_local_experts")),
    Family(("olmoe",), experts=_REMOVABLE()),
    Family(
        ("flex_olmo",),
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        before=("", ""),
        experts=_REMOVABLE(),
    ),
    Family(("phimoe",), experts=_REMOVABLE(count="num_local_experts", router="mlp.router")),
    Family(("gpt_oss",), experts=_REMOVABLE(count="num_local_experts", router="mlp.router", biased=True)),
    Family(("granitemoe",), factor="residual_multiplier", experts=replace(GRANITE, shared=None)),
    Family(("granitemoeshared", "granitemoe_swa"), factor="residual_multiplier", experts=GRANITE),
    Family(("glm4_moe", "dots1", "sarvam_moe"), experts=_DENSE_FIRST, towers=("glm4v_moe_text",)),
    Family(("solar_open",), experts=_ROUTED(EVERYWHERE)),
    Family(("mellum",), experts=Experts(BY_KIND, count="num_local_experts", removable=True)),
    Family(("exaone_moe",), experts=replace(_NUMBERED, removable=True)),
    Family(("hy_v3",), experts=_NUMBERED),
    Family(
        ("flint",),
        experts=Experts(
            STEPPED, shared=SharedExpert("mlp.shared_expert", ("shared_expert_intermediate_size",)), removable=True
        ),
    ),
    Family(
        ("ernie4_5_moe",),
        experts=Experts(
            BETWEEN,
            "moe_num_experts",
            "moe_k",
            shared=replace(_SHARED, width=("moe_intermediate_size", "moe_num_shared_experts")),
            removable=True,
        ),
    ),
    Family(
        ("hunyuan_v1_moe",),
        experts=_REMOVABLE(
            active="moe_topk", router="mlp.gate", shared=SharedExpert("mlp.shared_mlp", ("intermediate_size",))
        ),
    ),
    Family(
        ("cohere2_moe",),
        before=("", ""),
        neurons="prefix_dense_intermediate_size",
        experts=Experts(
            BY_KIND,
            width="intermediate_size",
            shared=replace(_SHARED, width=("intermediate_size", "num_shared_experts"), adds=False),
            removable=True,
        ),
    ),
    Family(
        ("afmoe",),
        norms=("post_attention_layernorm", "post_mlp_layernorm"),
        before=("input_layernorm", "pre_mlp_layernorm"),
        gated=True,
        gate="self_attn.gate_proj",
        experts=Experts(
            behind("num_dense_layers"),
            router="mlp.router",
            shared=replace(_SHARED, width=("moe_intermediate_size", "num_shared_experts")),
        ),
    ),
    Family(
        ("kolibri1",),
        norms=("post_self_attn_layernorm", "post_mlp_layernorm"),
        experts=Experts(
            EVERYWHERE,
            count="num_local_experts",
            shared=replace(_SHARED, width=("shared_expert_intermediate_size",)),
            removable=True,
        ),
    ),
    Family(
        ("llama4_text",),
        neurons="intermediate_size_mlp",
        window="chunked_attention",
        up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        experts=Experts(
            LISTED,
            count="num_local_experts",
            width="intermediate_size",
            shared=SharedExpert("feed_forward.shared_expert", ("intermediate_size",), adds=False),
            block="feed_forward",
            router="feed_forward.router",
            stack="feed_forward.experts",
        ),
    ),
    Family(
        ("lfm2_moe",),
        last_norm="model.embedding_norm",
        output="self_attn.out_proj",
        up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
        before=("operator_norm", "ffn_norm"),
        mixer=SHORT_CONVOLUTION,
        experts=Experts(
            behind("num_dense_layers"),
            block="feed_forward",
            router="feed_forward.gate",
            stack="feed_forward.experts",
        ),
    ),
    Family(
        ("aria_text",),
        experts=Experts(
            EVERYWHERE,
            "moe_num_experts",
            "moe_topk",
            "intermediate_size",
            router="mlp.router",
            shared=replace(_SHARED, width=("intermediate_size", "moe_num_shared_experts")),
            removable=True,
        ),
    ),
    _LATENT(("deepseek_v2", "deepseek_v3", "mistral4", "sarvam_mla"), experts=_DENSE_FIRST),
    _LATENT(("glm4_moe_lite",), experts=_ROUTED(BY_KIND)),
    _LATENT(("axk1",), experts=_ROUTED(BY_KIND, shared=replace(_SHARED, adds=False))),
    _LATENT(("youtu",)),
)

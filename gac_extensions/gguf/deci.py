"""DeciLM in llama.cpp: what its loader and its graph of the architecture ``deci`` need.

Its graph adds an attention's output to the residual stream only in a layer with an MLP, and picks the rows of the last
tokens in the last layer's. So these layers get an MLP of one neuron with weights of zero.
"""

from dataclasses import replace

import torch

from gac.core.errors import CheckpointError
from gac_extensions.deci import DeciModel
from gac_extensions.gguf.header import Architecture, check_values

DECI = Architecture("deci", True, {})


def for_llama_cpp(model: DeciModel) -> DeciModel:
    """The same model with those MLPs, and without biases of zero, which are optional there.

    A CheckpointError names a value of the config for which there is no key, or a bias of queries of another size than
    the loader expects.
    """
    check_values(model.config, DECI)
    hidden = model.config.hidden_size
    state = {name: value for name, value in model.state.items() if not name.endswith("bias") or value.any()}
    layers = list(model.layers)
    for number, layer in enumerate(model.layers):
        prefix = f"model.layers.{number}."
        if not layer.neurons and (layer.groups or number == len(layers) - 1):
            layers[number] = replace(layer, neurons=1)
            norm = torch.ones_like(state["model.norm.weight"])
            state[f"{prefix}post_attention_layernorm.weight"] = norm
            for name, shape in (("gate", (1, hidden)), ("up", (1, hidden)), ("down", (hidden, 1))):
                state[f"{prefix}mlp.{name}_proj.weight"] = norm.new_zeros(shape)
        name = f"{prefix}self_attn.q_proj.bias"
        if len(state.get(name, ())) not in (0, hidden):
            value, expected = f"{name} of {len(state[name])} numbers", f"{hidden}, as llama.cpp reads it"
            raise CheckpointError(value, expected, "Export the model without --gguf (gac.export).")
    return replace(model, layers=tuple(layers), state=state)

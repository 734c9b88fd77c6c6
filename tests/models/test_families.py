"""Sites from a config alone, and how they count."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from gac.errors import ModelError
from gac.forms import FORMS, Weight
from gac.models.families import family_of, supported
from gac.models.shapes import SHAPES


def test_the_sites_are_the_weights_of_the_model(tiny_config: LlamaConfig, tiny_model: LlamaForCausalLM) -> None:
    weights = [weight for site in family_of(tiny_config).sites(tiny_config) for weight in site.weights]
    ours = {weight.name: (weight.out_features, weight.in_features) for weight in weights}
    theirs = {
        name.removesuffix(".weight"): tuple(parameter.shape)
        for name, parameter in tiny_model.named_parameters()
        if "proj" in name
    }
    assert ours == theirs


def test_an_explicit_head_dim_counts() -> None:
    config = LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_hidden_layers=1, head_dim=32)
    query = family_of(config).sites(config)[0].weights[0]
    assert (query.out_features, query.in_features) == (128, 64)


def test_known_shapes_count_their_targeted_weights() -> None:
    counts = {name: sum(s.params for s in family_of(shapes).sites(shapes)) for name, shapes in SHAPES.items()}
    assert counts == {"smollm2": 106168320, "llama-3-8b": 6979321856}


def test_the_mlp_is_one_site_with_neurons(tiny_config: LlamaConfig) -> None:
    site = family_of(tiny_config).sites(tiny_config)[4]
    assert (site.kind, site.neurons, len(site.weights)) == ("mlp", 176, 3)


def test_an_unknown_architecture_lists_the_supported(tiny_config: LlamaConfig) -> None:
    tiny_config.model_type = "mamba"
    with pytest.raises(ModelError, match=r"model type 'mamba'; expected a supported architecture \(llama\)"):
        family_of(tiny_config)
    assert supported() == ("llama",)


@pytest.mark.parametrize("name", sorted(FORMS))
@pytest.mark.parametrize("neurons", ["out", "in"])
def test_contract_of_every_form(name: str, neurons: str) -> None:
    form, weight = FORMS[name], Weight("w", 96, 64, neurons)  # type: ignore[arg-type]
    full = form.full(weight)
    assert form.params(weight, full) >= weight.params
    assert form.params(weight, form.largest_useful(weight) or full) <= weight.params
    operation = form.operation(weight, full, rows=5)
    assert operation.axes["m"] == 5
    axis = form.axis(weight)
    assert axis is None or operation.axes[axis] == full

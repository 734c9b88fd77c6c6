"""The dense model, as the config of the compressed one states it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from transformers import CONFIG_MAPPING

from gac.core.errors import CheckpointError, ModelError
from gac.models.families import Family, family_of
from gac.models.loading import UNREADABLE
from gac.models.sites import Site, Weight

# The model_type that compressors write, and the architecture that they compressed.
COMPRESSED_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "asvd_llama": "llama",
        "asvd_mistral": "mistral",
        "asvd_opt": "opt",
        "palullama": "llama",
        "palumistral": "mistral",
    }
)


@dataclass(frozen=True)
class DenseModel:
    """The sites of the dense model, and their linear weights by name.

    Attributes:
        family: None where the architecture is not supported; there are no sites then, and no shape is stated.
        config: of transformers; None where there is no family.
    """

    family: Family | None = None
    config: Any = None
    sites: tuple[Site, ...] = ()
    layers: int = 0
    hidden: int = 0

    @cached_property
    def weights(self) -> Mapping[str, Weight]:
        return {weight.name: weight for site in self.sites for weight in site.weights}


def dense_model(config: Mapping[str, Any]) -> DenseModel:
    """Read it from ``config.json``.

    Raises:
        CheckpointError: the config is not one of its architecture.
    """
    model_type = str(config.get("model_type"))
    architecture = COMPRESSED_TYPES.get(model_type, model_type)
    if architecture not in CONFIG_MAPPING:
        return DenseModel()
    try:
        whole: Any = CONFIG_MAPPING[architecture].from_dict(dict(config) | {"model_type": architecture})
        family = family_of(whole)
        sites = family.sites(whole)
    except ModelError:
        return DenseModel()
    except UNREADABLE as failure:
        reason = " ".join(str(failure).split()).rstrip(".")
        raise CheckpointError(
            f"config.json is no config of a {architecture} model: {reason}", "its own config", "Copy it again."
        ) from failure
    return DenseModel(family, whole, sites, whole.num_hidden_layers, whole.hidden_size)

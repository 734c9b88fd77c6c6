"""The linear methods of a plan, by the names of vLLM's layers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from gac.runtime.header import Module, storage_of
from gac.runtime.vllm.linear import DenseLinearMethod, PlannedLinearMethod
from gac.runtime.vllm.stored import StoredLinearMethod
from gac.runtime.vllm.stored_experts import StoredExpertsMethod

_ABSENT = ("Absent", "Constant")


class PlannedConfig(QuantizationConfig):  # type: ignore[misc]
    """The linear methods of a plan. It takes the place of a quantisation config, through which vLLM chooses them.

    Attributes:
        used: names of the modules that a layer of vLLM has taken.

    Args:
        modules: the modules of the plan, by the name of the weight in transformers' model.
        packed: names of the siblings of a layer of vLLM, by its own: ``{"qkv_proj": ["q_proj", ...]}``.
    """

    def __init__(self, modules: Mapping[str, Module], packed: Mapping[str, Sequence[str]]) -> None:
        super().__init__()
        self.modules, self.packed = dict(modules), packed
        self.used: set[str] = set()
        self._mapper: Any = None

    def name_of(self, name: str) -> str:
        """Return the name in vLLM's model of a module, given by its name in transformers' model."""
        return name if self._mapper is None else self._mapper.apply_list([name])[0]

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Take the names of vLLM's Transformers backend, which calls every base model ``model``."""
        if self._mapper is None:
            self._mapper = hf_to_vllm_mapper
            self.modules = hf_to_vllm_mapper.apply_dict(self.modules)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        module = self.modules.get(prefix)
        if isinstance(layer, RoutedExperts) and module is not None:
            storage = storage_of(prefix, module)
            return None if storage is None else StoredExpertsMethod(prefix, layer.moe_config, storage)
        if not isinstance(layer, LinearBase):
            return None
        if module is not None and module.module == "Router":
            return UnquantizedLinearMethod()
        block, _, name = prefix.rpartition(".")
        stacked = prefix in self.modules  # in transformers too
        names = [prefix] if stacked else [f"{block}.{sibling}" for sibling in self.packed.get(name, [name])]
        modules = [self.modules.get(sibling) for sibling in names]
        self.used |= self.modules.keys() & set(names)
        if not any(modules):
            return DenseLinearMethod()
        if all(module is not None and module.module in _ABSENT for module in modules):
            return AbsentLinearMethod()
        if any(module is not None and module.storage is not None for module in modules):
            return StoredLinearMethod(prefix, modules)
        return PlannedLinearMethod(modules)

    def get_name(self) -> Any:
        return "gac"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 70

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PlannedConfig":
        """Refuse: the model makes it from the key ``gac`` of its config."""
        raise ValueError("quantization is 'gac'; expected none. Leave --quantization out: config.json says it all.")


class AbsentLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """Stands for the weights of a block that is left out: it has no parameters, and never runs."""

    def create_weights(self, layer: Any, *sizes: Any, **options: Any) -> None:
        """Make nothing."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        raise RuntimeError(f"{layer.prefix} was run; it is left out.")

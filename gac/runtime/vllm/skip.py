"""Blocks that a plan skips, in vLLM's models."""

from typing import Any

import torch
from torch import Tensor, nn

from gac.runtime.finish import Skipped


def skip(model: Any, vllm_config: Any, skipped: Skipped, constant: bool) -> None:
    """Leave out a block and the norms that only it reads. An attention has no KV cache then.

    Args:
        skipped: the block and its norms, by their names in this model.
        constant: the block writes a constant, the bias of its last module.
    """
    path, output, config = skipped["block"], skipped["output"], vllm_config.model_config.hf_text_config
    dense = model.get_submodule(path)
    size = config.hidden_size if constant else 0
    pairs = skipped["attention"] and type(dense).__module__.startswith("transformers.")
    # Layers that sum attention and MLP over the processes at once add what each of these writes.
    last: Any = dense.get_submodule(output)
    silent = not getattr(last, "reduce_results", True) and last.tp_rank > 0
    model.set_submodule(path, SkippedBlock(output, size, vllm_config.model_config.dtype, pairs, silent))
    contexts = vllm_config.compilation_config.static_forward_context
    by_layer = f"{path.split('.')[-2]}.attn" if skipped["attention"] else None  # in the Transformers backend of 0.26
    for name in [name for name in contexts if name.startswith(f"{path}.") or name == by_layer]:
        del contexts[name]
    for name in skipped["norms"]:
        norm = SkippedNorm()
        norm._parameters.update(model.get_submodule(name)._parameters)
        model.set_submodule(name, norm)


class SkippedBlock(nn.Module):
    """An attention or MLP that writes zeros, or a constant.

    Args:
        output: name of the module whose bias is the constant.
        size: numbers of the constant; 0: there is none.
        pairs: it returns a pair, as attentions of transformers do.
        silent: it writes zeros, since another process writes the constant.
    """

    def __init__(self, output: str, size: int, dtype: torch.dtype, pairs: bool, silent: bool) -> None:
        super().__init__()
        constant = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False) if size else None
        self.output, self.pairs, self.silent = output, pairs, silent
        self.add_module(output, nn.Module())
        self.get_submodule(output).register_parameter("bias", constant)

    def forward(self, *args: Tensor, hidden_states: Tensor | None = None, **_: Any) -> Any:
        # vLLM's attentions take positions first, transformers' take rotary embeddings by name.
        x = next(each for each in reversed(args) if each is not None) if hidden_states is None else hidden_states
        constant: Any = self.get_submodule(self.output).bias
        y = torch.zeros_like(x) if constant is None or self.silent else constant.expand_as(x).contiguous()
        return (y, None) if self.pairs else y


class SkippedNorm(nn.Module):
    """A norm that is left out; it still adds its input to the residual stream, as vLLM's norms do."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return x
        x = x + residual
        return x, x

"""Save a compressed model: safetensors and JSON, no pickles, whole or absent."""

import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gac.arguments import Count, checked
from gac.checkpoint.attach import attach_plan, planned
from gac.checkpoint.target import check_free, complete_directory, save_tokenizer
from gac.compression.apply import empty_module
from gac.errors import CheckpointError
from gac.models.linears import as_linear
from gac.models.threads import one_call_at_a_time
from gac.plan import Plan
from gac.schemes import DEFAULT_SCHEME, scheme_named

DENSE_BITS = scheme_named(DEFAULT_SCHEME).bits
_SIZE = re.compile(r"(?=.*[1-9])[0-9]+(\.[0-9]+)?[KMGT]B", re.IGNORECASE)


@checked
@one_call_at_a_time
def save(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    overwrite: bool = False,
    max_shard_size: Count | str = "5GB",
) -> None:
    """Write a compressed model as a directory that appears whole or not at all.

    It holds sharded safetensors, ``config.json`` with the forms and dims under ``gac``, the generation config,
    ``plan.json``, a model card, the code that opens it without GAC, the tokenizer's files, and digests of all of it.
    Loading it gives the same logits bit for bit. (A model that was cast by ``.to(torch.bfloat16)`` has rounded its
    rotary frequencies too, which are no weights; load it in the dtype instead.)

    Args:
        model: from ``compress`` or ``load``; its plan is ``model.gac_plan``.
        tokenizer: None looks for that of the model the plan was made for, and says so where there is none.
        overwrite: replace a compressed checkpoint that is there already, once the new one is complete.
        max_shard_size: bytes, or as in ``5GB``, after which another file of weights begins.

    Raises:
        CheckpointError: the model carries no plan or no longer matches it, the size is none, or the directory is in
            use or cannot be written.
    """
    if isinstance(max_shard_size, str) and not _SIZE.fullmatch(max_shard_size):
        given = f"max_shard_size={max_shard_size!r}"
        raise CheckpointError(given, "bytes, or a size in KB, MB, GB or TB", "Write it like 5GB.")
    target = Path(directory)
    plan = planned(model)
    check_storable(plan)
    _check_matches(model, plan)
    attach_plan(model, plan)
    check_free(target, overwrite)
    with complete_directory(target) as part:
        save_tokenizer(part, tokenizer, plan.measured.model)
        model.save_pretrained(part, max_shard_size=max_shard_size)  # digests of all files come last


def check_storable(plan: Plan) -> None:
    """Refuse a plan whose numbers no checkpoint can hold yet: in 16 bits they would take more than the plan says.

    Raises:
        CheckpointError: names the scheme.
    """
    packed = sorted({one.scheme for one in plan.weights if scheme_named(one.scheme).bits < DENSE_BITS})
    if packed:
        raise CheckpointError(
            f"weights in {', '.join(packed)}",
            f"schemes of {DENSE_BITS} bits: packed numbers cannot be saved as yet",
            "Evaluate the model as gac.compress returns it, or plan without these schemes.",
        )


def _check_matches(model: PreTrainedModel, plan: Plan) -> None:
    """The model's modules are the plan's, all in one dtype: a checkpoint has but one."""
    for choice in plan.weights:
        module: Any = model.get_submodule(choice.name)
        found = {name: tuple(value.shape) for name, value in as_linear(module).state_dict().items()}
        wanted = empty_module(choice, any(name.endswith("bias") for name in found), "meta", model.dtype).state_dict()
        if found != {name: tuple(value.shape) for name, value in wanted.items()}:
            raise CheckpointError(
                f"{choice.name} is {module}",
                f"{choice.form} with dim {choice.dim}, as model.gac_plan says",
                "Save the model as gac.compress returned it.",
            )
    dtypes = {str(parameter.dtype) for parameter in model.parameters()}
    if len(dtypes) > 1:
        raise CheckpointError(
            f"weights in {' and '.join(sorted(dtypes))}", "one dtype for all weights", "Cast the model to one dtype."
        )

"""Save a compressed model: safetensors and JSON, no pickles, whole or absent."""

import re
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from gac.checkpoint.files import open_tensors, weight_files
from gac.checkpoint.planned import attach_plan, planned
from gac.checkpoint.target import check_free, complete_directory, save_tokenizer
from gac.compression.apply import empty_stored
from gac.core.arguments import Count
from gac.core.distributed.run import this_run
from gac.core.errors import CheckpointError
from gac.models.families import family_of
from gac.models.linears import as_linear
from gac.models.plain import dtypes_of
from gac.models.threads import entry_point
from gac.plan.plan import Plan, WeightChoice
from gac.runtime.modules import resized
from gac.runtime.storage.embeddings import embeddings_of
from gac.runtime.storage.experts import StoredExperts
from gac.runtime.storage.modules import Stored, stored_names
from gac.schemes import DEFAULT_SCHEME, scheme_named
from gac.schemes.base import storage_of

DENSE_BITS = scheme_named(DEFAULT_SCHEME).bits
_SIZE = re.compile(r"(?=.*[1-9])[0-9]+(\.[0-9]+)?[KMGT]B", re.IGNORECASE)


@entry_point()
def save(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    overwrite: bool = False,
    max_shard_size: Count | str = "5GB",
) -> None:
    """Write a compressed model as a directory that appears whole or not at all.

    It holds sharded safetensors, ``config.json`` with the forms and dims under ``gac``, the generation config,
    ``plan.json``, a model card, the code that opens it without GAC, the tokenizer's files, and digests of all of it.
    Loading it gives the same logits bit for bit. (A model that was cast by ``.to(torch.bfloat16)`` has rounded its
    rotary frequencies too, which are no weights; load it in the dtype instead.)

    Of several processes under torchrun rank 0 writes; the others return at once.

    Args:
        model: from ``compress`` or ``load``; its plan is ``model.gac_plan``.
        tokenizer: a tokenizer, or the processor of a multimodal model; None looks for that of the model the plan was
            made for, and says so where there is none.
        overwrite: replace a compressed checkpoint that is there already, once the new one is complete.
        max_shard_size: bytes, or as in ``5GB``, after which another file of weights begins.

    Raises:
        GacError: RANK and WORLD_SIZE are set, and there are no such processes.
        CheckpointError: the model carries no plan or no longer matches it, the size is none, the directory is in use
            or cannot be written, or transformers leaves a tensor out.
    """
    if isinstance(max_shard_size, str) and not _SIZE.fullmatch(max_shard_size):
        value = f"max_shard_size={max_shard_size!r}"
        raise CheckpointError(value, "bytes, or a size in KB, MB, GB or TB", "Write it like 5GB.")
    target = Path(directory)
    plan = planned(model)
    if not this_run().leads:
        return
    _check_storable(plan)
    _check_matches(model, plan)
    attach_plan(model, plan)
    check_free(target, overwrite)
    with complete_directory(target) as part:
        save_tokenizer(part, tokenizer, plan.measured.model, bool(family_of(model.config).inside))
        model.save_pretrained(part, max_shard_size=max_shard_size)  # digests of all files come last
        _check_complete(part, model)


def _check_storable(plan: Plan) -> None:
    schemes = {weight.scheme: scheme_named(weight.scheme) for weight in plan.weights}
    if wide := sorted(name for name, weight in schemes.items() if weight.bits < DENSE_BITS and weight.storage is None):
        raise CheckpointError(
            f"weights in {', '.join(wide)}, which has no storage of its own",
            f"{DENSE_BITS} bits a number, or a scheme that says what holds its numbers",
            "Give the scheme a storage, or plan without it.",
        )


def _check_matches(model: PreTrainedModel, plan: Plan) -> None:
    for choice in plan.weights:
        module: Any = model.get_submodule(choice.name)
        result = _described(as_linear(module))
        biased = any(name.endswith("bias") for name in result)
        if choice.weight.is_routed:
            due = _routed_due(module, choice) if choice.changed else module
        else:
            due = empty_stored(choice, biased, "meta", model.dtype)
        if result != _described(due):
            scheme = "" if choice.scheme == DEFAULT_SCHEME else f" in {choice.scheme}"
            raise CheckpointError(
                f"{choice.name} is {module}",
                f"{choice.form} with dim {choice.dim}{scheme}, as model.gac_plan says",
                "Save the model as gac.compress returned it.",
            )
    _check_ends(model, plan)
    dtypes = {str(dtype) for dtype in dtypes_of(model)}
    if len(dtypes) > 1:
        raise CheckpointError(
            f"weights in {' and '.join(sorted(dtypes))}", "one dtype for all weights", "Cast the model to one dtype."
        )


def _routed_due(module: Any, choice: WeightChoice) -> nn.Module:
    storage, plain = storage_of(scheme_named(choice.scheme)), getattr(module, "plain", (module,))[0]
    due: nn.Module = resized(plain, **choice.module.sizes)
    return due if storage is None else StoredExperts(storage, due)


def _check_complete(part: Path, model: Any) -> None:
    """Refuse what was written unless it holds every tensor of the model, by its name, shape and dtype."""
    stored, state = open_tensors(part, weight_files(part)[0]), model.state_dict()
    for name in sorted(state.keys() - model.all_tied_weights_keys.keys()):
        values, written = state[name], stored.get(name)
        if written is None or (written.shape, written.dtype) != (values.shape, values.dtype):
            result = "nothing" if written is None else f"{tuple(written.shape)} in {written.dtype}"
            value, expected = f"transformers wrote {result} for {name}", f"{tuple(values.shape)} in {values.dtype}"
            raise CheckpointError(value, expected, "Save it with another version of transformers.")


def _check_ends(model: PreTrainedModel, plan: Plan) -> None:
    head = plan.measured.head
    due = storage_of(scheme_named(head.scheme)) if head else None
    stored = [item for item in embeddings_of(model).values() if isinstance(item, Stored)]
    result = [(item.storage, item.matrix) for item in stored]
    if result != [(due, shape) for shape in (head.shapes if head else ())]:
        raise CheckpointError(
            f"embedding and head of which {len(stored)} are stored: {', '.join(map(str, stored)) or 'none'}",
            f"{', '.join(map(str, head.shapes))} in {head.scheme}, as model.gac_plan says" if head else "none stored",
            "Save the model as gac.compress returned it.",
        )


def _described(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    stored, state = stored_names(module), module.state_dict().items()
    return {name: (tuple(value.shape), value.dtype if name in stored else None) for name, value in state}

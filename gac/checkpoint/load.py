"""Load a compressed model: safetensors and JSON, no pickles, no code of the directory."""

import logging
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from gac.checkpoint.classes import classes_of
from gac.checkpoint.files import (
    ATTEMPTS,
    check_dtypes,
    described,
    open_tensors,
    plan_text,
    read_config,
    read_unreplaced,
    unread,
    weight_files,
)
from gac.checkpoint.header import agreed_plan, contradiction, digest_of, is_unchanged
from gac.checkpoint.planned import PlannedModel
from gac.checkpoint.verify import check_config, check_files, check_tensors, read_digests
from gac.checkpoint.verify import verify as verify_checkpoint
from gac.core.errors import CheckpointError
from gac.core.untrusted import check_inside, check_model_files
from gac.models.loading import Loaded, is_checkpoint, load_model, quiet_transformers, usable_device
from gac.models.streaming import moved
from gac.models.threads import LOADING, entry_point
from gac.runtime.contract import COMPRESSED, DIGESTS
from gac.runtime.parallel.ranks import SplitError

logger = logging.getLogger("gac")

_OTHERS = ("plan.json", "generation_config.json")  # that are read, beside config and weights


@entry_point()
def load(
    directory: str | Path,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    verify: bool = False,
    tp_plan: Literal["auto"] | None = None,
) -> PlannedModel:
    """Open a directory that ``save`` wrote, in eval mode, with its plan as ``gac_plan``; runs no code from it.

    What is read is compared with the digests that were written with it: names, dtypes and shapes of all tensors, the
    config, the plan and the generation config; the tensors' bytes with ``verify``. Where plan, header and dims are as
    they were written, the plan is read when it is first asked for; otherwise it is read and compared here. Of a
    checkpoint without digests a warning says so. Where the directory is replaced meanwhile, it is read again.

    Args:
        device: None takes the GPU if there is one.
        dtype: None keeps the checkpoint's.
        verify: first check all files as ``gac.verify`` does: every bit of the tensors, and what is not read here.
        tp_plan: ``auto`` splits the model over the processes that torchrun has started (tensor parallelism), each with
            a GPU of its own. Such a model runs without gradients, and is not saved again.

    Raises:
        CheckpointError: a file is missing or damaged, is not what was saved, or contradicts another; the directory was
            replaced during each of several attempts; with ``verify``, there are no digests; or with ``tp_plan``, the
            model cannot be divided by the number of processes, a device is given too, or they see other files.
        ModelError: there is no such device.
    """
    if tp_plan is not None and device is not None:
        value = f"tp_plan={tp_plan!r} and device={str(device)!r}"
        raise CheckpointError(value, "one of them", "Leave the device out: torchrun gives each process its own GPU.")
    place, source = usable_device(device), Path(directory)

    def read() -> PlannedModel:
        if verify:
            verify_checkpoint(source)
        with LOADING:
            model: PlannedModel = _load(source, dtype or "auto", place, tp_plan)
        return model

    # Processes that share a model cannot begin again one by one.
    return read_unreplaced(source, read, ATTEMPTS if tp_plan is None else 1)


def _load(source: Path, dtype: torch.dtype | str, device: torch.device, tp_plan: str | None) -> Any:
    check_inside(source, CheckpointError)
    check_model_files(source, CheckpointError)
    document, text = read_config(source), plan_text(source)
    config = described(document, source)
    untouched = is_unchanged(config.gac, config) and config.gac.get("plan") == digest_of(text)
    plan = None if untouched else agreed_plan(text, config, source)
    digests, (files, index) = read_digests(source), weight_files(source)
    tensors = open_tensors(source, files)
    if digests is None:
        logger.warning("%s has no %s: that its files are what was saved cannot be checked", source, DIGESTS)
    else:
        check_config(document, digests, source)
        check_files([*_OTHERS, *([index] if index else [])], digests, source)
        check_tensors(tensors, digests, source)
    options = {"tp_plan": tp_plan} if tp_plan else {}
    with unread(source), quiet_transformers():
        try:
            model, report = classes_of(config.model_type.removeprefix(COMPRESSED)).causal_lm.from_pretrained(
                source, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
            )
        except SplitError as failure:
            raise CheckpointError(failure.given, failure.expected, failure.remedy) from failure
    if names := sorted(map(str, report["unexpected_keys"])):
        value = f"{names[0]} is unexpected ({len(names)} in all)"
        raise contradiction(source, value, "the weights of the plan, each once")
    if getattr(model, "hf_quantizer", None) is None:
        check_dtypes(tensors, model, source)
    if tp_plan is None and model.device != device:  # a move looks at every parameter
        model = moved(model, device)
    if plan is not None:
        model.gac_plan = plan
    return model


def open_model(
    model: PreTrainedModel | str | Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Loaded:
    """Load a dense model, or a compressed one with its plan as ``gac_plan``; a loaded model is not changed."""
    if isinstance(model, str | Path) and is_checkpoint(model):
        return Loaded(load(str(model), device, dtype), str(model), str(model))
    return load_model(model, device=device, dtype=dtype)

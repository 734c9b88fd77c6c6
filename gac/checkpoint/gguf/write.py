"""Write a compressed model as one GGUF file."""

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gac.checkpoint.export import opened, stock_model
from gac.checkpoint.gguf.architectures import Architecture, add_sizes, architecture_of, head_dim
from gac.checkpoint.gguf.content import Content, as_they_are, content, in_pairs
from gac.checkpoint.gguf.package import gguf_package
from gac.checkpoint.gguf.record import GgufFile, tensors_written
from gac.checkpoint.gguf.sources import Source, sources
from gac.checkpoint.gguf.vocabulary import add_vocabulary
from gac.core.arguments import checked
from gac.core.errors import CheckpointError
from gac.core.io import whole_file
from gac.core.progress import progress_bar
from gac.models.loading import load_tokenizer
from gac.models.threads import one_call_at_a_time
from gac.plan.plan import Plan
from gac.schemes import scheme_named

logger = logging.getLogger("gac")
_MAGIC = b"GGUF"


@checked
@one_call_at_a_time
def export_gguf(
    model: PreTrainedModel | str | Path,
    path: str | Path,
    *,
    merge: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    overwrite: bool = False,
) -> GgufFile:
    """Write a compressed model as one GGUF file, which llama.cpp runs.

    Numbers and scales of ``w2a16`` to ``w8a16`` are carried bit for bit, in the smallest type that holds them. What no
    type holds is rounded once more, to 8 bits; the record says how far that moved it. The file appears whole or not at
    all.

    Args:
        model: from ``compress`` or ``load``, or the directory of one.
        path: the file, ``model.gguf``.
        merge: multiply low-rank pairs out and fill with zeros what was shortened, as ``gac.export`` does. False keeps
            the dims, which llama.cpp has a place for only where MLPs alone are narrower, by as much in every layer.
        tokenizer: None looks for the model's own.
        overwrite: replace a GGUF file that is there already, once the new one is complete.

    Raises:
        CheckpointError: there is no such model, llama.cpp has no place for its dims, its architecture or its
            tokenizer, gguf is not installed, or the file cannot be written or is there already.
        ModelError: a weight is not in memory, or there is no tokenizer.
    """
    target = Path(path)
    check_free_file(target, overwrite)
    gguf_package()
    loaded, plan = opened(model)
    stock = stock_model(loaded, plan, merge)
    architecture = architecture_of(stock.config)
    words = load_tokenizer(str(loaded.config.name_or_path)) if tokenizer is None else tokenizer
    found = list(sources(loaded, stock, plan, merge))
    bar = progress_bar("choosing types", "tensor", len(found), found)
    held = [_content(one, stock.config, architecture) for one in bar]
    with whole_file(target, "a GGUF file", CheckpointError) as part:
        writer = _header(part, plan, stock.config, architecture, words, held)
        moved = _write_tensors(writer, part, held)
    return GgufFile(
        path=str(target),
        architecture=architecture.name,
        bytes=target.stat().st_size,
        planned_bytes=plan.bytes[0],
        weights_bytes=_bytes_of_weights(plan, held),
        tensors=tensors_written(zip(held, moved, strict=True)),
        inputs=tuple(sorted({one.scheme for one in plan.weights if scheme_named(one.scheme).input_quantiser})),
    )


def check_free_file(target: Path, overwrite: bool) -> None:
    """Refuse a file that is there, unless it is a GGUF file that may be replaced.

    Raises:
        CheckpointError: it is in use.
    """
    if not target.exists():
        return
    if not target.is_file() or not _is_gguf(target):
        raise CheckpointError(f"{target} exists and is no GGUF file", "a new file", "Choose another path.")
    if not overwrite:
        raise CheckpointError(
            f"{target} is a GGUF file", "a new file", "Choose another path, or pass overwrite=True (--overwrite)."
        )


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _content(source: Source, config: Any, architecture: Architecture) -> Content:
    """A tensor under llama.cpp's name, its rows in llama.cpp's order."""
    gguf = gguf_package()
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    name = names.get_name(source.name, try_suffixes=(".weight", ".bias"))
    if name is None:
        raise CheckpointError(
            f"{source.name} of a {config.model_type} model",
            "tensors that llama.cpp has a name for",
            "Export the model without --gguf (gac.export).",
        )
    turned = architecture.paired and (".q_proj." in source.name or ".k_proj." in source.name)
    return content(source, name, partial(in_pairs, head_dim(config)) if turned else as_they_are)


def _header(
    part: Path, plan: Plan, config: Any, architecture: Architecture, tokenizer: Any, held: Sequence[Content]
) -> Any:
    """The writer, with all but the tensors written."""
    gguf = gguf_package()
    writer = gguf.GGUFWriter(part, architecture.name)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(plan.measured.model)
    add_sizes(writer, config)
    writer.add_file_type(_file_type(held))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_vocabulary(writer, tokenizer, config.vocab_size)
    for one in held:
        writer.add_tensor_info(one.name, one.source.shape, None, one.nbytes, one.ggml_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return writer


def _file_type(held: Sequence[Content]) -> Any:
    """What GGUF calls a file of which most numbers are of this type."""
    sizes: dict[str, int] = {}
    for one in held:
        sizes[one.kind] = sizes.get(one.kind, 0) + one.nbytes
    most, types = max(sizes, key=lambda kind: sizes[kind]), gguf_package().LlamaFileType
    return types.ALL_F32 if most == "F32" else types[f"MOSTLY_{most}"]


def _write_tensors(writer: Any, part: Path, held: Sequence[Content]) -> list[float]:
    """How far each tensor moved."""
    padded = [writer.ggml_pad(one.nbytes, writer.data_alignment) for one in held]
    total = writer.ggml_pad(part.stat().st_size, writer.data_alignment) + sum(padded)
    logger.info("writing %s bytes (%s MB)", f"{total:,}", f"{total / 1e6:,.1f}")
    moved = []
    try:
        for one in progress_bar("writing", "tensor", len(held), held):
            data = one.data()
            writer.write_tensor_data(data)
            moved.append(one.moved(data))
    finally:
        writer.close()
    return moved


def _bytes_of_weights(plan: Plan, held: Iterable[Content]) -> int:
    """What the matrices take that the plan counts."""
    names = {f"{choice.name}.weight" for choice in plan.weights}
    return sum(one.nbytes for one in held if one.source.name in names)

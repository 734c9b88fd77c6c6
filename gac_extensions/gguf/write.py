"""Write a compressed model as one GGUF file."""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gac.checkpoint.export import opened, stock_model
from gac.core.errors import CheckpointError
from gac.core.io import complete_file
from gac.core.progress import progress_bar
from gac.models.loading import load_tokenizer
from gac.models.threads import entry_point
from gac.plan.plan import Plan
from gac.schemes import scheme_named
from gac_extensions.deci import LayerSizes, deci_model
from gac_extensions.gguf.deci import DECI, for_llama_cpp
from gac_extensions.gguf.header import Architecture, add_sizes, add_vocabulary, architecture_of
from gac_extensions.gguf.tensors import FileTensor, SourceTensor, file_tensors, gguf_package, named_tensors

logger = logging.getLogger("gac")


@dataclass(frozen=True)
class TensorsWritten:
    """The tensors of one scheme with one type of GGUF."""

    scheme: str  # of the plan; ``bf16`` if not quantised
    type: str  # of GGUF: ``Q5_0``
    tensors: int
    bytes: int
    moved: float  # the largest relative change of one of them; 0 if all are copied bit for bit
    why: str | None  # dims that need a larger type, or another quantisation


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file that was written."""

    path: str
    architecture: str  # llama.cpp's name
    bytes: int
    planned_bytes: int  # of the planned weights, as the plan counts them
    weights_bytes: int  # of the same weights in the file
    tensors: tuple[TensorsWritten, ...]  # by scheme and type, the largest first
    inputs: tuple[str, ...]  # schemes that quantise inputs too, which no file can request from llama.cpp

    @property
    def exact(self) -> bool:
        """True if every number is the model's, bit for bit."""
        return all(group.moved == 0 for group in self.tensors)


@entry_point()
def export_gguf(
    model: PreTrainedModel | str | Path,
    path: str | Path,
    *,
    merge: bool = False,
    deci: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    overwrite: bool = False,
) -> GgufFile:
    """Write a compressed model as one GGUF file, which llama.cpp runs.

    Numbers and scales of ``w2a16`` to ``w8a16`` are copied bit for bit, in the smallest type that holds them. Others
    are quantised again, to 8 bits; the record has the error. The file appears completely or not at all.

    Args:
        model: from ``compress`` or ``load``, or its directory.
        path: the file, ``model.gguf``.
        merge: multiply low-rank pairs and fill shortened weights with zeros, as ``gac.export`` does. False keeps the
            dims, which llama.cpp supports only if MLPs alone are narrower, by the same width in every layer.
        deci: write the architecture ``deci``, whose layers may differ, as ``gac.export`` does; not with ``merge``, and
            not for weights in a scheme. An attention without an MLP gets one of one neuron that writes zeros.
        tokenizer: None looks for the model's own.
        overwrite: replace an existing GGUF file, once the new one is complete.

    Raises:
        CheckpointError: there is no such model, llama.cpp has no place for its dims, its architecture or its
            tokenizer, gguf is not installed, or the file cannot be written or exists.
        ModelError: a weight is not in memory, or there is no tokenizer.
    """
    target = Path(path)
    _check_free(target, overwrite)
    gguf_package()
    loaded, plan = opened(model)
    if merge and deci:
        raise CheckpointError("merge and deci", "one of them: DeciLM keeps the dims", "Leave one out.")
    contents = _deci_contents(loaded, plan) if deci else _stock_contents(loaded, plan, merge)
    architecture, tensors = contents.architecture, contents.tensors
    words = load_tokenizer(str(loaded.config.name_or_path)) if tokenizer is None else tokenizer
    with complete_file(target, "a GGUF file", CheckpointError) as part:
        writer = _header(part, plan, contents, words)
        errors = _write_tensors(writer, part, tensors)
    names = {f"{choice.name}.weight" for choice in plan.weights}
    return GgufFile(
        path=str(target),
        architecture=architecture.name,
        bytes=target.stat().st_size,
        planned_bytes=plan.bytes[0],
        weights_bytes=sum(tensor.nbytes for tensor in tensors if tensor.source.name in names),
        tensors=_grouped(zip(tensors, errors, strict=True)),
        inputs=tuple(sorted({choice.scheme for choice in plan.weights if scheme_named(choice.scheme).input_quantiser})),
    )


@dataclass(frozen=True)
class _Contents:
    """The model in a file."""

    config: Any
    architecture: Architecture
    tensors: Sequence[FileTensor]
    layers: Sequence[LayerSizes] = ()  # the sizes of each layer, where they differ


def _stock_contents(model: Any, plan: Plan, merge: bool) -> _Contents:
    stock = stock_model(model, plan, merge)
    architecture = architecture_of(stock.config)
    return _Contents(stock.config, architecture, file_tensors(model, stock, plan, merge, architecture))


def _deci_contents(model: Any, plan: Plan) -> _Contents:
    decilm = for_llama_cpp(deci_model(model, plan))
    state = decilm.state
    sources = [
        SourceTensor(name, tuple(value.shape), partial(state.__getitem__, name)) for name, value in state.items()
    ]
    tensors = named_tensors(sources, decilm.config, model.dtype, DECI)
    return _Contents(decilm.config, DECI, tensors, decilm.layers)


def _check_free(target: Path, overwrite: bool) -> None:
    if not target.exists():
        return
    if not target.is_file() or not _is_gguf(target):
        raise CheckpointError(f"{target} exists and is no GGUF file", "a new file", "Choose another path.")
    if not overwrite:
        remedy = "Choose another path, or pass overwrite=True (--overwrite)."
        raise CheckpointError(f"{target} is a GGUF file", "a new file", remedy)


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _header(part: Path, plan: Plan, contents: _Contents, tokenizer: Any) -> Any:
    """Write everything but the tensors, and return the writer."""
    gguf, tensors = gguf_package(), contents.tensors
    writer = gguf.GGUFWriter(part, contents.architecture.name)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(plan.measured.model)
    add_sizes(writer, contents.config, contents.layers)
    sizes = Counter[str]()
    for tensor in tensors:
        sizes[tensor.kind] += tensor.nbytes
    (largest, _), types = sizes.most_common(1)[0], gguf.LlamaFileType
    writer.add_file_type(types.ALL_F32 if largest == "F32" else types[f"MOSTLY_{largest}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_vocabulary(writer, tokenizer, contents.config.vocab_size)
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.source.shape, None, tensor.nbytes, tensor.ggml_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return writer


def _write_tensors(writer: Any, part: Path, tensors: Sequence[FileTensor]) -> list[float]:
    """Write them, and return the relative error of each."""
    padded = [writer.ggml_pad(tensor.nbytes, writer.data_alignment) for tensor in tensors]
    total = writer.ggml_pad(part.stat().st_size, writer.data_alignment) + sum(padded)
    logger.info("writing %s bytes (%s MB)", f"{total:,}", f"{total / 1e6:,.1f}")
    errors = []
    try:
        for tensor in progress_bar("writing", "tensor", len(tensors), tensors):
            data = tensor.data()
            writer.write_tensor_data(data)
            errors.append(tensor.error(data))
    finally:
        writer.close()
    return errors


def _grouped(written: Iterable[tuple[FileTensor, float]]) -> tuple[TensorsWritten, ...]:
    def key(pair: tuple[FileTensor, float]) -> tuple[str, str, str]:
        return pair[0].source.scheme, pair[0].kind, pair[0].why or ""

    groups = []
    for (scheme, kind, why), pairs in groupby(sorted(written, key=key), key):
        tensors, errors = zip(*pairs, strict=True)
        size = sum(tensor.nbytes for tensor in tensors)
        groups.append(TensorsWritten(scheme, kind, len(tensors), size, max(errors), why or None))
    return tuple(sorted(groups, key=lambda group: -group.bytes))

"""What a scheme asks of a dim, as the scheme itself says it: GEMMs that it runs, columns that its kernels read."""

from collections.abc import Iterator

from gac.lab.mechanisms.axes import Setting
from gac.profiling.operators import OPERATORS
from gac.runtime.limits import LIMITS

_TAKEN = 4096
"""A size at which every scheme has an operator (``gac.testing.schemes``). It stands for a size that is not known."""


def refuses(setting: Setting) -> bool:
    """Whether the scheme has no operator for some sizes of this axis."""
    return bool(setting.sides) and setting.scheme is not None and setting.scheme.needs is not None


def reads(setting: Setting) -> bool:
    """Whether it says which columns its kernels read, and those of a matrix are known."""
    storage = None if setting.scheme is None else setting.scheme.storage
    return storage is not None and storage.storage in LIMITS and _known(setting)


def groups(setting: Setting) -> bool:
    """Whether it has a scale for each group of columns, and those of a matrix are known."""
    return setting.scheme is not None and setting.scheme.group is not None and _known(setting)


def _known(setting: Setting) -> bool:
    return bool(setting.sides) and bool(_columns(1, setting))


# --- what each asks -------------------------------------------------------------------------------------------------


def runs(dim: int, setting: Setting) -> bool:
    """Whether the scheme has an operator for every GEMM; of sizes that are not known, for some."""
    operator = OPERATORS.get(setting.operator)
    return operator.refusal(dict.fromkeys(operator.axes, _TAKEN) | setting.sizes(dim), setting.dtype) is None


def is_read(dim: int, setting: Setting) -> bool:
    """Whether the kernels read every matrix of which the columns are known."""
    return unread(dim, setting) is None


def in_whole_groups(dim: int, setting: Setting) -> bool:
    """Whether all groups of these are full."""
    return not any(_ragged(dim, setting))


def unread(dim: int, setting: Setting) -> str | None:
    """Why the kernels cannot read one of the matrices, and what happens then; None where they read all known ones."""
    if (scheme := setting.scheme) is None:
        return None
    reason = next(filter(None, (scheme.unread(*matrix) for matrix in _matrices(dim, setting))), None)
    return None if reason is None else f"{reason}: plain PyTorch unpacks it for every product"


# --- the numbers behind it ------------------------------------------------------------------------------------------


def say_runs(dim: int, setting: Setting) -> str:
    assert setting.scheme is not None
    sizes = ", ".join(f"{axis} = {size}" for axis, size in setting.sizes(dim).items() if axis != "m")
    return f"scheme {setting.scheme.name} needs {setting.scheme.needs}: {sizes}"


def say_read(dim: int, setting: Setting) -> str:
    return unread(dim, setting) or _of_columns(dim, setting)


def say_groups(dim: int, setting: Setting) -> str:
    assert setting.scheme is not None
    last = "; ".join(f"the last has {count}" for count in _ragged(dim, setting) if count)
    return f"{_of_columns(dim, setting)} in groups of {setting.scheme.group}{f': {last}' if last else ''}"


def _of_columns(dim: int, setting: Setting) -> str:
    return f"{' and '.join(map(str, _columns(dim, setting)))} columns"


def _ragged(dim: int, setting: Setting) -> list[int]:
    assert setting.scheme is not None
    return [setting.scheme.ragged(columns) for columns in _columns(dim, setting)]


def _columns(dim: int, setting: Setting) -> list[int]:
    return [columns for _, columns in _matrices(dim, setting)]


def _matrices(dim: int, setting: Setting) -> Iterator[tuple[int, int]]:
    """Rows and columns of the matrices of which the columns are known."""
    operator, known = OPERATORS.get(setting.operator), setting.sizes(dim)
    gemms = operator.gemms(dict.fromkeys(operator.axes, _TAKEN) | known)
    for names, gemm in zip(operator.products, gemms, strict=True):
        if names.split()[-2] in known:  # as ``linear`` and ``batched_gemm`` have them: ..., columns, rows
            yield gemm.axes["n"], gemm.axes["k"]

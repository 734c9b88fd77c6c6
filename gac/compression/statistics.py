"""Where a plan's statistics are kept, and what measures those that are not, in one shot or in two."""

import hashlib
from collections.abc import Iterator, Sequence

from transformers import PreTrainedModel

from gac.compression.first_shot import FIRST_KEPT, first_shot
from gac.io import home
from gac.models.sites import Site
from gac.recipe import Shots
from gac.sensitivity.calibration import LayerMoments
from gac.sensitivity.curves import Source
from gac.sensitivity.methods import Method
from gac.sensitivity.second_shot import stream_second
from gac.sensitivity.store import StatisticsStore
from gac.sensitivity.text import Windows
from gac.version import __version__

_FORMAT = 7  # raised when what is kept of a layer changes, or how a first shot is made


def statistics(
    model: PreTrainedModel, digest: str, windows: Windows, method: Method, shots: Shots, *, progress: bool = True
) -> tuple[StatisticsStore, Source | None]:
    """Where curves and factors are kept, and what ``stream_fits`` takes the moments of other layers from.

    The second shot's are kept by themselves, and its model is made when its moments are first asked for.

    Args:
        model: the dense model.
        digest: of its weights.
    """
    key = f"{digest} {windows.digest} {method.power}"
    one = _store(key)
    if shots == 1:
        return one, None
    two = _store(f"{key}, gradients at {FIRST_KEPT}")

    def second(sites: Sequence[Site]) -> Iterator[tuple[int, LayerMoments]]:
        first = first_shot(model, windows.ids, method, one, progress=progress)
        stores = one, two
        return stream_second(model, first, sites, windows.ids, power=method.power, stores=stores, progress=progress)

    return two, second


def _store(of: str) -> StatisticsStore:
    key = hashlib.sha256(f"{__version__} {_FORMAT} {of}".encode()).hexdigest()
    return StatisticsStore(home() / "statistics" / key[:24])

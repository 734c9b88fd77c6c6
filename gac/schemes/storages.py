"""The storages of schemes; needs torch."""

from gac.runtime.storage.base import Storage
from gac.runtime.storage.modules import STORAGES
from gac.schemes.base import Scheme


def storage_of(scheme: Scheme) -> Storage | None:
    """The storage of a scheme's matrices; None: the modules of forms hold them."""
    if scheme.storage is None:
        return None
    return STORAGES[scheme.storage.storage][0](**scheme.storage.options)

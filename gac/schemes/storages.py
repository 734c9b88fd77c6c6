"""From what a scheme says of its storage to the storage itself."""

from gac.runtime.storage.base import Storage
from gac.runtime.storage.modules import STORAGES
from gac.schemes.base import Scheme


def storage_of(scheme: Scheme) -> Storage | None:
    """What holds the matrices of a scheme; None: the forms' own modules."""
    if scheme.storage is None:
        return None
    return STORAGES[scheme.storage.storage][0](**scheme.storage.options)

"""The choice of the latency table that a plan uses."""

import logging
from pathlib import Path

import torch

from gac.core.errors import ProfileError
from gac.plan.evidence import ProfileUsed
from gac.profiling.folders import local_profile
from gac.profiling.table import Profile

logger = logging.getLogger("gac")

DEFAULT = "nvidia-h100-80gb-hbm3"


def select_profile(requested: Profile | str | Path | None, engine: str | None = None) -> tuple[Profile, ProfileUsed]:
    """Return the profile to plan with, and its record for the plan.

    None means the local GPU's profile, or the shipped H100's where there is no GPU; a shipped one of the engine comes
    first. A table of other hardware is used if it is given by name or already loaded, but not by path; the note in the
    record says so. ProfileError where it cannot be read, was measured on other hardware, or the local GPU has none yet.
    """
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    source = requested if requested is not None else DEFAULT if here is None else local_profile(here, engine)
    if source is None:
        raise ProfileError(
            f"the GPU here, {here}, has no profile yet",
            "a measured latency table",
            "Run gac profile once, or name the profile of another GPU.",
        )
    profile = Profile.opened(source)
    gpu = profile.header.gpu
    if here is None:
        why = "no GPU here, so the shipped table" if requested is None else "asked for; no GPU here to compare with"
    elif here == gpu:
        why = "measured on this GPU's model"
    elif isinstance(requested, Profile) or not Path(str(requested)).is_file():
        why = f"asked for by name; the GPU here is {here}"
    else:
        raise ProfileError(
            f"profile {requested} was measured on {gpu}",
            f"one of the GPU here, {here}",
            "Measure this GPU with gac profile, or ask for the other one by its name.",
        )
    logger.info("profile of %s: %s", gpu, why)
    return profile, ProfileUsed(gpu, profile.digest, why)

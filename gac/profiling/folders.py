"""Places of profiles: shipped with GAC, or saved on this machine."""

import hashlib
import re
from contextlib import suppress
from pathlib import Path

from gac.core.errors import ProfileError, did_you_mean
from gac.core.io import home

_SHOWN = 200


def shipped_profiles() -> tuple[Path, ...]:
    """List the profiles that come with GAC, by name: in an installed package, or in a checkout's ``profiles/``."""
    package = Path(__file__).parent.parent
    for folder in (package / "_profiles", package.parent / "profiles"):
        if folder.is_dir():
            return tuple(sorted(folder.glob("*.jsonl"), key=lambda path: path.stem))
    return ()


def saved_profiles() -> tuple[Path, ...]:
    """List what ``gac profile`` saved in ``$GAC_HOME/profiles``, or ``~/.cache/gac/profiles``."""
    return tuple(sorted((home() / "profiles").glob("*.jsonl")))


def default_path(gpu: str) -> Path:
    """Return the file of a GPU's profile: ``NVIDIA H100 80GB HBM3`` -> ``nvidia-h100-80gb-hbm3.jsonl``."""
    return home() / "profiles" / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.jsonl"


def local_profile(gpu: str, engine: str | None = None) -> Path | None:
    """Find the profile of this GPU: the saved one, else a shipped one, for the engine if there is one; else None."""
    name = default_path(gpu).stem
    shipped = {path.stem: path for path in shipped_profiles()}
    saved = next((path for path in saved_profiles() if path.stem == name), None)
    return saved or shipped.get(f"{name}-{engine}") or shipped.get(name)


def find_profile(path_or_name: str | Path) -> Path:
    """Find the file of a path or a profile's name; a saved profile hides a shipped one of the same name.

    Raises:
        ProfileError: there is none; lists the known names and suggests the nearest.
    """
    with suppress(OSError):  # the name may be too long for a path
        if (path := Path(path_or_name)).is_file():
            return path
    files = (*shipped_profiles(), *saved_profiles())
    known = {file.stem: file for file in files if file.is_file() or not file.is_symlink()}
    name = str(path_or_name)
    if name in known:
        return known[name]
    shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}..."
    listed = "Correct the name or the path: gac profiles lists tables, gac profiles NAME the models of one."
    measure = "A GPU without a table is measured with gac profile, on that GPU."
    raise ProfileError(
        f"profile {shown!r} is neither a file nor a known name",
        f"a path, or one of {', '.join(known) or '(no profile is installed)'}",
        f"{did_you_mean(Path(name[:_SHOWN]).stem.lower(), known, listed, cutoff=0.5)} {measure}",
    )


def profile_with(digest: str) -> Path | None:
    """Find the shipped or saved profile whose bytes have this SHA-256; None where there is none."""
    files = (file for file in (*shipped_profiles(), *saved_profiles()) if file.is_file())
    return next((file for file in files if hashlib.sha256(file.read_bytes()).hexdigest() == digest), None)

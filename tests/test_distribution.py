"""The name on the package index: the other tool called gac is told apart."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import gac
import gpu_aligned_compression as start

ROOT = Path(__file__).parent.parent


def _run(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.argv[0] = 'gac'; import gpu_aligned_compression as start; start.main()"
    environment = {"PYTHONPATH": f"{path}:{ROOT}", "PATH": ""}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=path, capture_output=True, text=True, env=environment, check=False)


def test_the_name_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == gac.__distribution__ == start.NAME
    assert project["scripts"] == {"gac": "gpu_aligned_compression:main"}


@pytest.mark.parametrize(
    ("file", "text", "error"),
    [
        (
            "gac/__init__.py",
            "",
            "import gac finds another tool in {}/gac/__init__.py, not gpu-aligned-compression: pip un",
        ),
        (
            "gac-3.5.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: gac\nVersion: 3.5\n",
            "the tool gac 3.5 is installed b",
        ),
        ("", "", ""),
    ],
)
def test_the_version_tells_of_another_package_called_gac(file: str, text: str, error: str, tmp_path: Path) -> None:
    if file:
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(text)
    ran = _run(tmp_path, "--version")
    assert ran.returncode == bool(error)
    if error:
        assert ran.stderr.startswith("Error: " + error.format(tmp_path))
    else:
        assert ran.stdout == f"gac, version {gac.__version__} (gpu-aligned-compression)\n"

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


def test_another_package_called_gac(tmp_path: Path) -> None:
    (tmp_path / "gac").mkdir()
    (tmp_path / "gac" / "__init__.py").write_text("")
    ran = _run(tmp_path, "--help")
    assert ran.returncode == 1
    assert ran.stderr == (
        f"Error: import gac finds another tool in {tmp_path}/gac/__init__.py, not gpu-aligned-compression: "
        "pip uninstall gac, then pip install --force-reinstall gpu-aligned-compression\n"
    )


@pytest.mark.parametrize("both", [False, True])
def test_the_version_tells_whether_both_are_installed(tmp_path: Path, both: bool) -> None:
    if both:
        (tmp_path / "gac-3.5.dist-info").mkdir()
        (tmp_path / "gac-3.5.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: gac\nVersion: 3.5\n")
    ran = _run(tmp_path, "--version")
    assert ran.returncode == both
    if both:
        assert "Error: the tool gac 3.5 is installed beside gpu-aligned-compression" in ran.stderr
    else:
        assert ran.stdout == f"gac, version {gac.__version__} (gpu-aligned-compression)\n"

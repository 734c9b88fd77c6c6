"""Every benchmark script starts, and what it names in GAC exists."""

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.benchmarks import killed_ranks, scale

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "tests/benchmarks").rglob("*.py"))


def missing(module: ModuleType, path: Path) -> list[str]:
    """The attributes of imported modules that a script reads or replaces, and that do not exist."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ImportFrom(module=str(source)) if source.partition(".")[0] in ("gac", "tests"):
                exec(ast.unparse(node), {})  # also of imports within functions
            case ast.Attribute(value=ast.Name(id=owner), attr=attribute):
                names.append((owner, attribute))
            case ast.Call(func=ast.Attribute(attr="object"), args=[ast.Name(id=owner), ast.Constant(attribute), *_]):
                names.append((owner, attribute))
            case ast.Call(func=ast.Attribute(attr="multiple"), args=[ast.Name(id=owner)], keywords=replaced):
                names += [(owner, keyword.arg or "") for keyword in replaced]
    owners = {name: value for name, value in vars(module).items() if isinstance(value, (ModuleType, type))}
    return [f"{owner}.{name}" for owner, name in names if owner in owners and not hasattr(owners[owner], name)]


@pytest.mark.slow
def test_scripts_start_and_name_what_exists(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    for path in SCRIPTS:
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        assert (path.name, missing(module, path)) == (path.name, [])
        source = path.read_text(encoding="utf-8")
        if hasattr(module, "main") and ("ArgumentParser" in source or "options(" in source):
            monkeypatch.setattr(sys, "argv", [str(path), "--help"])
            with pytest.raises(SystemExit, match="0"):
                module.main()
            assert "--help" in capsys.readouterr().out
    assert all(hasattr(owner, name) for _, owner, name in scale.PARTS)
    for phase in killed_ranks.PHASES:
        owner, _, name = phase.function.rpartition(".")
        module = importlib.import_module(phase.module)
        assert hasattr(getattr(module, owner) if owner else module, name)

"""The order of the house is law: an import against it fails the lint."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    environment = {"PYTHONPATH": str(folder / "src"), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def _copy(tmp_path: Path) -> Path:
    shutil.copytree(
        ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_house_as_it_is_keeps_the_order(tmp_path):
    result = _lint(_copy(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr


def test_an_import_against_the_order_is_refused(tmp_path):
    folder = _copy(tmp_path)
    with open(folder / "src/shardwise/geometry/box.py", "a") as file:
        file.write("\nfrom shardwise.plan import Plan\n")
    result = _lint(folder)
    assert result.returncode != 0
    assert "shardwise.geometry.box -> shardwise.plan" in result.stdout


def test_torch_in_the_geometry_is_refused(tmp_path):
    folder = _copy(tmp_path)
    with open(folder / "src/shardwise/geometry/box.py", "a") as file:
        file.write("\nimport torch\n")
    result = _lint(folder)
    assert result.returncode != 0
    assert "shardwise.geometry.box -> torch" in result.stdout

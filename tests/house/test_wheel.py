"""A built wheel works in an environment that has only its dependencies."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _run(*command: object, cwd: Path) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_wheel_in_an_empty_environment_imports_and_shows_its_help(tmp_path):
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    wheel = next(tmp_path.glob("shardwise-*.whl"))
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env/bin/python"
    _run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel, cwd=tmp_path)
    # Its dependencies, torch among them, are gigabytes: lend them, without this checkout's own install.
    packages = next((tmp_path / "env/lib").glob("python*/site-packages"))
    lent = next(Path(p) for p in sys.path if p.endswith("site-packages"))
    for entry in lent.iterdir():
        if "shardwise" not in entry.name and not (packages / entry.name).exists():
            (packages / entry.name).symlink_to(entry)
    found = _run(python, "-c", "import shardwise; print(shardwise.__file__)", cwd=tmp_path)
    assert str(tmp_path) in found
    assert "run" in _run(tmp_path / "env/bin/shardwise", "--help", cwd=tmp_path)
    names = _run(python, "-c", "import shardwise as sw; print(sw.Plan.parse('data=2').ranks)", cwd=tmp_path)
    assert names.strip() == "2"
    presets = "import shardwise as sw; print(sorted(sw.Machine.presets()))"
    assert "lassen" in _run(python, "-c", presets, cwd=tmp_path)

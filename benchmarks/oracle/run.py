"""Run what this folder measures in order: `python benchmarks/oracle/run.py [options of accuracy.py]`.

How long a prediction takes, how long a search takes, then how right predictions are. Each writes a
table of its own name; networks that are in `measured/` already are not measured again.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Beside result.md, in which people wrote what the tables mean.
TABLE = str(HERE / "accuracy.md")


def commands(options: list[str]) -> list[list[str]]:
    """Return the command lines in their order."""
    parts = (
        ["predictions.py", "--write"],
        ["search.py", "--write"],
        ["accuracy.py", "--output", TABLE, *options],
    )
    return [[sys.executable, str(HERE / name), *words] for name, *words in parts]


def main() -> None:
    for words in commands(sys.argv[1:]):
        print("==", *words[1:], flush=True)
        subprocess.run(words, check=True)


if __name__ == "__main__":
    main()

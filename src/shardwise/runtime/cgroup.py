"""Read how much memory the control groups of this process allow it: those of containers and of schedulers."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

# Where the limits of version 2 and of version 1 are, and what they are called there.
_V2, _V1 = ("", "memory.max"), ("memory", "memory.limit_in_bytes")


def memory_limits(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Return the limits in bytes of the groups that this process is in and of all around them."""
    limits: list[int] = []
    with suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            mount, name = _V1 if controllers else _V2
            limits += _limits(root / mount, path.strip("/"), name)
    return limits


def _limits(mount: Path, path: str, name: str) -> list[int]:
    """Return what a group and those around it say; inside a container its own group is the mount itself."""
    group = mount / path
    found = []
    for folder in [group, *group.parents][: len(Path(path).parts) + 1]:
        with suppress(OSError, ValueError):
            # Version 2 says "max" where there is none, version 1 a number larger than any memory.
            found.append(int((folder / name).read_text()))
    return found

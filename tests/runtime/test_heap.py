"""Memory that was freed is used again: large tensors cost no page faults after the first."""

import os
import subprocess
import sys

import pytest

_FAULTS = """
import resource
import torch
import shardwise as sw

sw.init()
# The first few may find a small object in the way, beside which the heap grows once more.
for _ in range(16):
    torch.ones(16 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    torch.ones(16 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**settings: str) -> int:
    """Return how often the system had to bring a page while a process used 64 MiB four times."""
    done = subprocess.run(
        [sys.executable, "-c", _FAULTS],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have other allocators")
def test_large_tensors_find_the_pages_of_earlier_ones():
    assert faults() < 100


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have other allocators")
@pytest.mark.parametrize("setting", ["SHARDWISE_KEEP_MEMORY", "MALLOC_TRIM_THRESHOLD_"])
def test_the_user_decides(setting):
    assert faults(**{setting: "0"}) > 400

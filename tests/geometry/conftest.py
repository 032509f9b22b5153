from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# A busy machine may take its time over a single example.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """The cases are tiny: more threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

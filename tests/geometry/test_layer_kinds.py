"""Every rank's part of a layer, made from its needed box alone, equals the unsplit layer."""

import pytest
from geometry_cases import KINDS, check_block
from hypothesis import given, settings
from hypothesis import strategies as st

SEEDS = st.integers(0, 2**32)
BLOCK = 100


@pytest.mark.parametrize("kind", KINDS)
def test_parts_equal_the_whole_in_one_dimension(kind: str) -> None:
    @settings(max_examples=51, deadline=None)
    @given(SEEDS)
    def blocks(seed: int) -> None:
        check_block(kind, 1, seed, BLOCK)

    blocks()


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_equal_the_whole_in_several_dimensions(kind: str, dims: int) -> None:
    @settings(max_examples=21, deadline=None)
    @given(SEEDS)
    def blocks(seed: int) -> None:
        check_block(kind, dims, seed, 25)

    blocks()


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("dims", "blocks"), [(1, 1000), (2, 200), (3, 200)])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_equal_the_whole_in_a_hundred_thousand_cases(kind: str, dims: int, blocks: int) -> None:
    for seed in range(blocks):
        check_block(kind, dims, 2**33 + seed, BLOCK)

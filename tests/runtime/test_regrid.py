"""A regrid equals slicing the global tensor, and its adjoint is its transpose, between real ranks."""

from __future__ import annotations

import pytest
import regrid_cases
import regrid_groups
import torch

from ranks import run_ranks

SIZES = (2, 3, 4, 6)


@pytest.mark.parametrize("transport", ["gloo", "mpi4py"])
@pytest.mark.parametrize("size", SIZES)
def test_random_regrids_equal_slices_and_their_adjoints_are_transposes(size, transport):
    worst = run_ranks(
        regrid_cases.check_block, size=size, transport=transport, args=(size, 40 if size < 6 else 12)
    )
    assert max(worst) < 1e-12


@pytest.mark.full
@pytest.mark.parametrize("transport", ["gloo", "mpi4py"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", range(20))
def test_many_random_regrids(size, transport, seed):
    worst = run_ranks(regrid_cases.check_block, size=size, transport=transport, args=(100 + seed, 200))
    assert max(worst) < 1e-12


@pytest.mark.parametrize("transport", ["gloo", "mpi4py"])
def test_users_regrid_is_differentiable(transport):
    for y, grad, mine in run_ranks(regrid_cases.check_user_call, size=2, transport=transport):
        assert torch.equal(y, torch.arange(60, dtype=torch.float64).reshape(1, 2, 6, 5))
        assert torch.equal(grad, 2 * mine)


@pytest.mark.parametrize("transport", ["gloo", "mpi4py"])
def test_users_regrid_is_differentiable_twice(transport):
    for found, expected in run_ranks(regrid_cases.check_second_gradient, size=2, transport=transport):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("transport", ["gloo", "mpi4py"])
def test_a_users_regrid_leaves_a_gradient_that_others_share_alone(transport):
    assert run_ranks(regrid_cases.check_shared_gradient, size=3, transport=transport) == [(True, True)] * 3


@pytest.mark.parametrize("transport", ["gloo", "mpi4py"])
@pytest.mark.parametrize("check", [regrid_groups.between_groups, regrid_groups.inside_sub_groups])
def test_random_regrids_between_and_inside_groups_are_exact_for_every_dtype(check, transport):
    assert run_ranks(check, size=4, transport=transport, args=(7, 15)) == [[]] * 4

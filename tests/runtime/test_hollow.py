"""Stand-ins without memory keep what autograd reads of a leaf: its shape and its order in memory."""

from __future__ import annotations

import pytest
import torch

from shardwise.runtime.hollow import hollow


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_gradients_have_the_order_of_the_tensor_that_a_hollow_leaf_stands_for(order):
    tensor = torch.randn(2, 3, 4, 5).contiguous(memory_format=order)
    leaf = tensor.detach().requires_grad_()
    result = (leaf.view_as(leaf) * 2.0).square()
    leaf.data = hollow(tensor)
    assert leaf.untyped_storage().nbytes() <= tensor.element_size()
    result.backward(torch.ones_like(tensor))
    assert leaf.grad.is_contiguous(memory_format=order)
    torch.testing.assert_close(leaf.grad, 8.0 * tensor)


def test_a_view_with_gaps_is_stood_for_by_next_to_nothing():
    tile = torch.randn(2, 3, 6, 5)[:, :, 1:5, 1:4]
    assert not tile.is_contiguous()
    with torch.profiler.profile(profile_memory=True) as profile:
        stands = hollow(tile)
    assert stands.shape == tile.shape
    assert stands.untyped_storage().nbytes() == tile.element_size()
    assert sum(max(0, event.self_cpu_memory_usage) for event in profile.events()) < tile.nbytes

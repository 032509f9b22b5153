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

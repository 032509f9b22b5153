"""Keras's paddings and kernels, held against Keras itself for random sizes."""

from __future__ import annotations

import keras
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from keras_models import double_precision

import shardwise as sw
from shardwise.graph import interpret
from shardwise.graph.keras import wrap
from shardwise.graph.keras.views import AS_IS, DENSE, conv_view, depthwise_view


@given(st.data())
def test_views_share_memory_and_can_be_inverted(data):
    rank = data.draw(st.integers(1, 3))
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=rank + 2, max_size=rank + 2)))
    view = data.draw(st.sampled_from([AS_IS, conv_view(rank), depthwise_view(rank)]))
    tensor = torch.randn(shape)
    seen = view.apply(tensor)
    assert seen.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert torch.equal(view.invert(seen, shape), tensor)
    assert torch.equal(view.invert(seen.contiguous(), shape), tensor)


def test_dense_view_is_the_transpose():
    tensor = torch.randn(2, 3)
    assert torch.equal(DENSE.apply(tensor), tensor.T)


def agrees(layer, shape):
    with double_precision():
        x = start = keras.Input(shape[1:])
        model = keras.Model(start, layer(x))
        data = torch.randn(shape, dtype=torch.float64)
        graph = sw.capture(model, data, check=False)
        found = interpret.run(graph, [data], interpret.state_of(wrap(model)))
        wanted = model(data)
    assert found.shape == wanted.shape
    return bool(torch.allclose(found, wanted, rtol=1e-10, atol=1e-10))


sizes, paddings = st.integers(5, 11), st.sampled_from(["same", "valid"])


@settings(max_examples=15, deadline=None)
@given(
    sizes, sizes, st.integers(1, 4), st.integers(1, 3), st.integers(1, 2), st.sampled_from(["same", "valid"])
)
def test_convolutions_pad_as_keras_does(height, width, kernel, stride, dilation, padding):
    if stride > 1 and dilation > 1:
        dilation = 1  # Keras refuses both at once
    assume(padding == "same" or dilation * (kernel - 1) < height)  # and kernels larger than the image
    with double_precision():
        layer = keras.layers.Conv2D(
            2, (kernel, 2), strides=stride, dilation_rate=dilation, padding=padding, dtype="float64"
        )
    assert agrees(layer, (1, height, width, 2))


@settings(max_examples=15, deadline=None)
@given(sizes, st.integers(1, 5), st.integers(1, 3), st.sampled_from(["same", "valid"]), st.booleans())
def test_transposed_convolutions_crop_as_keras_does(size, kernel, stride, padding, biased):
    with double_precision():
        layer = keras.layers.Conv2DTranspose(
            2, kernel, strides=stride, padding=padding, use_bias=biased, dtype="float64"
        )
    assert agrees(layer, (1, size, size + 1, 2))


@settings(max_examples=15, deadline=None)
@given(sizes, st.integers(1, 4), st.integers(1, 3), st.sampled_from(["same", "valid"]), st.booleans())
def test_poolings_pad_as_keras_does(size, kernel, stride, padding, average):
    kind = keras.layers.AveragePooling2D if average else keras.layers.MaxPooling2D
    with double_precision():
        layer = kind(kernel, stride, padding=padding, dtype="float64")
    assert agrees(layer, (1, size, size + 2, 2))

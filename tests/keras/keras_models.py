"""Keras models for tests, and double precision that Keras on torch really keeps."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import torch
from keras import layers
from keras.src.backend.common import dtypes


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Let Keras compute everything in float64; stock Keras on torch multiplies matrices in float32."""
    before, narrowed = keras.config.floatx(), dtypes.BIT64_TO_BIT32_DTYPE["float64"]
    policy = keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    try:
        yield
    finally:
        keras.config.set_floatx(before)
        keras.config.set_dtype_policy(policy)
        dtypes.BIT64_TO_BIT32_DTYPE["float64"] = narrowed


def residual(shape: tuple[int, ...] = (20, 18, 3), *, dropout: float = 0.0, penalty: float = 0.0) -> Any:
    """Convolutions, batch norm, a skip connection, pooling, a dense end."""
    regularizer = keras.regularizers.L2(penalty) if penalty else None
    x = start = keras.Input(shape)
    x = layers.Conv2D(8, 3, strides=2, padding="same", use_bias=False, kernel_regularizer=regularizer)(x)
    x = layers.BatchNormalization()(x)
    x = skip = layers.Activation("relu")(x)
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    x = layers.Conv2D(8, 3, padding="same")(x)
    x = layers.Add()([x, skip])
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    x = layers.SeparableConv2D(12, 3, padding="same", activation="relu")(x)
    x = layers.BatchNormalization()(x)
    if dropout:
        x = layers.Dropout(dropout)(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(start, layers.Dense(5, kernel_regularizer=regularizer)(x))


def everything() -> Any:
    """Every layer that has a rule for images."""
    x = start = keras.Input((17, 19, 3))
    x = layers.Rescaling(0.5, 0.1)(x)
    x = layers.Normalization(mean=[0.1, 0.2, 0.3], variance=[1.0, 2.0, 0.5])(x)
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation="gelu")(x)
    y = layers.DepthwiseConv2D((3, 2), padding="same", depth_multiplier=2)(x)
    y = layers.Conv2D(8, 1, activation="hard_sigmoid")(y)
    z = layers.Conv2D(8, 3, dilation_rate=2, padding="same", groups=2)(x)
    x = layers.Average()([layers.Maximum()([x, y]), z])
    x = layers.PReLU(shared_axes=[1, 2])(x)
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    x = layers.AveragePooling2D(2, 2, padding="same")(x)
    x = layers.Conv2DTranspose(6, 3, strides=2, padding="same", activation="elu")(x)
    x = layers.Conv2DTranspose(6, 4, strides=2, padding="valid")(x)
    x = layers.UpSampling2D((1, 2))(x)
    x = layers.UpSampling2D(2, interpolation="bilinear")(x)
    x = layers.ZeroPadding2D(((1, 2), (0, 1)))(x)
    x = layers.Cropping2D(((1, 0), (0, 1)))(x)
    x = layers.GroupNormalization(3)(x)
    gate = layers.Reshape((1, 1, 6))(layers.GlobalMaxPooling2D()(x))
    x = layers.Multiply()([x, layers.Conv2D(6, 1, activation="sigmoid")(gate)])
    x = layers.LayerNormalization()(x)
    x = layers.Dense(4, activation="tanh")(x)
    x = layers.SpatialDropout2D(0.2)(layers.LeakyReLU()(x))
    x = layers.Subtract()([layers.ReLU(6.0)(x), layers.Permute((2, 1, 3))(layers.Permute((2, 1, 3))(x))])
    x = layers.Concatenate()([x, keras.ops.tanh(x) * 2.0 + 1.0])
    x = layers.AveragePooling2D(3)(x)
    return keras.Model(start, layers.Dense(5, activation="softmax")(layers.Flatten()(x)))


def channels_first() -> Any:
    """The channels where torch has them."""
    x = start = keras.Input((3, 14, 12))
    x = layers.Conv2D(6, 3, padding="same", data_format="channels_first")(x)
    x = layers.BatchNormalization(axis=1)(x)
    x = layers.MaxPooling2D(2, data_format="channels_first")(x)
    return keras.Model(start, layers.Dense(3)(layers.Flatten(data_format="channels_first")(x)))


def volume() -> Any:
    """Three spatial dimensions."""
    x = start = keras.Input((8, 9, 7, 2))
    x = layers.Conv3D(4, 3, strides=2, padding="same", activation="relu")(x)
    x = layers.BatchNormalization()(x)
    x = layers.Conv3DTranspose(3, 2, strides=2)(x)
    return keras.Model(start, layers.Dense(2)(layers.GlobalAveragePooling3D()(x)))


def sequence() -> Any:
    """One spatial dimension, a causal convolution, and a recurrent layer that runs whole."""
    x = start = keras.Input((16, 4))
    x = layers.Conv1D(6, 3, padding="causal", activation="silu")(x)
    x = layers.AveragePooling1D(2)(x)
    return keras.Model(start, layers.Dense(3)(layers.LSTM(5)(x)))


def sequential() -> Any:
    """A sequential model with another inside, and a model inside of that which is called with no mask."""
    start = keras.Input((10, 10, 4))
    x = layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same", use_bias=False)(start))
    innermost = keras.Model(start, layers.Activation("relu")(x))
    inner = keras.Model(start, layers.MaxPooling2D(2)(innermost(start, mask=None)))
    ending = keras.Sequential([layers.GlobalAveragePooling2D(), layers.Dense(3)])
    return keras.Sequential([keras.Input((10, 10, 3)), layers.Conv2D(4, 1), inner, ending])


def several() -> Any:
    """Two inputs by keys that are not their names, two outputs by name, a shared layer, a nested model."""
    left, right = keras.Input((8, 8, 3), name="z"), keras.Input((8, 8, 3), name="a")
    shared = layers.Conv2D(4, 3, padding="same", activation="relu")
    inner_start = keras.Input((8, 8, 4))
    inner = keras.Sequential([inner_start, layers.Conv2D(4, 3), layers.BatchNormalization()], name="inner")
    x = layers.Add()([inner(shared(left)), inner(shared(right))])
    pooled = layers.GlobalAveragePooling2D()(x)
    outputs = {"kind": layers.Dense(3, name="kind")(pooled), "size": layers.Dense(1, name="size")(pooled)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras would rather have the names
        return keras.Model({"left": left, "right": right}, outputs)


@keras.saving.register_keras_serializable("shardwise_tests")
class Scaled(layers.Layer):
    """A layer of the user's own: a symbolic call shows what it does."""

    def build(self, shape: Any) -> None:
        self.gamma = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x: Any) -> Any:
        return x * self.gamma + keras.ops.relu(x)


class Sorted(layers.Layer):
    """A layer that no rule knows: it runs whole."""

    def call(self, x: Any) -> Any:
        return keras.ops.sort(x, axis=1)


class Block(layers.Layer):
    """A block of the user's own that asks nobody whether it is trained; Keras tells the layers inside."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.conv = layers.Conv2D(4, 3, padding="same", use_bias=False)
        self.norm = layers.BatchNormalization(momentum=0.8)
        self.drop = layers.Dropout(rate)

    def build(self, shape: Any) -> None:
        self.conv.build(shape)
        self.norm.build((*shape[:-1], 4))

    def call(self, x: Any) -> Any:
        return self.drop(keras.ops.relu(self.norm(self.conv(x))))


class Closed(Block):
    """The same, but its code depends on its data, so that it runs whole."""

    def call(self, x: Any) -> Any:
        return super().call(x) if float(keras.ops.max(x)) > -1e9 else x


def blocks(rate: float = 0.0) -> Any:
    """Layers of the user's own with batch norm and dropout inside: one is entered, one runs whole."""
    x = start = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, padding="same")(Block(rate)(x))
    return keras.Model(start, layers.Dense(3)(layers.GlobalAveragePooling2D()(Closed(rate)(x))))


def own_layers() -> Any:
    """Layers of the user's own."""
    x = start = keras.Input((8, 8, 3))
    x = Scaled()(layers.Conv2D(4, 3)(x))
    return keras.Model(start, layers.Dense(3)(layers.Flatten()(Sorted()(x))))


class Subclassed(keras.Model):
    """A model without a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = layers.Conv2D(4, 3, padding="same")
        self.norm = layers.BatchNormalization()
        self.head = layers.Dense(3)

    def call(self, x: Any, training: bool = False) -> Any:
        x = keras.ops.relu(self.norm(self.conv(x), training=training))
        return self.head(keras.ops.mean(x, axis=(1, 2)))


def subclassed() -> Any:
    """A subclassed model, built by a call."""
    model = Subclassed()
    model(keras.Input((8, 8, 3)))
    return model


class Told(keras.Model):
    """Tell a model inside that it is not trained, which Keras also takes for what is called after it."""

    def __init__(self) -> None:
        super().__init__()
        start = keras.Input((8, 8, 3))
        x = layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same")(start))
        self.base = keras.Model(start, layers.Dropout(0.5)(x))
        self.after, self.own = layers.BatchNormalization(), layers.BatchNormalization()
        self.head = layers.Dense(3)

    def call(self, x: Any) -> Any:
        x = keras.ops.relu(self.after(self.base(x, training=False)))
        return self.head(keras.ops.mean(self.own(x, training=True), axis=(1, 2)))


def told() -> Any:
    """A subclassed model that tells the models inside how to behave."""
    model = Told()
    model(keras.Input((8, 8, 3)))
    return model


def masked() -> Any:
    """Masks: made, joined, read by a recurrent layer and a mean, and carried into a model inside."""
    inner_start = keras.Input((6, 5))
    y = layers.BatchNormalization()(layers.Dense(4, activation="tanh")(inner_start))
    inner = keras.Model(inner_start, layers.LSTM(3, return_sequences=True)(y), name="inner")
    x = start = keras.Input((6, 4))
    x = layers.Masking(0.5)(x)
    x = layers.Add()([layers.Dense(5)(x), layers.Dense(5, activation="relu")(x)])
    x = layers.LSTM(4, return_sequences=True)(inner(layers.LayerNormalization()(x)))
    return keras.Model(start, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


class ByName(keras.Model):
    """A model without a graph that takes a dict and gives one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = layers.Conv2D(4, 3, padding="same", activation="relu")
        self.first, self.second = layers.Dense(3), layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        x = self.conv(inputs["right"]) - self.conv(inputs["left"])
        x = keras.ops.mean(x, axis=(1, 2))
        return {"first": self.first(x), "second": self.second(x)}


def by_name() -> Any:
    """A subclassed model with inputs and outputs by name, and a layer that is called twice."""
    model = ByName()
    model({"left": keras.Input((8, 8, 3)), "right": keras.Input((8, 8, 3))})
    return model


class Unpredictable(keras.Model):
    """A model whose path depends on its data: nothing can be seen of it without."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = layers.Conv2D(4, 3, padding="same")
        self.norm = layers.LayerNormalization()
        self.head = layers.Dense(3)

    def call(self, x: Any) -> Any:
        x = self.norm(self.conv(x))
        if keras.ops.max(x) > -1e9:
            x = keras.ops.relu(x)
        return self.head(keras.ops.mean(x, axis=(1, 2)))


def unpredictable() -> Any:
    """A model that runs whole."""
    model = Unpredictable()
    model(np.zeros((1, 8, 8, 3)))
    return model


def branches() -> Any:
    """A layer that turns out to have no rule while it is written down, and others on the same input."""
    x = start = keras.Input((8, 8, 3))
    y = layers.Conv2D(4, 3, padding="same", activation=lambda t: keras.ops.cumsum(t, axis=1))(x)
    z = layers.Conv2D(4, 3, padding="same", activation="relu")(x)
    return keras.Model(start, layers.Dense(3)(layers.GlobalAveragePooling2D()(layers.Add()([y, z]))))


class OnTensors(keras.Model):
    """A model whose code calls torch, which knows nothing of Keras's symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers.Conv2D(4, 3, padding="same"), layers.Conv2D(4, 3, strides=2)
        self.norm, self.head = layers.LayerNormalization(), layers.Dense(3)

    def call(self, x: Any) -> Any:
        x = self.norm(self.second(torch.relu(self.first(x))))
        return self.head(x.permute(0, 3, 1, 2).mean((2, 3)))


def on_tensors() -> Any:
    """A subclassed model that only torch.export can enter."""
    model = OnTensors()
    model(np.zeros((1, 8, 8, 3)))
    return model


def mobile() -> Any:
    """One of Keras's own networks; an epsilon of 1 keeps batch norms over few numbers from being chaotic."""
    model = keras.applications.MobileNetV3Small(
        weights=None, input_shape=(32, 32, 3), classes=5, dropout_rate=0.0, classifier_activation=None
    )
    for layer in model._flatten_layers():
        if isinstance(layer, layers.BatchNormalization):
            layer.epsilon = 1.0
    return model


MODELS: dict[str, tuple[Callable[[], Any], tuple[tuple[int, ...], ...]]] = {
    "residual": (residual, ((4, 20, 18, 3),)),
    "everything": (everything, ((3, 17, 19, 3),)),
    "channels_first": (channels_first, ((3, 3, 14, 12),)),
    "volume": (volume, ((2, 8, 9, 7, 2),)),
    "sequence": (sequence, ((2, 16, 4),)),
    "sequential": (sequential, ((4, 10, 10, 3),)),
    "several": (several, ((4, 8, 8, 3), (4, 8, 8, 3))),
    "own_layers": (own_layers, ((2, 8, 8, 3),)),
    "subclassed": (subclassed, ((4, 8, 8, 3),)),
    "told": (told, ((4, 8, 8, 3),)),
    "blocks": (blocks, ((4, 8, 8, 3),)),
    "masked": (masked, ((3, 6, 4),)),
    "by_name": (by_name, ((3, 8, 8, 3), (3, 8, 8, 3))),
    "branches": (branches, ((2, 8, 8, 3),)),
    "on_tensors": (on_tensors, ((3, 8, 8, 3),)),
    "unpredictable": (unpredictable, ((3, 8, 8, 3),)),
    "mobile": (mobile, ((2, 32, 32, 3),)),
}


def random_inputs(shapes: tuple[tuple[int, ...], ...], dtype: str = "float64") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    found = [torch.randn(shape, generator=generator, dtype=getattr(torch, dtype)) for shape in shapes]
    for tensor in found:
        if tensor.ndim == 3:
            tensor[1:, -2:] = 0.5  # what the masked model leaves out
    return found


def as_called(model: Any, inputs: list[torch.Tensor]) -> Any:
    """Return inputs as a model is called with them: by name, or in order."""
    return dict(zip(("left", "right"), inputs, strict=True)) if isinstance(model, ByName) else tuple(inputs)

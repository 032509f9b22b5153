"""Where: boxes, layouts and the index arithmetic of every layer kind. Pure integers, no torch."""

from shardwise.geometry.axes import AxisMap, Same, Window
from shardwise.geometry.box import Box, Range
from shardwise.geometry.layout import (
    Layout,
    batch,
    channel,
    even_bounds,
    horizontal,
    spans,
    split,
    square,
    tiles,
    vertical,
    whole,
)
from shardwise.geometry.messages import Message, messages

__all__ = [
    "AxisMap",
    "Box",
    "Layout",
    "Message",
    "Range",
    "Same",
    "Window",
    "batch",
    "channel",
    "even_bounds",
    "horizontal",
    "messages",
    "spans",
    "split",
    "square",
    "tiles",
    "vertical",
    "whole",
]

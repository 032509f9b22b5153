"""Where: boxes, layouts and the index arithmetic of every layer kind. Pure integers, no torch."""

from shardwise.geometry.access import Access, Axis, needed, opaque, reach, same
from shardwise.geometry.adaptive import Adaptive
from shardwise.geometry.axes import AxisMap, Same, Window
from shardwise.geometry.box import Box, Range
from shardwise.geometry.chain import Held, Node, held, owned
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
from shardwise.geometry.local import LocalWindow, local, local_box
from shardwise.geometry.messages import Message, messages
from shardwise.geometry.padding import Padded, Segment, filling, sources
from shardwise.geometry.parts import Groups, Part, Scaled
from shardwise.geometry.pieces import Piece, pieces
from shardwise.geometry.price import halo_bytes, redundant_fraction, work
from shardwise.geometry.resize import Resize
from shardwise.geometry.transposed import Transposed

__all__ = [
    "Access",
    "Adaptive",
    "Axis",
    "AxisMap",
    "Box",
    "Groups",
    "Held",
    "Layout",
    "LocalWindow",
    "Message",
    "Node",
    "Padded",
    "Part",
    "Piece",
    "Range",
    "Resize",
    "Same",
    "Scaled",
    "Segment",
    "Transposed",
    "Window",
    "batch",
    "channel",
    "even_bounds",
    "filling",
    "halo_bytes",
    "held",
    "horizontal",
    "local",
    "local_box",
    "messages",
    "needed",
    "opaque",
    "owned",
    "pieces",
    "reach",
    "redundant_fraction",
    "same",
    "sources",
    "spans",
    "split",
    "square",
    "tiles",
    "vertical",
    "whole",
    "work",
]

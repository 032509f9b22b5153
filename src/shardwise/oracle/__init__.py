"""How long: time, memory and bottlenecks of a program on a machine."""

from shardwise.oracle.choose import Choice, choose
from shardwise.oracle.events import Event, Kind, Span, simulate
from shardwise.oracle.kernels import Direction, Estimate, KernelTimes, Roofline, Task
from shardwise.oracle.predict import Oracle, predict
from shardwise.oracle.prediction import Prediction
from shardwise.oracle.price import price_stage
from shardwise.oracle.stage_price import StagePrice

__all__ = [
    "Choice",
    "Direction",
    "Estimate",
    "Event",
    "KernelTimes",
    "Kind",
    "Oracle",
    "Prediction",
    "Roofline",
    "Span",
    "StagePrice",
    "Task",
    "choose",
    "predict",
    "price_stage",
    "simulate",
]

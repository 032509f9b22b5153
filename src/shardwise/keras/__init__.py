"""Train Keras models split over ranks: change one line, keep stock Keras.

import shardwise as sw
sw.keras.distribute(model, plan="stages=2 spatial=2x1")
model.fit(x, y, ...)                       # as ever, on every rank
"""

from shardwise.keras.distribute import Distribution, distribute, fit, undistribute
from shardwise.keras.strategy import Strategy, plan_of
from shardwise.keras.weightless import gather, weightless

__all__ = ["Distribution", "Strategy", "distribute", "fit", "gather", "plan_of", "undistribute", "weightless"]

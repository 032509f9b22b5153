"""Go: train a model under a plan."""

from __future__ import annotations

from shardwise.training.trainer import Trainer

__all__ = ["Trainer"]

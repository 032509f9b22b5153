"""Which plan: all of them, bounded, simulated and ranked."""

from shardwise.oracle.search.ranking import Counts, Entry, NoPlanError, Ranking, Refused
from shardwise.oracle.search.search import search

__all__ = ["Counts", "Entry", "NoPlanError", "Ranking", "Refused", "search"]

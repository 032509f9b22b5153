"""Count what becomes of the plans of a search, and remember why some were refused."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from shardwise.oracle.search.ranking import Counts, Refused

# How many refused plans are listed for each kind of reason; all are counted.
_SHOWN = 50


@dataclass
class Tally:
    """Every plan is enumerated once, and ends as refused, pruned or simulated."""

    enumerated: int = 0
    refused: int = 0
    simulated: int = 0
    reasons: list[Refused] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

    def refuse(self, plan: object, reason: str, count: int = 1) -> bool:
        """Note a refusal; tell whether more of this kind will be listed."""
        self.refused += count
        # One common reason must not crowd out the others.
        kind = re.sub(r"[\d.e+-]+", "", reason)
        self.kinds[kind] += 1
        if self.kinds[kind] <= _SHOWN:
            self.reasons.append(Refused(str(plan), reason, count))
        return self.kinds[kind] < _SHOWN

    @property
    def counts(self) -> Counts:
        """Return the numbers; what was neither refused nor simulated was pruned."""
        pruned = self.enumerated - self.refused - self.simulated
        return Counts(self.enumerated, self.refused, pruned, self.simulated)

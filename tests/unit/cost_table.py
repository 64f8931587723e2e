"""What steps of an 8B model cost, as tests of the choice of draft tokens take it."""

from __future__ import annotations

from nwor.config import DraftBounds
from nwor.draft_costs import StepCosts

BOUNDS = DraftBounds(0, 8)
CHAINS = BOUNDS.candidates
PASS = 0.2e-3
#: Milliseconds of steps of an 8B model on an H200, by requests, with 0, 1, 2, 3, 4, 6 and 8 draft tokens.
TABLE = {
    1: (5.26, 5.26, 5.54, 5.83, 6.15, 6.73, 7.36),
    16: (5.64, 5.64, 6.05, 6.29, 6.76, 7.61, 8.37),
    32: (6.01, 6.01, 6.60, 7.04, 7.69, 9.39, 11.2),
    64: (6.84, 6.84, 8.01, 8.84, 10.7, 15.2, 17.5),
    128: (8.22, 8.88, 11.8, 13.6, 17.1, 24.1, 30.0),
}
COSTS = StepCosts(
    tuple(TABLE),
    CHAINS,
    tuple(tuple(value / 1e3 for value in row) for row in TABLE.values()),
    (16, 64, 512),
    (0.0066, 0.0069, 0.0125),
    (PASS,) * len(TABLE),
)

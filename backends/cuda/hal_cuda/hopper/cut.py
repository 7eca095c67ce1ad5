"""How rows are cut into parts that are walked side by side, where few rows leave a card idle.

What a part does to the state before it is linear: S F + B. A first phase walks the first part from
the row's own state, and every part between from zero (B) and from one (F); then the states at the
borders are made, and a second phase walks the parts between and the last one. The two ends are
`waves` times as long as a part between, since the first phase has two walks of each of those.
"""

from dataclasses import dataclass
from typing import Final

RESIDENT: Final = 3
"""Blocks of a multiprocessor that prepare chunks, where a head decays as one."""

CHANNELS_RESIDENT: Final = 2
"""The same where every channel decays by itself."""

SLICES: Final = 8
"""Blocks of a head that make the states between parts."""

_STEP_US: Final = 1.7
"""Of a walk over a chunk, as it was measured on an H200."""

_PHASE_US: Final = 5.0
"""What the second phase and the states at the borders cost beside the walks, and each border."""

_BORDER_US: Final = 2.0
_MOST_WAVES: Final = 4
_MOST_PARTS: Final = 32


@dataclass(frozen=True, slots=True)
class Cut:
    """The parts of a row: 1 leaves it whole."""

    parts: int = 1
    waves: int = 1

    def longest(self, chunks: int) -> int:
        """The chunks of an end of a row of `chunks`."""
        if self.parts == 1:
            return chunks
        return -(-chunks // (2 * self.waves + self.parts - 2)) * self.waves

    def microseconds(self, chunks: int) -> float:
        """About what all walks take."""
        if self.parts == 1:
            return chunks * _STEP_US
        borders = _PHASE_US + _BORDER_US * (self.parts - 2)
        return 2 * self.longest(chunks) * _STEP_US + borders


def cut_of(chunks: int, blocks: int, processors: int) -> Cut:
    """The fastest cut of rows of about `chunks`, whose walks take `blocks` of the processors."""
    free, cuts = max(processors - blocks, 0), [Cut()]
    for waves in range(1, _MOST_WAVES + 1):
        most = min(2 + waves * free // (2 * blocks), _MOST_PARTS)
        cuts += [Cut(parts, waves) for parts in range(3, most + 1)]
    return min(cuts, key=lambda cut: cut.microseconds(chunks))

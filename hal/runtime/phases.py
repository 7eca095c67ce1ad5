"""Whether a layer is called by phase or has one call for any mixture of rows."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from hal.runtime.batch import Mode


class Phases(StrEnum):
    """How generic code may call a layer; every bound layer says it in `phases`.

    Both kinds have the call that serves every mode. A `SPLIT` layer may be called by phase too; a
    `UNIFIED` one takes prefill and decode rows together, so that it has no call of one phase.
    """

    SPLIT = "split"
    UNIFIED = "unified"


DECODES: Final = frozenset({Mode.DECODE, Mode.IDLE})
"""Modes of a call for decode rows."""

EXTENDS: Final = frozenset(Mode) - {Mode.DECODE}
"""Modes of a call for rows of several tokens; a verify step is one of them."""


def not_by_phase(called: str, use: str) -> NotImplementedError:
    """The error of a phase's call on a layer that has one call for all rows."""
    return NotImplementedError(
        f"{called}: a scan takes prefill and decode rows in one call; use {use}"
    )

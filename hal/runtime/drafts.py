"""Drafts without a second model: what followed the last time that a request's end came up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hal.runtime.request import Request

SIZES: Final = (4, 3, 2)
"""Lengths of the ends that are looked up, the longest first; one token alone says too little."""


@dataclass(slots=True)
class NGrams:
    """One request's tokens, and where each of its short runs of tokens was last followed by one."""

    tokens: list[int] = field(default_factory=list)
    _after: dict[tuple[int, ...], int] = field(default_factory=dict)

    def push(self, token: int) -> None:
        """Append a token, which is the successor of every run that ended before it."""
        here = len(self.tokens)
        for size in SIZES:
            if size <= here:
                self._after[tuple(self.tokens[here - size :])] = here
        self.tokens.append(token)

    def propose(self, count: int) -> tuple[int, ...]:
        """What followed the longest end that came up before, at most `count` tokens.

        Where that runs into the present end, it goes on with the drafts themselves.
        """
        text = self.tokens
        runs = (tuple(text[-size:]) for size in SIZES if size <= len(text))
        begin = next((self._after[run] for run in runs if run in self._after), None)
        if begin is None:
            return ()
        known = len(text)
        drafts: list[int] = []
        for at in range(begin, begin + count):
            drafts.append(text[at] if at < known else drafts[at - known])
        return tuple(drafts)


@dataclass(slots=True)
class Drafter:
    """Drafts for requests, by id: at most `width` - 1, so that a row verifies `width` tokens."""

    width: int
    _known: dict[int, NGrams] = field(default_factory=dict)

    def propose(self, request: Request, most: int) -> tuple[int, ...]:
        """At most `most` drafts behind a request's last token."""
        grams = self._known.setdefault(request.id, NGrams())
        known = len(grams.tokens)
        for token in request.tokens_from(known):
            grams.push(token)
        return grams.propose(max(0, min(most, self.width - 1)))

    def forget(self, request: Request) -> None:
        """Drop what is known of a request that has ended."""
        self._known.pop(request.id, None)


def agreed(drafts: tuple[int, ...], chosen: tuple[int, ...], stop: frozenset[int]) -> int:
    """How many of the model's own choices hold: one, and one more for each draft that it chose.

    `chosen[i]` follows draft i - 1, and `chosen[0]` the token before all drafts. Behind a stop
    token nothing holds.
    """
    kept = 1
    for draft, choice in zip(drafts, chosen, strict=False):
        if draft != choice or choice in stop:
            break
        kept += 1
    return kept

"""A request as the scheduler sees it: its tokens, how far they were fed, and its slot."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from hal.errors import HalError

if TYPE_CHECKING:
    from hal.runtime.pool import Slot


class FinishReason(StrEnum):
    """Why a request ended."""

    LENGTH = "length"
    EOS = "eos"
    CANCELLED = "cancelled"


class RequestError(HalError, ValueError):
    """A request that could never be served; the text has both numbers."""


@dataclass(slots=True)
class Counts:
    """What a request was spared: prompt tokens that a cached state had, and drafts that held."""

    saved: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """Prompt and output of one request.

    `fed` counts the tokens whose effect is in the slot; the tokens after them are pending. While
    the prompt is fed there may be many pending tokens, afterwards there is just the last output.
    `source` is the cached state that the first step reads.
    """

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    stop: frozenset[int] = frozenset()
    output: list[int] = field(default_factory=list)
    fed: int = 0
    slot: Slot | None = None
    source: Slot | None = None
    counts: Counts = field(default_factory=Counts)
    reason: FinishReason | None = None

    @property
    def pending(self) -> int:
        """How many known tokens were not fed yet."""
        return len(self.prompt) + len(self.output) - self.fed

    @property
    def src(self) -> Slot | None:
        """The slot that the next step reads; None for a start from nothing."""
        if self.source is not None:
            return self.source
        return self.slot if self.fed else None

    @property
    def decoding(self) -> bool:
        """Whether the whole prompt was fed."""
        return bool(self.output)

    def next_tokens(self, count: int) -> list[int]:
        """The first `count` pending tokens; copies no more of the prompt than it hands out."""
        past = self.fed - len(self.prompt)
        if past >= 0:
            return self.output[past : past + count]
        taken = list(self.prompt[self.fed : self.fed + count])
        return taken + self.output[: count - len(taken)]

    def first(self, count: int) -> tuple[int, ...]:
        """The first `count` tokens of prompt and output."""
        past = count - len(self.prompt)
        return self.prompt[:count] if past <= 0 else (*self.prompt, *self.output[:past])

    def tokens_from(self, count: int) -> list[int]:
        """All tokens of prompt and output but the first `count`."""
        past = count - len(self.prompt)
        return self.output[past:] if past >= 0 else [*self.prompt[count:], *self.output]

    def room(self, max_len: int) -> int:
        """How many more tokens either length bound leaves."""
        total = len(self.prompt) + len(self.output)
        return min(self.max_new_tokens - len(self.output), max_len - total)

    def accept(self, token: int, max_len: int) -> None:
        """Append a sampled token, and finish at a stop token or at either length bound."""
        self.output.append(token)
        if token in self.stop:
            self.reason = FinishReason.EOS
        elif self.room(max_len) < 1:
            self.reason = FinishReason.LENGTH


def check_request(prompt: int, max_new_tokens: int, max_len: int) -> None:
    """Refuse a prompt of a length that could never be served, and a request for no token."""
    if prompt < 1:
        raise RequestError("the prompt has no tokens, expected at least 1")
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise RequestError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
    if prompt >= max_len:
        raise RequestError(
            f"the prompt has {prompt} tokens, at most {max_len - 1} fit: "
            f"a sequence holds {max_len} with the first new one; shorten the prompt"
        )

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


@dataclass(slots=True, eq=False)
class Request:
    """Prompt and output of one request.

    `fed` counts the tokens whose effect is in the slot; the tokens after them are pending. While
    the prompt is fed there may be many pending tokens, afterwards there is just the last output.
    """

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    stop: frozenset[int] = frozenset()
    output: list[int] = field(default_factory=list)
    fed: int = 0
    slot: Slot | None = None
    reason: FinishReason | None = None

    @property
    def pending(self) -> int:
        """How many known tokens were not fed yet."""
        return len(self.prompt) + len(self.output) - self.fed

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

    def accept(self, token: int, max_len: int) -> None:
        """Append a sampled token, and finish at a stop token or at either length bound."""
        self.output.append(token)
        total = len(self.prompt) + len(self.output)
        if token in self.stop:
            self.reason = FinishReason.EOS
        elif len(self.output) >= self.max_new_tokens or total >= max_len:
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

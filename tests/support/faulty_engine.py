"""An engine in plain Python with a conv window and a recurrence, right or wrong in known ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log, nan, sin
from typing import Final

from hal.integrations.verify.record import Answer, Facts, Step

WINDOW: Final = 4
VOCAB: Final = 40
TOP: Final = 20

FAULTS: Final[Mapping[str, frozenset[str]]] = {
    "decode loses the window": frozenset({"decode"}),
    "decode loses the recurrence": frozenset({"decode"}),
    "a short prompt leaves its window shifted": frozenset({"decode"}),
    "a prompt of exactly one chunk loses the recurrence": frozenset({"decode"}),
    "rows leak": frozenset({"batch", "resume"}),
    "rows that end leave their state to the next": frozenset({"batch"}),
    "a chunk begins without the window": frozenset({"resume"}),
    "a chunk begins without the recurrence": frozenset({"resume"}),
    "a cached prefix is a token old": frozenset({"resume"}),
    "a cached prefix lacks the window": frozenset({"resume"}),
    "decode is not finite": frozenset({"decode", "batch", "resume"}),
}
"""What can be wrong, and the checks that have to see it."""

State = tuple[tuple[int, ...], float]
EMPTY: Final[State] = ((-1,) * (WINDOW - 1), 0.0)


def advance(state: State, token: int) -> tuple[State, float]:
    """The state behind a token, and the hidden value that its logits are made of."""
    window, recurrent = state
    recurrent = 0.8 * recurrent + sin(0.7 * token + 1.0)
    taps = [*window, token]
    mixed = sum((0.5 + 0.3 * j) * sin(1.3 * tap) for j, tap in enumerate(taps) if tap >= 0)
    return ((*window[1:], token), recurrent), mixed + 1.5 * recurrent


def logprobs(hidden: float) -> list[float]:
    """Log-probabilities of the vocabulary."""
    logits = [4.0 * sin(0.37 * (v + 1) * (1.0 + 0.1 * hidden) + hidden) for v in range(VOCAB)]
    norm = log(sum(exp(logit) for logit in logits))
    return [logit - norm for logit in logits]


@dataclass
class Row:
    """A request under way."""

    prompt: tuple[int, ...]
    count: int
    state: State = EMPTY
    hidden: float = 0.0
    cached: int = 0
    steps: list[Step] = field(default_factory=list)


@dataclass
class FaultyEngine:
    """Serves greedily; `chunk` None feeds prompts whole, `fault` is one of FAULTS or None."""

    fault: str | None = None
    chunk: int | None = None
    prefix: bool = False
    noise: float = 0.0
    dtype: str = "float32"
    edge: int = 64
    store: dict[tuple[int, ...], State] = field(default_factory=dict)

    @property
    def facts(self) -> Facts:
        """What a test is told."""
        why = None if self.prefix else "the engine has no prefix cache"
        return Facts("faulty", "1", "cpu", self.dtype, no_prefix=why)

    def generate(
        self, prompts: Sequence[Sequence[int]], counts: Sequence[int], chunk: int | None
    ) -> list[Answer]:
        """All rows' prompts, then a token of each row in turn."""
        rows = [Row(tuple(p), n) for p, n in zip(prompts, counts, strict=True)]
        for row in rows:
            self._prefill(row, chunk or self.chunk)
        if self.fault == "rows leak":
            for row in rows[1:]:
                row.hidden += 0.3 * rows[0].hidden
        self._decode(rows)
        return [Answer(tuple(row.steps), row.cached) for row in rows]

    def score(self, ids: Sequence[int], start: int) -> list[float]:
        """By one pass over the whole sequence."""
        found, state, hidden = [], EMPTY, 0.0
        for at, token in enumerate(ids):
            if at >= start:
                found.append(logprobs(hidden)[token])
            state, hidden = advance(state, token)
        return found

    def forget(self) -> None:
        """Empty the store."""
        self.store.clear()

    def _prefill(self, row: Row, chunk: int | None) -> None:
        row.cached, row.state = self._found(row.prompt)
        size = chunk or len(row.prompt)
        for at in range(row.cached, len(row.prompt)):
            if at > row.cached and (at - row.cached) % size == 0:
                row.state = self._resumed(row.state)
            row.state, row.hidden = advance(row.state, row.prompt[at])
            self._keep(row.prompt[: at + 1], row.state)
        self._after_prompt(row)

    def _found(self, prompt: tuple[int, ...]) -> tuple[int, State]:
        """The longest stored prefix; the last token is always fed."""
        for length in range(len(prompt) - 1, 0, -1):
            if prompt[:length] in self.store:
                window, recurrent = self.store[prompt[:length]]
                lost = self.fault == "a cached prefix lacks the window"
                return length, (EMPTY[0] if lost else window, recurrent)
        return 0, EMPTY

    def _keep(self, prefix: tuple[int, ...], state: State) -> None:
        if not self.prefix or len(prefix) % 8:
            return
        old = self.fault == "a cached prefix is a token old"
        self.store[prefix] = state_of(prefix[:-1]) if old else state

    def _resumed(self, state: State) -> State:
        window, recurrent = state
        match self.fault:
            case "a chunk begins without the window":
                return EMPTY[0], recurrent
            case "a chunk begins without the recurrence":
                return window, 0.0
        return state

    def _after_prompt(self, row: Row) -> None:
        window, recurrent = row.state
        length = len(row.prompt)
        if self.fault == "a short prompt leaves its window shifted" and length < WINDOW - 1:
            row.state = ((*window[1:], -1), recurrent)
        if self.fault == "a prompt of exactly one chunk loses the recurrence":
            row.state = (window, 0.0 if length == self.edge else recurrent)

    def _decode(self, rows: list[Row]) -> None:
        live = [row for row in rows if row.count]
        while live:
            for row in live:
                self._sample(row)
            left = [row for row in live if len(row.steps) < row.count]
            if (
                self.fault == "rows that end leave their state to the next"
                and left != live
                and left
            ):
                left[0].state = next(row for row in live if row not in left).state
            for row in left:
                row.state, row.hidden = advance(self._carried(row.state), row.steps[-1].token)
            live = left

    def _carried(self, state: State) -> State:
        window, recurrent = state
        match self.fault:
            case "decode loses the window":
                return EMPTY[0], recurrent
            case "decode loses the recurrence":
                return window, 0.0
        return state

    def _sample(self, row: Row) -> None:
        scores = logprobs(row.hidden)
        ranked = sorted(range(VOCAB), key=lambda v: -scores[v])
        first = Step(ranked[0], scores[ranked[0]], {v: scores[v] for v in ranked[:TOP]})
        shift = self.noise * (-1) ** len(row.steps)
        if self.fault == "decode is not finite" and row.steps:
            shift = nan
        row.steps.append(replace(first, logprob=first.logprob + shift))


def state_of(tokens: Sequence[int]) -> State:
    """The state behind tokens."""
    state = EMPTY
    for token in tokens:
        state, _ = advance(state, token)
    return state

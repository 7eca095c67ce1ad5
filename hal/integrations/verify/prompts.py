"""The prompts of a self-check: around the conv window, around the chunk, and with one prefix."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from hal.errors import ConfigError
from hal.model import CcaDims, Dims, UnknownFamily, read
from hal.model.source import text_config

WINDOW: Final = 4
"""The conv width to probe where the config names none."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is read of a model folder; `stateful` is whether `hal` knows layers to serve in it."""

    model_type: str
    window: int
    vocab_size: int
    max_positions: int | None
    stateful: bool = True


@dataclass(frozen=True, slots=True)
class Questions:
    """Prompts as token ids, and how many new tokens each of them gets."""

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its output."""
        return max(map(len, self.prompts)) + self.new_tokens


def subject_of(folder: Path) -> Subject:
    """Read a model folder's config; a family that `hal` does not know is checked all the same."""
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "is not a folder"
        raise ConfigError(f"{folder} {what}; give the folder of a Hugging Face model")
    data = text_config(folder)
    vocab, bound = data.get("vocab_size"), data.get("max_position_embeddings")
    if not isinstance(vocab, int) or vocab < 1:
        raise ConfigError(f"{folder} names no vocab_size, got {vocab!r}; correct its config.json")
    window = _window(folder)
    return Subject(
        str(data.get("model_type")),
        window or WINDOW,
        vocab,
        bound if isinstance(bound, int) else None,
        window is not None,
    )


def _window(folder: Path) -> int | None:
    """The widest convolution, 0 without any; None where no layer keeps a state."""
    try:
        layers = [*read(folder).stateful_layers()]
    except UnknownFamily:
        return None
    return max((_width(layer.dims) if layer.dims else 0 for layer in layers), default=None)


def _width(dims: Dims) -> int:
    return dims.carry + 1 if isinstance(dims, CcaDims) else dims.W


def lengths(window: int, chunk: int, longest: int) -> list[int]:
    """Prompt lengths below, at and above W - 1 and the chunk, and one of several chunks."""
    around = {window - 2, window - 1, window, chunk - 1, chunk, chunk + 1, 2 * chunk + window - 1}
    return sorted(length for length in around | {1} if 1 <= length <= longest)


def draw(
    subject: Subject, usable: Sequence[int], chunk: int, new_tokens: int, seed: int
) -> Questions:
    """Draw the prompts; two more share a prefix with the longest: part of it, and all of it."""
    bound = subject.max_positions
    fed = new_tokens + 1  # a re-prefill gets one token more
    room = (bound or 3 * chunk + 3 * subject.window + fed) - fed
    if room < 1:
        raise ConfigError(f"{new_tokens} new tokens leave no room in {bound} positions; ask fewer")
    random = Random(seed)
    sizes = lengths(subject.window, chunk, room)
    made = [tuple(random.choices(usable, k=size)) for size in sizes]
    longest, tail = made[-1], random.choices(usable, k=subject.window)
    shared = [longest[: chunk + 1], longest] if len(longest) > chunk + 1 else []
    made += [(*prefix, *tail) for prefix in shared if len(prefix) + len(tail) <= room]
    return Questions(tuple(made), new_tokens)


def usable_ids(folder: Path, vocab_size: int) -> list[int]:
    """Token ids to draw from: the tokenizer's without its added ones, else the vocabulary.

    Rows of the embedding behind the tokenizer's last token are padding, whose values are nobody's.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return list(range(vocab_size))
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        known = data["model"]["vocab"]
        size = len(known) if isinstance(known, list) else max(known.values()) + 1
        special = {entry["id"] for entry in data.get("added_tokens", ())}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as a tokenizer; download it again") from error
    plain = [token for token in range(min(size, vocab_size)) if token not in special]
    return plain or list(range(vocab_size))

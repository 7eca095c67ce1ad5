"""Prompts as text or token ids, from options and files, and the tokenizer where there is one."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from hal.errors import ConfigError
from hal.integrations.transformers.checkpoint import TOKENIZERS
from hal.runtime.request import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

UNFINISHED: Final = "\ufffd"
"""What a character decodes to while some of its bytes are still to come."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as given: text, or token ids, and where it came from for messages."""

    text: str | None
    ids: tuple[int, ...] | None
    origin: str


class Tokenizer(Protocol):
    """What is used of a tokenizer of transformers."""

    def encode(self, text: str) -> list[int]:
        """Token ids with the special tokens that the model expects in front."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids."""
        ...


def parse_ids(text: str, origin: str) -> Prompt:
    """Read token ids that spaces or commas part."""
    words = text.replace(",", " ").split()
    try:
        return Prompt(None, tuple(int(word) for word in words), origin)
    except ValueError as error:
        raise RequestError(
            f'{origin}: {text!r} holds no token ids; write whole numbers, as "1 2 3"'
        ) from error


def read_prompts(file: Path) -> Iterator[Prompt]:
    """Read a prompt a line, each plain text or an object with "prompt" or "ids"; skip blank ones.

    A file is of one form: JSON lines where its first line starts with a brace.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # a byte order mark is no text
    except UnicodeDecodeError as error:
        raise RequestError(f"{file} is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error.strerror}; give a text file") from error
    numbered = [(f"{file}:{n}", line) for n, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise RequestError(f"{file} holds no prompt; write one a line")
    objects = numbered[0][1].lstrip().startswith("{")
    for origin, line in numbered:
        yield _object(line, origin) if objects else Prompt(line, None, origin)


def _object(line: str, origin: str) -> Prompt:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{origin} is not JSON: {error}; write an object a line") from error
    match data:
        case {"prompt": str(text)}:
            return Prompt(text, None, origin)
        case {"ids": list(ids)} if all(type(token) is int for token in ids):
            return Prompt(None, tuple(ids), origin)
    raise RequestError(
        f'{origin} needs {{"prompt": "text"}} or {{"ids": [1, 2, 3]}}, found {line.strip()[:60]}'
    )


def load_tokenizer(folder: Path, needed: bool) -> Tokenizer | None:
    """The folder's tokenizer, or None where it has none and no text has to be encoded."""
    if not any((folder / name).is_file() for name in TOKENIZERS):
        if needed:
            raise ConfigError(
                f"{folder} has no tokenizer, which text prompts need: "
                f"add its tokenizer.json, or give token ids with --ids"
            )
        return None
    from transformers import AutoTokenizer

    try:
        found: Tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"the tokenizer of {folder} cannot be loaded: {text}; "
            f"download its files again, or remove them and give token ids with --ids"
        ) from error
    return found


def encode(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """A prompt's token ids; one without any is refused."""
    if prompt.ids is not None:
        ids = prompt.ids
    elif tokenizer is None:
        raise ConfigError(f"{prompt.origin} is text and there is no tokenizer; give token ids")
    else:
        ids = tuple(tokenizer.encode(_whole(prompt))) if prompt.text else ()
    if not ids:
        raise RequestError(f"{prompt.origin} is empty; give at least one token")
    return ids


def _whole(prompt: Prompt) -> str:
    """The text, refused where it holds half of a surrogate pair, which no UTF-8 can carry."""
    text = prompt.text or ""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{prompt.origin} holds a lone surrogate at character {error.start}; remove it"
        ) from error
    return text


@dataclass(slots=True)
class TextStream:
    """Text of a growing output, piece by piece, without halves of characters."""

    tokenizer: Tokenizer
    shown: int = 0
    _ids: list[int] = field(default_factory=list)

    def push(self, token: int) -> str:
        """The text that this token completes, perhaps none."""
        self._ids.append(token)
        return self._rest(final=False)

    def end(self) -> str:
        """What was held back."""
        return self._rest(final=True)

    def _rest(self, *, final: bool) -> str:
        text = self.tokenizer.decode(self._ids, skip_special_tokens=True)
        if text.endswith(UNFINISHED) and not final:
            return ""
        piece, self.shown = text[self.shown :], max(self.shown, len(text))
        return piece

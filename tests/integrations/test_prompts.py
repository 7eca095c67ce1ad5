"""Prompts from options and files, and text that streams whole characters."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.errors import ConfigError
from hal.integrations.transformers.prompts import (
    Prompt,
    TextStream,
    encode,
    load_tokenizer,
    parse_ids,
    read_prompts,
)
from hal.runtime.request import RequestError
from support.words import save_tokenizer


class Bytes:
    """A tokenizer whose ids are UTF-8 bytes; 0 is special."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        kept = bytes(i for i in token_ids if i or not skip_special_tokens)
        return kept.decode(errors="replace")


@given(st.lists(st.integers(0, 10**6), max_size=9), st.sampled_from([" ", ",", ", ", "\t\n"]))
def test_ids_are_read_whatever_parts_them(ids: list[int], part: str) -> None:
    assert parse_ids(part.join(map(str, ids)), "--ids 1").ids == tuple(ids)


@pytest.mark.parametrize("text", ["a", "1 b", "1.5", "0x1", "1;2"])
def test_ids_that_are_none_are_refused_with_their_origin(text: str) -> None:
    with pytest.raises(RequestError, match=r"^--ids 2: .* holds no token ids; write"):
        parse_ids(text, "--ids 2")


def test_a_file_holds_a_prompt_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_bytes("one\n\n  two  words\u2028still two \r\n\t\nthrée".encode())
    assert list(read_prompts(file)) == [
        Prompt("one", None, f"{file}:1"),
        Prompt("  two  words\u2028still two ", None, f"{file}:3"),
        Prompt("thrée", None, f"{file}:5"),
    ]


def test_a_file_of_json_lines_holds_text_and_ids(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('{"prompt": "a\\nb"}\n\n{"ids": [1, 2], "note": "kept out"}\n{"prompt": ""}\n')
    assert list(read_prompts(file)) == [
        Prompt("a\nb", None, f"{file}:1"),
        Prompt(None, (1, 2), f"{file}:3"),
        Prompt("", None, f"{file}:4"),
    ]


@pytest.mark.parametrize(
    "line",
    ["{}", '{"prompt": 1}', '{"ids": 1}', '{"ids": ["1"]}', '{"ids": [true]}', "[1]", '"text"'],
)
def test_a_json_line_of_another_form_is_refused_with_its_place(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts"
    file.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(RequestError, match=rf"{file}:2 needs"):
        list(read_prompts(file))


def test_a_broken_json_line_is_refused_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('{"prompt": "fine"}\n{"prompt": \n')
    with pytest.raises(RequestError, match=rf"{file}:2 is not JSON"):
        list(read_prompts(file))


@pytest.mark.parametrize("content", [b"", b"\n \n\t\n"])
def test_a_file_without_a_prompt_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(content)
    with pytest.raises(RequestError, match="holds no prompt; write one a line"):
        list(read_prompts(file))


def test_a_file_that_is_not_utf8_is_refused_with_the_byte(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(b"abc\xff")
    with pytest.raises(RequestError, match=r"is not UTF-8 \(byte 3\)"):
        list(read_prompts(file))


@pytest.mark.parametrize("name", ["absent", "."])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match=r"cannot be read: .*; give a text file"):
        list(read_prompts(tmp_path / name))


@pytest.mark.parametrize("prompt", [Prompt("", None, "--prompt 1"), Prompt(None, (), "--ids 1")])
def test_an_empty_prompt_is_refused_with_its_origin(prompt: Prompt) -> None:
    with pytest.raises(RequestError, match=rf"^{prompt.origin} is empty"):
        encode(prompt, Bytes())


def test_ids_need_no_tokenizer_and_text_does() -> None:
    assert encode(Prompt(None, (3, 4), "x"), None) == (3, 4)
    assert encode(Prompt("ab", None, "x"), Bytes()) == (97, 98)
    with pytest.raises(ConfigError, match="is text and there is no tokenizer"):
        encode(Prompt("ab", None, "x"), None)


def test_a_folder_without_a_tokenizer_is_refused_where_one_is_needed(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path, needed=False) is None
    with pytest.raises(ConfigError, match=r"has no tokenizer, which text prompts need: .*--ids"):
        load_tokenizer(tmp_path, needed=True)


def test_a_tokenizer_is_read_from_its_folder(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path, needed=False)
    assert tokenizer is not None
    assert tokenizer.encode("w9 w20 what") == [9, 20, 3]
    assert tokenizer.decode([2, 9, 20], skip_special_tokens=True) == "w9 w20"


@pytest.mark.parametrize("needed", [True, False])
def test_a_broken_tokenizer_is_refused_on_one_line(tmp_path: Path, needed: bool) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot be loaded: .*download its files again") as info:
        load_tokenizer(tmp_path, needed)
    assert "\n" not in str(info.value)


@given(st.text(max_size=20))
def test_a_stream_adds_up_to_the_text_without_halves_of_characters(text: str) -> None:
    stream = TextStream(Bytes())
    pieces = [stream.push(token) for token in text.encode()]
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.end() == text.replace("\0", "")


def test_what_never_becomes_a_character_is_shown_at_the_end() -> None:
    stream = TextStream(Bytes())
    assert [stream.push(token) for token in b"a\xe2\x82"] == ["a", "", ""]
    assert stream.end() == "\ufffd"
    assert stream.end() == ""


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"ids": [1, 2]}\n{"ids": [3]}\n')
    assert [prompt.ids for prompt in read_prompts(file)] == [(1, 2), (3,)]


def test_a_deeply_nested_json_line_is_refused_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"ids": [1]}\n' + "[" * 100_000)
    with pytest.raises(RequestError, match=rf"{file}:2 is not JSON"):
        list(read_prompts(file))


def test_half_of_a_surrogate_pair_is_refused_with_its_place() -> None:
    with pytest.raises(RequestError, match="lone surrogate at character 2"):
        encode(Prompt("ab\ud800", None, "here"), Bytes())

"""The quick parser of `hal check` takes only what typer takes, and takes it alike."""

import inspect
from typing import Any, get_type_hints

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from hal.cli import check as command
from hal.cli import quick

SEEN: list[dict[str, Any]] = []


def options_of_check() -> dict[str, Any]:
    """Flags of the typer command by the name that the question gives them."""
    found = {}
    for name, hint in get_type_hints(command.check, include_extras=True).items():
        if name in ("return", "config", "debug"):
            continue
        (info,) = hint.__metadata__
        given = [word for word in (info.default, *(info.param_decls or ())) if word != ...]
        flags = given or [f"--{name.replace('_', '-')}"]
        found |= dict.fromkeys(flags, "providers" if name == "provider" else name)
    return found


def test_the_quick_parser_knows_every_option() -> None:
    known = {**quick.TEXTS, **quick.NUMBERS, **quick.FLAGS, **quick.REPEATED}
    assert known == options_of_check()


def by_typer(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any] | None:
    """What the typer command asks, or None where it does not take the command line."""
    asked: dict[str, Any] = {}

    def question(config: str, device: str, arch: str, **options: Any) -> None:
        asked.update(config=config, device=device, arch=arch, **options)

    def show(_: None, as_json: bool) -> int:
        asked["as_json"] = as_json
        return 0

    monkeypatch.setattr(command, "question", question)
    monkeypatch.setattr(command, "show", show)
    app = typer.Typer()
    app.command()(command.check)
    ran = CliRunner().invoke(app, arguments)
    return asked if ran.exit_code == 0 else None


DEFAULTS = {
    "arch": "",
    "dtype": None,
    "state_dtype": None,
    "tp": 1,
    "speculative": None,
    "tree": False,
    "prefix_cache": False,
    "graphs": False,
    "providers": None,
    "as_json": False,
}

WORDS = st.sampled_from(
    ["config.json", "-d", "cpu", "--device", "--device=npu", "--arch", "sm_90", "--tp", "2",
     "--tp=4",
     "--tp=x", "--tree", "--json", "--provider", "conv=a.b", "--provider=scan=c.d", "--dtype=", "",
     "--nope", "-1", "--speculative", "3", "--help", "--", "-dcpu", "--graphs"]
)  # fmt: skip
RIGHT = st.permutations(
    [["config.json"], ["-d", "cpu"], ["--tp=4"], ["--provider", "conv=a.b"], ["--json"],
     ["--speculative", "3"], ["--provider=scan=c.d"], ["--arch", "sm_90"]]
)  # fmt: skip


def agree(arguments: list[str]) -> dict[str, Any] | None:
    found = quick.parse(arguments)
    if found is not None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            assert by_typer(arguments, monkeypatch) == {**DEFAULTS, **found}, arguments
    return found


@settings(max_examples=120, deadline=None)
@given(arguments=st.lists(WORDS, max_size=7))
def test_what_is_taken_is_taken_as_typer_takes_it(arguments: list[str]) -> None:
    agree(arguments)


@settings(max_examples=25, deadline=None)
@given(parts=RIGHT)
def test_a_right_command_line_is_taken_in_any_order(parts: list[list[str]]) -> None:
    assert agree([word for part in parts for word in part]) is not None


@pytest.mark.parametrize(
    "arguments",
    [[], ["c"], ["-d", "cpu"], ["c", "-d"], ["c", "-d", "cpu", "--help"], ["c", "d", "-d", "cpu"],
     ["c", "-d", "cpu", "--tp", "two"], ["c", "-d", "cpu", "--debug"], ["c", "-d=cpu"]],
)  # fmt: skip
def test_all_else_is_left_to_typer(arguments: list[str]) -> None:
    assert quick.parse(arguments) is None


def test_the_signature_has_the_same_defaults() -> None:
    parameters = inspect.signature(command.check).parameters
    for name, value in DEFAULTS.items():
        assert parameters["provider" if name == "providers" else name].default == value

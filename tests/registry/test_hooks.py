"""Hooks of one argument: every plugin answers for itself, a failing one silences no other."""

import pytest

from hal_registry import Code, Failure, Fault, Reason, Registry, attempt, discover
from support.registry import Zoo, manifest

WORD = "Code.MODE_UNSUPPORTED"
HOOK = "from hal_registry import *\n@hookimpl\n"


def plugin(zoo: Zoo, distribution: str, body: str) -> None:
    zoo.plugin(distribution, f"cuda.{distribution}", HOOK + body)


def test_every_plugin_answers_and_failures_are_answers(zoo: Zoo) -> None:
    plugin(zoo, "a", "def hal_requirements(model): return model['a']")
    plugin(zoo, "b", "def hal_requirements(model): raise SystemExit('no')")
    plugin(zoo, "c", "def hal_requirements(): return 'without arguments'")
    answers = list(discover().ask("hal_requirements", {"a": 1}))
    assert [type(answer) for _, answer in answers] == [str, Failure, int]
    assert [name.split()[0] for name, _ in answers] == ["cuda.c", "cuda.b", "cuda.a"]


def test_tryfirst_and_trylast_hold(zoo: Zoo) -> None:
    first = "from hal_registry import *\n@hookimpl(tryfirst=True)\n"
    zoo.plugin("a", "cuda.a", first + "def hal_requirements(model): return 'a'")
    plugin(zoo, "b", "def hal_requirements(model): return 'b'")
    assert [answer for _, answer in discover().ask("hal_requirements", {})] == ["a", "b"]


def test_vetoes_are_collected_over_all_plugins(zoo: Zoo) -> None:
    veto = "def hal_veto(selection): return [Reason(Code.MODE_UNSUPPORTED, 'policy', '{}', 'n')]"
    plugin(zoo, "a", veto.format("one"))
    plugin(zoo, "b", veto.format("two"))
    plugin(zoo, "c", "def hal_veto(selection): return []")
    plugin(zoo, "d", "def hal_veto(selection): return None")
    assert [reason.needed for reason in discover().vetoes(None)] == ["two", "one"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("raise KeyError('policy')", "'policy'"),
        ("return 1", "1"),
        ("return ['no']", "['no']"),
        (f"return [Reason({WORD}, None, 'a', 'b')]", "subject of a Reason: expected text"),
        (f"return [Reason({WORD}, 'a', 'b', 3)]", "offered of a Reason: expected text"),
        ("return [Reason('no-such-code', 'a', 'b', 'c')]", "'no-such-code' is not a valid Code"),
    ],
)
def test_a_veto_that_fails_is_a_reason_and_not_a_pass(zoo: Zoo, body: str, text: str) -> None:
    plugin(zoo, "a", f"def hal_veto(selection): {body}")
    (reason,) = discover().vetoes(None)
    assert reason.code is Code.PLUGIN_BROKEN
    assert text in reason.offered
    assert reason.subject.startswith("cuda.a of a")


def test_a_registry_of_given_manifests_has_no_hooks() -> None:
    registry = Registry.of(manifest("b.x"), manifest("a.x"))
    assert registry.devices() == ("a", "b")
    assert list(registry.ask("hal_veto", None)) == []
    assert registry.vetoes(None) == ()


@pytest.mark.parametrize("code", list(Code))
def test_a_fault_has_a_fix_for_each_code_that_discovery_gives(code: Code) -> None:
    given = {Code.PLUGIN_BROKEN, Code.PLUGIN_BLOCKED, Code.NAME_CONFLICT, Code.API_MISMATCH}
    fault = Fault("cuda.x", "dist", "1", code, "cause")
    if code in given:
        assert fault.reason().fix
        assert fault.reason().offered == "cause"
    else:
        with pytest.raises(KeyError):
            fault.reason()


def test_a_reason_is_one_line_and_plain_data() -> None:
    reason = Reason(Code.SHAPE_UNSUPPORTED, "conv.decode", "width 9", "width 2..8", "why", "do")
    assert str(reason) == (
        "[shape-unsupported] conv.decode: needed width 9; offered width 2..8 (why)"
    )
    assert set(map(type, reason.to_dict().values())) == {str}


def test_attempt_contains_everything_but_ctrl_c() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    failed = attempt(lambda: 1 // 0)
    assert attempt(lambda: 1) == 1
    assert isinstance(failed, Failure)
    assert failed.text.startswith("ZeroDivisionError: ")
    assert "Traceback" in failed.traceback
    with pytest.raises(KeyboardInterrupt):
        attempt(stop)

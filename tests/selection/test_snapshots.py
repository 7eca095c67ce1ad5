"""Every refusal text as a file that a person reads; HAL_SNAPSHOTS=write makes the file anew.

The texts come from synthetic manifests, so that they do not change with what is installed. Read the
difference before committing it: these lines are what an operator sees.
"""

import json
import pickle
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from hal.refusal import Refusal, Unsupported
from hal_registry import Code, probe
from support.refusals import SCENARIOS
from support.snapshots import check_snapshot

HERE = Path(__file__).parent
REASONS = Path(__file__).parents[2] / "docs" / "reason-codes.md"


@pytest.fixture
def refusals(providers: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Refusal]:
    def installed(name: str) -> str:
        return "2.0.3" if name == "known-lib" else version(name)

    monkeypatch.setattr(probe, "version", installed)
    return {title: ask() for title, ask in SCENARIOS.items()}


def test_the_text_of_every_refusal(refusals: dict[str, Refusal]) -> None:
    parts = (f"# {title}\n\nhal.Unsupported: {text}\n" for title, text in refusals.items())
    check_snapshot(HERE / "snapshots" / "refusals.txt", "\n".join(parts))


def test_every_code_occurs_and_is_documented(refusals: dict[str, Refusal]) -> None:
    seen = {reason.code for refusal in refusals.values() for reason in refusal.all_reasons()}
    assert seen == set(Code)
    documented = re.findall(r"^### `([a-z-]+)`$", REASONS.read_text(), flags=re.MULTILINE)
    assert documented == [code.value for code in Code]


def test_the_documented_examples_are_real(refusals: dict[str, Refusal]) -> None:
    examples = re.findall(r"^> (.+)$", REASONS.read_text(), flags=re.MULTILINE)
    headlines = {refusal.headline(): refusal for refusal in refusals.values()}
    first = [headlines[example].all_reasons()[0].code for example in examples]
    assert first == list(Code)


def test_every_reason_has_a_fix(refusals: dict[str, Refusal]) -> None:
    for refusal in refusals.values():
        assert all(reason.fix for reason in refusal.all_reasons())
        assert refusal.fix()


def test_the_first_line_stands_alone(refusals: dict[str, Refusal]) -> None:
    for refusal in refusals.values():
        headline, *rest = str(refusal).splitlines()
        assert headline.startswith(f"{refusal.model_type} cannot run on {refusal.device}: ")
        assert headline == refusal.headline()
        assert all(line.startswith("  ") for line in rest)
        assert rest[-1].startswith("  Fix: ")


def test_candidates_come_nearest_first(refusals: dict[str, Refusal]) -> None:
    refusal = refusals["nearest first: head dims, then a whole interface"]
    assert [candidate.name for candidate in refusal.candidates] == ["cuda.b", "cuda.a"]


def test_a_refusal_is_plain_data_and_survives_pickling(refusals: dict[str, Refusal]) -> None:
    for refusal in refusals.values():
        error = pickle.loads(pickle.dumps(Unsupported(refusal)))
        assert isinstance(error, Unsupported)
        assert error.refusal == refusal
        assert str(error) == str(refusal)
        plain = json.loads(json.dumps(error.to_dict()))
        assert plain["headline"] == refusal.headline()
        codes = [r["code"] for r in plain["reasons"]]
        codes += [r["code"] for c in plain["candidates"] for r in c["reasons"]]
        assert codes == [reason.code for reason in error.reasons]


def test_unsupported_is_what_engines_catch_and_reads_as_hal(refusals: dict[str, Refusal]) -> None:
    refusal = next(iter(refusals.values()))
    with pytest.raises(NotImplementedError) as caught:
        raise Unsupported(refusal)
    assert f"{caught.type.__module__}.{caught.type.__qualname__}" == "hal.Unsupported"
    assert caught.value.candidates == refusal.candidates

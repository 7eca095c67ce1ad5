"""`hal tune` prints what changed and by how much, and refuses by name what it cannot sweep."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, ModuleType

import pytest

from hal.cli import main, tune
from hal.cli import question as questions
from hal.device import Device
from hal.tuner import Sweep, Tuned
from hal_cpu.plugin import MANIFEST
from hal_cuda.hopper.plugin import MANIFEST as HOPPER
from hal_cuda.plugin import MANIFEST as CUDA
from hal_registry import Candidate, Registry
from hal_rocm.plugin import MANIFEST as ROCM


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str


Call = Callable[..., Ran]

CLASSES = [
    Tuned("a", "a (B1)", "BV8", "BV4", {"BV8": [10.0, 8.0, 9.0], "BV4": [6.0, 6.0, 6.1]}),
    Tuned("b", "b (B1)", "BV8", "BV8", {"BV8": [5.0]}, {"BV64": "spills in B1: k 3 registers"}),
    Tuned("c", "c (B1)", "BV8", "BV8", {}, {"BV8": "OutOfResources: shared memory"}),
]


class FakeTuner:
    """A tuner whose sweep is written down."""

    names: Sequence[str] = ("a", "b", "c")
    unswept: Mapping[str, str] = MappingProxyType({"e": "nobody offers it"})
    ended = ""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def sweep(
        self,
        device: Device,
        names: Sequence[str],
        rounds: int,
        workers: int,
        say: Callable[[str], None],
    ) -> Sweep:
        self.asked.append((str(device), tuple(names), rounds, workers))
        say("a (B1)")
        return Sweep(CLASSES, {"arch": "fake_1", "table": {}}, ['    "a": (),'], self.ended)


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> FakeTuner:
    """The CPU's provider with a tuner beside it."""
    found = FakeTuner()
    for name in ("fake_vendor", "fake_vendor.provider", "fake_vendor.tuner"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = sys.modules["fake_vendor.tuner"]
    module.TUNER = found  # type: ignore[attr-defined]
    module.__spec__ = object()  # type: ignore[assignment]
    registry = Registry.of(replace(MANIFEST, load="fake_vendor.provider:Provider"))
    monkeypatch.setattr(questions, "default_registry", lambda: registry)
    return found


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["hal", "tune", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        code = end.value.code
        return Ran(code if isinstance(code, int) else 0, *capsys.readouterr())

    return run


def test_it_says_what_changed_by_how_much_and_what_was_dropped(
    call: Call, tuner: FakeTuner
) -> None:
    ran = call("--device", "cpu")
    assert (ran.status, ran.err) == (0, "hal tune: a (B1)\n")
    assert [line.split() for line in ran.out.splitlines()] == [
        "fake_1: 1 of 3 classes changed".split(),
        "a (B1) BV8 9 us BV4 6 us 33.3% less".split(),
        "b (B1) BV8 5 us kept".split(),
        "c (B1) BV8 - not swept: it does not run as shipped".split(),
        "dropped of b (B1): BV64: spills in B1: k 3 registers".split(),
        "dropped of c (B1): BV8: OutOfResources: shared memory".split(),
    ]
    assert tuner.asked == [("cpu", (), 7, 1)]


def test_the_table_is_written_and_printed_as_json_or_code(
    call: Call, tuner: FakeTuner, tmp_path: Path
) -> None:
    target = tmp_path / "table.json"
    ran = call("-d", "cpu", "--json", "--out", str(target), "--name", "a", "--rounds", "3",
               "--workers", "2")  # fmt: skip
    assert json.loads(ran.out) == json.loads(target.read_text()) == {"arch": "fake_1", "table": {}}
    assert tuner.asked == [("cpu", ("a",), 3, 2)]
    assert call("-d", "cpu", "--code").out.splitlines()[-1] == '    "a": (),'


def test_a_sweep_that_ended_early_gives_what_it_has_and_status_1(
    call: Call, tuner: FakeTuner
) -> None:
    tuner.ended = "the shipped BV8 does not run after BV4: gone"
    ran = call("-d", "cpu")
    assert ran.status == 1
    assert ran.out.startswith("fake_1: ")
    assert ran.err.splitlines()[-1] == (
        "hal tune: ended early, the shipped BV8 does not run after BV4: gone; start again for "
        "the rest"
    )


BAD = {
    "name": (["-d", "cpu", "--name", "d"], "--name d: expected one of a, b, c"),
    "unswept": (["-d", "cpu", "--name", "e"], "--name e: nobody offers it"),
    "rounds": (["-d", "cpu", "--rounds", "0"], "--rounds 0: expected at least 1"),
    "workers": (["-d", "cpu", "--workers", "0"], "--workers 0: expected at least 1"),
    "provider": (["-d", "cpu", "--provider", "x.y"], "--provider x.y: expected one of cpu.torch"),
    "device": (["-d", "CPU"], "device: got 'CPU'"),
    "folder": (["-d", "cpu", "--out", "/no/such/t.json"], "--out /no/such/t.json: its folder"),
}


@pytest.mark.parametrize("kind", sorted(BAD))
def test_bad_input_is_one_line_with_what_is_expected(
    call: Call, tuner: FakeTuner, kind: str
) -> None:
    arguments, text = BAD[kind]
    ran = call(*arguments)
    assert (ran.status, ran.out, tuner.asked) == (2, "", [])
    (line,) = ran.err.splitlines()
    assert line.startswith("hal tune: ")
    assert text in line


def test_a_name_of_another_provider_is_refused_with_its_provider(
    call: Call, tuner: FakeTuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The portable provider is swept unless another is named; its own tuner would sweep less."""
    special, package = FakeTuner(), "fake_vendor.special"
    special.names = ("f",)
    for name in (package, f"{package}.provider", f"{package}.tuner"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[f"{package}.tuner"].__dict__.update(TUNER=special, __spec__=object())
    portable = replace(MANIFEST, load="fake_vendor.provider:Provider")
    first = replace(
        MANIFEST, name="cpu.special", load=f"{package}.provider:Provider",
        priority=MANIFEST.priority + 1,
    )  # fmt: skip
    monkeypatch.setattr(questions, "default_registry", lambda: Registry.of(portable, first))
    refused = call("-d", "cpu", "--name", "f")
    text = "hal tune: --name f: cpu.special reads it; add --provider cpu.special"
    assert (refused.status, refused.err.strip()) == (2, text)
    assert call("-d", "cpu", "--name", "f", "--provider", "cpu.special").status == 0
    assert (tuner.asked, special.asked) == ([], [("cpu", ("f",), 7, 1)])


@pytest.mark.parametrize(
    ("device", "headline", "code"),
    [
        ("cpu", "nothing can be tuned on cpu", "interface-missing"),
        ("tpu", "nothing serves tpu", "device-absent"),
    ],
)
def test_what_cannot_be_swept_is_refused_with_the_fix(
    call: Call, device: str, headline: str, code: str
) -> None:
    ran = call("--device", device)
    assert (ran.status, ran.out) == (1, "")
    first, reason, fix = ran.err.splitlines()
    assert first == f"hal tune: {headline}"
    assert f"[{code}]" in reason
    assert fix.startswith("  Fix: ")


@pytest.mark.parametrize(
    ("manifest", "module"),
    [(CUDA, "hal_cuda.tuner"), (HOPPER, "hal_cuda.hopper.tuner"), (ROCM, "hal_rocm.tuner")],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_tuner_is_beside_its_provider(manifest: object, module: str) -> None:
    from importlib.util import find_spec

    assert tune.module_of(Candidate(manifest, "", "")) == module  # type: ignore[arg-type]
    assert find_spec(module) is not None

"""`hal bench` prints a table or JSON, and refuses by name what it cannot measure."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor

from hal.cli import main
from hal.cli import question as questions
from hal_cpu.plugin import MANIFEST
from hal_cpu.provider import TorchProvider
from hal_registry import Manifest, Presence, Registry

SMALL = ("--op", "conv.decode", "--shape", "B1-C2048", "--rounds", "2")


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str


Call = Callable[..., Ran]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["hal", "bench", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        code = end.value.code
        return Ran(code if isinstance(code, int) else 0, *capsys.readouterr())

    return run


def install(monkeypatch: pytest.MonkeyPatch, *manifests: Manifest) -> None:
    registry = Registry.of(*manifests)
    monkeypatch.setattr(questions, "default_registry", lambda: registry)


def test_a_table_says_who_was_timed_and_where(call: Call) -> None:
    ran = call("--device", "cpu", *SMALL)
    assert ran.status == 0, ran.err
    first, title, header, mine, other = ran.out.splitlines()
    assert first.startswith("cpu (")
    assert first.endswith("2 rounds")
    assert title == "conv.decode"
    assert header.split()[:3] == ["shape", "entrant", "cold"]
    assert mine.split()[:2] == ["B1-C2048", "cpu.torch"]
    assert other.split()[0] == "transformers"
    assert ran.err == "hal bench: conv.decode B1-C2048\n"


def test_json_is_printed_and_written_alike(call: Call, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    ran = call(*SMALL, "--peer", "none", "--json", "--out", str(target))
    data = json.loads(ran.out)
    assert json.loads(target.read_text()) == data
    (line,) = data["lines"]
    assert (line["entrant"], line["verdict"], line["dtype"]) == ("cpu.torch", "right", "float32")
    assert len(line["cold_us"]["readings"]) == len(line["warm_us"]["readings"]) == 2
    assert line["check"]["limits"] == [1e-5, 0.0]


def test_another_dtype_is_held_to_its_own_limits(call: Call) -> None:
    ran = call(*SMALL, "--peer", "none", "--dtype", "bfloat16", "--json")
    (line,) = json.loads(ran.out)["lines"]
    assert (line["dtype"], line["check"]["limits"]) == ("bfloat16", [4e-3, 0.0])


BAD = {
    "operation": (["--op", "conv.decod"], "--op conv.decod: expected one of conv.decode, "),
    "shape": (["--shape", "B1"], "--shape B1: expected one of "),
    "shape of another operation": (
        ["--op", "conv.prefill", "--shape", "B1-C2048"],
        "--shape B1-C2048: expected one of 1x32768-C8192, T512-C2048, mix-C8192",
    ),
    "peer": (["--peer", "tf"], "--peer tf: expected one of transformers, fla, "),
    "provider": (["--provider", "cuda.triton"], "--provider cuda.triton: expected one of cpu."),
    "dtype": (["--dtype", "int8"], "--dtype int8: expected one of float32, bfloat16, float16"),
    "rounds": (["--rounds", "0"], "--rounds 0: expected at least 1"),
    "device": (["--device", "CPU"], "device: got 'CPU'"),
    "folder": (["--out", "/no/such/out.json"], "--out /no/such/out.json: its folder does not"),
    "picture": (["--plot", "out.gif"], "--plot out.gif: expected a name that ends in .svg"),
}


@pytest.mark.parametrize("kind", sorted(BAD))
def test_bad_input_is_one_line_with_what_is_expected(call: Call, kind: str) -> None:
    arguments, text = BAD[kind]
    ran = call(*arguments)
    assert (ran.status, ran.out) == (2, "")
    (line,) = ran.err.splitlines()
    assert line.startswith("hal bench: ")
    assert text in line


def test_a_missing_library_of_pictures_is_told_before_anything_runs(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = call(*SMALL, "--plot", "out.svg")
    assert ran.status == 2
    assert ran.err == (
        "hal bench: matplotlib is not installed; install hybrid-hal with its extra [bench]\n"
    )


def refused(ran: Ran, headline: str, code: str, fix: str) -> None:
    """Status 1, nothing on stdout, the reason with its code, and the fix last."""
    assert (ran.status, ran.out) == (1, "")
    first, *reasons, last = ran.err.splitlines()
    assert first == f"hal bench: {headline}"
    assert any(f"[{code}]" in reason for reason in reasons)
    assert last.startswith(f"  Fix: {fix}")


def test_a_device_that_nobody_serves_is_refused(call: Call) -> None:
    ran = call("--device", "tpu")
    refused(ran, "nothing serves tpu", "device-absent", "install a provider for tpu, or use a ")


def test_a_device_that_is_absent_is_refused(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("bench_probe")
    module.presence = lambda index: Presence(0, detail="no card")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bench_probe", module)
    install(monkeypatch, replace(MANIFEST, probe="bench_probe:presence"))
    ran = call("--device", "cpu")
    refused(ran, "no provider can run on cpu here", "device-absent", "run where cpu:0 is")


def test_a_missing_library_of_the_provider_is_refused(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, replace(MANIFEST, needs=("no-such-library>=1",)))
    ran = call("--device", "cpu")
    refused(ran, "no provider can run on cpu here", "library-missing", "pip install 'no-such")


def test_an_operation_that_the_provider_does_not_offer_is_refused(call: Call) -> None:
    ran = call("--device", "cpu", "--op", "short_conv.decode")
    headline = "short_conv.decode: cpu.torch cannot be asked"
    refused(ran, headline, "operation-missing", "install a provider for cpu that offers short_conv")


def test_a_shape_that_the_provider_refuses_is_refused_with_its_reason(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = replace(MANIFEST.offers["conv.decode"], widths=(3,))
    install(monkeypatch, replace(MANIFEST, offers={"conv.decode": offer}, proofs=()))
    ran = call(*SMALL)
    fix = "use a provider that offers conv.decode with conv width 4"
    refused(ran, "nothing can be measured on cpu", "shape-unsupported", fix)


def test_an_arch_that_is_not_the_devices_is_refused(call: Call) -> None:
    ran = call("--device", "cpu:avx9")
    refused(ran, "the device is no avx9", "arch-unsupported", "use --device cpu")


class Lying(TorchProvider):
    """A provider whose convolution is off by a thousandth."""

    def __init__(self, device: str, options: object) -> None:
        super().__init__(device, options)  # type: ignore[arg-type]
        right = self.conv.decode

        def decode(*args: Tensor, **named: object) -> Tensor:
            return right(*args, **named) + 1e-3  # type: ignore[arg-type]

        self.conv.decode = decode  # type: ignore[method-assign, assignment]


def test_a_provider_that_is_wrong_gives_status_1_and_no_time(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("bench_liar")
    module.Lying = Lying  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bench_liar", module)
    install(monkeypatch, replace(MANIFEST, load="bench_liar:Lying"))
    ran = call(*SMALL, "--json")
    assert ran.status == 1
    mine, other = json.loads(ran.out)["lines"]
    assert (mine["verdict"], mine["cold_us"]) == ("wrong", None)
    assert (other["verdict"], other["cold_us"] is None) == ("right", False)

"""Every tiny and real config on every device, from the installed manifests, as one readable file.

HAL_SNAPSHOTS=write makes it anew after an offer or a family has changed; read the difference.
"""

from pathlib import Path

import pytest

import hal
from hal_registry import Code
from support.model_configs import CONFIGS, tiny
from support.registry import run_python
from support.snapshots import check_snapshot

HERE = Path(__file__).parent
DEVICES = ("cpu", "cuda", "rocm", "npu")
FILES = sorted(
    path
    for kind in ("tiny", "real")
    for path in (CONFIGS / kind).glob("*.json")
    if path.name != "expected.json"
)
UNSERVED = {"recurrent_gemma": "rg_lru", "inkling_text": "multi_short_conv"}


def answer(device: str, path: Path) -> str:
    found = hal.explain(device, path)
    if found.selection is None:
        return "no   " + str(found).splitlines()[0].partition(": ")[2]
    providers = sorted({choice.provider for choice in found.selection.choices.values()})
    return f"yes  {', '.join(providers)}"


def test_the_refusal_matrix_of_what_is_installed() -> None:
    lines = [
        f"{path.parent.name}/{path.stem:25} {device:5} {answer(device, path)}"
        for path in FILES
        for device in DEVICES
    ]
    check_snapshot(HERE / "snapshots" / "matrix.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("device", DEVICES)
def test_every_refusal_is_whole(device: str, path: Path) -> None:
    refusal = hal.explain(device, path).refusal
    if refusal is not None:
        assert refusal.fix()
        assert all(reason.needed and reason.offered for reason in refusal.all_reasons())


@pytest.mark.parametrize("name", sorted(UNSERVED))
@pytest.mark.parametrize("device", DEVICES)
def test_a_kind_that_nobody_serves_is_missing_everywhere(device: str, name: str) -> None:
    refusal = hal.explain(device, CONFIGS / "tiny" / f"{name}.json").refusal
    assert refusal is not None
    assert (Code.INTERFACE_MISSING, UNSERVED[name]) in {
        (reason.code, reason.subject) for reason in refusal.all_reasons()
    }


def test_rwkv_is_unknown_by_its_model_type() -> None:
    refusal = hal.explain("cpu", CONFIGS / "real" / "rwkv-6-1b6.json").refusal
    assert refusal is not None
    assert [reason.code for reason in refusal.all_reasons()] == [Code.FAMILY_UNKNOWN]
    assert refusal.model_type == "rwkv6"


def test_lfm_without_a_pattern_is_no_hybrid() -> None:
    config = tiny("lfm2")
    del config["layer_types"]
    refusal = hal.explain("cpu", config).refusal
    assert refusal is not None
    assert [reason.code for reason in refusal.all_reasons()] == [Code.NOT_HYBRID]


@pytest.mark.parametrize("name", ["lfm2", "lfm2_moe", "lfm2_vl", "zaya"])
@pytest.mark.parametrize("call", ["select", "explain"])
def test_short_conv_on_npu_is_decided_before_torch_is_imported(name: str, call: str) -> None:
    path = str(CONFIGS / "tiny" / f"{name}.json")
    code = (
        f"import hal, sys\ntry: text = str(hal.{call}('npu', {path!r}))\n"
        "except hal.Unsupported as error: text = str(error)\n"
        "print('torch' in sys.modules, text)"
    )
    ran = run_python(code)
    assert ran.returncode == 0, ran.stderr
    first = ran.stdout.splitlines()[0]
    assert first.startswith("False ")
    assert "cannot run on npu: conv_state is needed by" in first
    assert "and npu.ascend does not offer it" in first

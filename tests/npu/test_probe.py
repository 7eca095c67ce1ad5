"""The probe finds devices and symbols in an order that never breaks a process."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hal_npu import machine
from hal_npu.machine import LIBRARIES, soc
from hal_registry import Code, Reason
from npu.children import cann, on_machine
from npu.fakes import FAKE
from support.model_configs import CONFIGS

PROBE = """
from hal_npu.probe import presence
print(repr(presence(None)))
"""
GDN = str(CONFIGS / "real" / "qwen3-next-80b-a3b.json")
KDA = str(CONFIGS / "real" / "kimi-linear-48b-a3b.json")
LFM = str(CONFIGS / "real" / "lfm2-350m.json")
HEAVY = "import sys; print(sorted({'torch', 'torch_npu', 'sgl_kernel_npu'} & set(sys.modules)))"
SELECT = """
import hal
try:
    print(hal.select("npu", {config!r}, dtype="bfloat16"))
except hal.Unsupported as error:
    print(error)
"""


def probed(libraries: Path | None, *packages: Path, **environment: str) -> str:
    return on_machine(PROBE, libraries, *packages, **environment)


def test_without_torch_npu_the_library_is_missing(tmp_path: Path) -> None:
    shown = on_machine(PROBE + HEAVY, None, tmp_path)
    assert "library-missing" in shown and "'torch-npu'" in shown
    assert shown.endswith("[]\n")


@pytest.mark.parametrize("there", range(len(LIBRARIES)))
def test_without_cann_nothing_of_torch_is_imported(tmp_path: Path, there: int) -> None:
    libraries = cann(tmp_path, LIBRARIES[:there])
    shown = on_machine(PROBE + HEAVY, libraries)
    assert "library-missing" in shown
    assert repr(LIBRARIES[there]) in shown
    assert shown.endswith("[]\n")


def broken_torch(place: Path) -> Path:
    """torch-npu as an installed backend whose import fails, as it does without CANN."""
    shutil.copytree(FAKE, place / "packages")
    root = place / "packages"
    (root / "torch_npu" / "__init__.py").write_text("raise ImportError('libhccl.so')\n")
    entry = "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"
    (root / "torch_npu-2.13.0.dist-info" / "entry_points.txt").write_text(entry)
    return root


def test_a_machine_without_cann_is_refused_though_torch_cannot_be_imported(tmp_path: Path) -> None:
    packages = broken_torch(tmp_path)
    code = SELECT.format(config=GDN) + "try: import torch\nexcept RuntimeError: print('broken')"
    shown = on_machine(code, None, packages)
    assert "[library-missing]" in shown and "libascendcl.so" in shown
    assert "source its set_env.sh" in shown
    assert shown.endswith("broken\n")


def test_a_torch_npu_that_cannot_be_imported_is_a_reason(tmp_path: Path) -> None:
    packages = broken_torch(tmp_path)
    (packages / "torch_npu-2.13.0.dist-info" / "entry_points.txt").unlink()
    shown = probed(cann(tmp_path), packages)
    assert "'torch-npu'" in shown and "ImportError: libhccl.so" in shown


SCENES = """
import json, os
import hal
from hal_npu.probe import presence

def select(config, **environment):
    os.environ.update(environment)
    try:
        return str(hal.select("npu", config, dtype="bfloat16"))
    except hal.Unsupported as error:
        return str(error)
    finally:
        for name in environment:
            del os.environ[name]

def probe(**environment):
    os.environ.update(environment)
    found = repr(presence(None))
    for name in environment:
        del os.environ[name]
    return found

print(json.dumps({{
    "gdn": select({gdn!r}), "kda": select({kda!r}), "lfm": select({lfm!r}),
    "310p": select({gdn!r}, FAKE_NPU_SOC="202"), "none": probe(FAKE_NPU_DEVICES="0"),
    "950": probe(FAKE_NPU_SOC="260"), "mega": probe(GDN_USE_MEGA_GDN="1"),
}}))
"""


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What probe and selection say on a whole machine, asked in one process."""
    code = SCENES.format(gdn=GDN, kda=KDA, lfm=LFM)
    told: dict[str, str] = json.loads(on_machine(code, cann(tmp_path_factory.mktemp("machine"))))
    return told


def test_no_device_is_no_device(scenes: dict[str, str]) -> None:
    assert scenes["none"].startswith("Presence(count=0, ")
    assert "sees 0 devices" in scenes["none"]


def test_the_soc_is_the_arch(scenes: dict[str, str]) -> None:
    assert "arch='ascend950'" in scenes["950"]


@pytest.mark.parametrize(
    ("number", "arch"), [(200, "ascend310p"), (220, "ascend910b"), (255, "ascend910_93")]
)
def test_every_known_soc_has_an_arch(number: int, arch: str) -> None:
    assert soc(number) == arch


def test_a_soc_that_nobody_knows_is_no_arch_of_the_manifest() -> None:
    from hal_npu.plugin import ARCHES

    assert soc(999) == "soc_999"
    assert soc(999) not in ARCHES


def test_a_package_that_cannot_be_imported_is_a_reason(tmp_path: Path) -> None:
    shutil.copytree(FAKE, tmp_path / "packages")
    package = tmp_path / "packages" / "sgl_kernel_npu" / "__init__.py"
    package.write_text("raise OSError('libsgl_kernel_npu.so')\n")
    shown = probed(cann(tmp_path), tmp_path / "packages")
    assert "library-missing" in shown and "'sgl-kernel-npu'" in shown
    assert "OSError: libsgl_kernel_npu.so" in shown


def test_plain_triton_is_a_reason(tmp_path: Path) -> None:
    shutil.copytree(FAKE, tmp_path / "packages")
    shutil.rmtree(tmp_path / "packages" / "triton")
    shown = probed(cann(tmp_path), tmp_path / "packages")
    assert "library-missing" in shown and "'triton-ascend'" in shown


def test_switches_of_the_vendor_are_a_reason(scenes: dict[str, str]) -> None:
    assert "mode-unsupported" in scenes["mega"] and "GDN_USE_MEGA_GDN" in scenes["mega"]


def test_an_npu_fits_gated_delta_net_models_and_says_by_what_proof(scenes: dict[str, str]) -> None:
    assert "npu.ascend" in scenes["gdn"] and "interpreter" in scenes["gdn"]
    assert "cannot run" not in scenes["gdn"]


@pytest.mark.parametrize(
    ("scene", "words"), [("lfm", "conv_state"), ("kda", "delta_rule.prefill of channel gates")]
)
def test_others_are_refused_on_an_npu_that_is_there(
    scenes: dict[str, str], scene: str, words: str
) -> None:
    assert "cannot run on npu" in scenes[scene] and words in scenes[scene]


def test_an_arch_outside_the_manifest_is_refused_with_the_list(scenes: dict[str, str]) -> None:
    assert "[arch-unsupported]" in scenes["310p"]
    assert "ascend310p" in scenes["310p"] and "ascend910b, ascend910_93" in scenes["310p"]


def test_a_symbol_of_unknown_signature_refuses_the_operations_that_call_it(tmp_path: Path) -> None:
    shutil.copytree(FAKE, tmp_path / "packages")
    file = tmp_path / "packages" / "sgl_kernel_npu" / "fla" / "chunk.py"
    source = file.read_text()
    assert source.count("    head_first: bool = False,\n") == 1
    file.write_text(source.replace("    head_first: bool = False,\n", "    layout: str = 'VK',\n"))
    shown = on_machine(SELECT.format(config=GDN), cann(tmp_path), tmp_path / "packages")
    assert "[protocol-violation]" in shown and "chunk_gated_delta_rule_npu" in shown
    assert "head_first=False" in shown and "layout" in shown


def test_a_symbol_that_is_absent_is_an_operation_that_is_missing(tmp_path: Path) -> None:
    shutil.copytree(FAKE, tmp_path / "packages")
    (tmp_path / "packages" / "sgl_kernel_npu" / "fla" / "kda_target_verify.py").unlink()
    shown = on_machine(SELECT.format(config=GDN), cann(tmp_path), tmp_path / "packages")
    assert "[operation-missing]" in shown and "kda_target_verify_npu" in shown


AGAIN = """
import sys, hal
for device in ("rocm", "cpu", "cuda", "rocm", "npu"):
    try:
        hal.select(device, {config!r}, dtype="bfloat16")
    except hal.Unsupported as error:
        print(str(error).replace(chr(10), " "))
from hal.cli import main
sys.argv[1:] = ["doctor"]
main()
"""


def test_a_torch_whose_import_failed_is_not_imported_again(tmp_path: Path) -> None:
    """A second import registers torch's operators twice, which may end the process."""
    shown = on_machine(AGAIN.format(config=GDN), None, broken_torch(tmp_path))
    assert "Failed to load the backend extension: torch_npu" in shown
    assert "torch could not be imported before in this process" in shown
    assert "TORCH_LIBRARY" not in shown
    assert shown.count("[library-missing] torch: needed torch; offered not importable here") >= 1


TURNED = """

_inner = {name}


def {name}({signature}):
    keep = initial_state.transpose(-1, -2).contiguous()
    given = dict(locals())
    given.pop("keep")
    out, ends, h = _inner(**{{**given, "initial_state": keep}})
    return out, ends.transpose(-1, -2).contiguous(), h
"""


def test_a_state_that_was_turned_around_is_found_by_a_call(tmp_path: Path) -> None:
    """The same signature with another state layout, as a later release of the vendor has it."""
    from hal_npu.symbols import SYMBOLS

    (symbol,) = (each for each in SYMBOLS if each.name == "chunk_gated_delta_rule_npu")
    shutil.copytree(FAKE, tmp_path / "packages")
    file = tmp_path / "packages" / "sgl_kernel_npu" / "fla" / "chunk.py"
    turned = TURNED.format(name=symbol.name, signature=symbol.signature.strip("()"))
    file.write_text(file.read_text() + turned)
    shown = on_machine(SELECT.format(config=GDN), cann(tmp_path), tmp_path / "packages")
    assert "[protocol-violation]" in shown and "another layout" in shown


def test_the_doctor_lists_every_symbol(tmp_path: Path) -> None:
    from hal_npu.symbols import SYMBOLS

    shutil.copytree(FAKE, tmp_path / "packages")
    gone = tmp_path / "packages" / "sgl_kernel_npu" / "mamba" / "speculative_state_scatter.py"
    gone.unlink()
    file = tmp_path / "packages" / "sgl_kernel_npu" / "mamba" / "causal_conv1d_verify.py"
    file.write_text(file.read_text().replace('= "silu",\n', '= "swish",\n'))
    code = "import sys; from hal.cli import main; sys.argv[1:] = ['doctor', '--json']; main()"
    shown = on_machine(code, cann(tmp_path), tmp_path / "packages")
    (provider,) = (p for p in json.loads(shown)["providers"] if p["name"] == "npu.ascend")
    lines = provider["probe"]
    assert lines[0].startswith("1 device of arch ascend910b, Ascend910B-fake")
    assert len(lines) == 1 + len(SYMBOLS)
    status = {line.split(": ")[0].rpartition(".")[2]: line for line in lines[1:]}
    assert status["kda_target_verify_npu"].endswith(": bound")
    assert ": absent (ModuleNotFoundError" in status["speculative_state_scatter_npu"]
    assert ": of unknown signature; expected " in status["causal_conv1d_linear_verify_npu"]
    assert status["causal_conv1d_update"].endswith(": known, not bound")
    assert status["chunk_kda_fwd"].endswith(": absent")


def reasons_beside(monkeypatch: pytest.MonkeyPatch, torch: Any) -> list[Reason]:
    """What `absent` finds where CANN is there and torch is this."""
    monkeypatch.setattr(machine, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(machine, "_unloadable", lambda name: "")
    monkeypatch.setitem(sys.modules, "torch", torch)
    return list(machine.absent())


def test_a_cuda_torch_that_sees_a_gpu_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)
    (reason,) = reasons_beside(monkeypatch, SimpleNamespace(cuda=cuda))
    assert reason.code is Code.DEVICE_ABSENT
    assert reason.offered == "torch for CUDA, which sees 2 devices"
    assert "CUDA_VISIBLE_DEVICES" in reason.fix


def test_a_torch_that_sees_no_gpu_stands_beside_an_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(is_available=lambda: False, device_count=lambda: 0)
    assert reasons_beside(monkeypatch, SimpleNamespace(cuda=cuda)) == []


@pytest.mark.parametrize(
    ("version", "driver", "count"),
    [("cuda: Optional[str] = '13.0'", 3, 3), ("cuda = None", 3, 0), ("cuda = '13.0'", None, 0)],
)
def test_gpus_are_counted_without_importing_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, driver: int | None, count: int
) -> None:
    (tmp_path / "version.py").write_text(f"git = 'cuda'\n{version}\n")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(machine, "find_spec", lambda name: spec)
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    def library(name: str) -> Any:
        if driver is None:
            raise OSError(name)
        return SimpleNamespace(cuInit=lambda flags: 0, cuDeviceGetCount=lambda place: 0)

    monkeypatch.setattr(machine.ctypes, "CDLL", library)
    monkeypatch.setattr(machine.ctypes, "c_int", lambda: SimpleNamespace(value=driver))
    monkeypatch.setattr(machine.ctypes, "byref", lambda value: value)
    monkeypatch.setattr(machine, "_unloadable", lambda name: "")
    found = list(machine.absent())
    assert [reason.offered for reason in found] == (
        [f"torch for CUDA, which sees {count} devices"] if count else []
    )
    assert "torch" not in sys.modules

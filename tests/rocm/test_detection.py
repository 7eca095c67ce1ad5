"""Which provider a machine gets: by what torch was built for and the whole arch name."""

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch

import hal
from hal.binding import located
from hal.device import Device
from hal_registry import Code, Presence, Reason
from hal_rocm.arches import ARCHES
from hal_rocm.probe import presence
from support.registry import run_python

CONFIG = Path(__file__).parents[1] / "data" / "configs" / "real" / "qwen3-next-80b-a3b.json"
FAKE = """
import sys, types, importlib.metadata as metadata
real = metadata.version
metadata.version = lambda name: "3.9.0" if name == "triton" else real(name)
sys.modules["triton"] = types.ModuleType("triton")
sys.modules["triton"].__version__ = "3.9.0"
sys.modules["triton"].__spec__ = types.SimpleNamespace()
import torch, hal
torch.version.hip, torch.version.cuda = {hip!r}, {cuda!r}
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 2
torch.cuda.get_device_capability = lambda index=None: (9, 0)
torch.cuda.get_device_properties = lambda index=None: types.SimpleNamespace(
    gcnArchName={name!r}, warpSize=64)
class Shell:
    conv = short_conv = delta_rule = scan = conv_state = None
"""
ASK = """
from hal import binding
from hal.selection import Selection
seen = []
binding.construct = lambda candidate, device, layouts: seen.append(candidate.name) or Shell()
try:
    hal.select({device!r}, {config!r})
except hal.Unsupported as error:
    print(error)
print("asked", *seen)
"""


def selected(device: str, *, name: str = "gfx942", hip: str | None = "7.1") -> str:
    """What `hal.select` says on a machine whose torch has these words, in a fresh process."""
    cuda = None if hip else "13.0"
    code = FAKE.format(hip=hip, cuda=cuda, name=name) + ASK.format(
        device=device, config=str(CONFIG)
    )
    ran: subprocess.CompletedProcess[str] = run_python(code)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("device", ["cuda:1", "rocm"])
def test_on_a_torch_for_rocm_the_amd_provider_alone_is_built(device: str) -> None:
    assert selected(device, name="gfx90a:sramecc+:xnack-").splitlines()[-1] == "asked rocm.triton"


def test_on_a_torch_for_cuda_the_amd_provider_is_never_built() -> None:
    assert selected("cuda", hip=None).splitlines()[-1] == "asked cuda.triton"
    said = selected("rocm", hip=None)
    assert said.splitlines()[-1] == "asked"
    assert "torch was built for CUDA 13.0" in said


def test_an_nvidia_arch_is_not_read_as_an_amd_one() -> None:
    said = selected("cuda:sm_90")
    assert said.splitlines()[-1] == "asked"
    assert "torch was built for ROCm 7.1" in said


def test_an_arch_outside_the_manifest_is_refused_with_the_list() -> None:
    said = selected("cuda", name="gfx1250")
    assert said.splitlines()[-1] == "asked"
    assert "[arch-unsupported]" in said
    assert "arch gfx1250" in said
    assert ", ".join(ARCHES) in said


@pytest.mark.parametrize("name", ["gfx906", "gfx1030", "gfx1200", "gfx1250", "gfx9", "gfx94"])
def test_arches_are_compared_by_their_whole_names(name: str) -> None:
    refusal = hal.explain(f"rocm:{name}", CONFIG).refusal
    assert refusal is not None
    assert {reason.code for reason in refusal.all_reasons()} == {Code.ARCH_UNSUPPORTED}


@pytest.mark.parametrize(
    ("version", "code"),
    [("3.5.1", Code.LIBRARY_VERSION), (None, Code.LIBRARY_MISSING), ("3.6.0+rocm7.1", None)],
)
def test_triton_is_a_module_whatever_its_distribution_is_called(
    version: str | None, code: Code | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_rocm(monkeypatch, "gfx942")
    with_triton(monkeypatch, version)
    found = presence(None)
    assert (found.code if isinstance(found, Reason) else None) == code


@pytest.mark.parametrize("version", ["main", "", "3", "3.5rc1"])
def test_a_triton_of_no_known_version_is_refused_by_its_version(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_rocm(monkeypatch, "gfx942")
    with_triton(monkeypatch, version)
    found = presence(None)
    assert isinstance(found, Reason)
    assert (found.code, found.offered) == (Code.LIBRARY_VERSION, f"version {version!r}")


@pytest.mark.parametrize("error", ["ImportError('libamdhip64.so')", "SystemExit(3)"])
def test_a_triton_that_cannot_be_imported_is_a_missing_library_with_its_cause(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "triton.py").write_text(f"raise {error}\n")
    on_rocm(monkeypatch, "gfx942")
    monkeypatch.delitem(sys.modules, "triton")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = presence(None)
    assert isinstance(found, Reason)
    assert (found.code, found.offered) == (Code.LIBRARY_MISSING, "an error")
    assert found.detail.startswith(error.partition("(")[0])


def with_triton(monkeypatch: pytest.MonkeyPatch, version: str | None = "3.9.0") -> None:
    module = ModuleType("triton")
    module.__spec__ = ModuleSpec("triton", None)
    monkeypatch.setattr(module, "__version__", version, raising=False)
    monkeypatch.setitem(sys.modules, "triton", None if version is None else module)


def on_rocm(monkeypatch: pytest.MonkeyPatch, name: str, count: int = 1) -> None:
    class Properties:
        gcnArchName = name

    def forbidden(index: int | None = None) -> tuple[int, int]:
        raise AssertionError("a capability was asked for")

    with_triton(monkeypatch)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", forbidden)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties())


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("features", ["", ":sramecc+:xnack-", ":xnack+"])
def test_the_probe_gives_the_arch_without_its_features_and_asks_for_no_capability(
    arch: str, features: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_rocm(monkeypatch, arch + features)
    assert presence(None) == presence(0) == Presence(1, arch, "torch for ROCm 7.1")


@pytest.mark.parametrize("name", ["", ":sramecc+:xnack-", " "])
def test_a_device_without_a_name_is_of_no_arch_that_is_offered(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_rocm(monkeypatch, name)
    assert presence(None) == Presence(1, "without a name", "torch for ROCm 7.1")
    with pytest.raises(hal.Unsupported) as refused:
        hal.select("rocm", CONFIG)
    assert {reason.code for reason in refused.value.reasons} == {Code.ARCH_UNSUPPORTED}
    assert "arch without a name" in str(refused.value)


def test_a_device_that_breaks_its_process_is_an_absent_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ends() -> int:
        raise SystemExit(3)

    on_rocm(monkeypatch, "gfx942")
    monkeypatch.setattr(torch.cuda, "device_count", ends)
    assert presence(None) == Presence(0, detail="SystemExit: 3")


def test_a_device_past_the_last_one_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    on_rocm(monkeypatch, "gfx942", count=2)
    assert presence(1) == Presence(2, "gfx942", "torch for ROCm 7.1")
    assert presence(2) == Presence(2, detail="torch for ROCm 7.1 sees 2 devices")


def test_a_broken_driver_is_an_absent_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(index: int) -> object:
        raise RuntimeError("driver is gone")

    on_rocm(monkeypatch, "gfx942")
    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    assert presence(None) == Presence(0, detail="RuntimeError: driver is gone")


@pytest.mark.parametrize(
    ("cuda", "built"), [("13.0", "for CUDA 13.0"), (None, "without ROCm")], ids=["cuda", "cpu"]
)
def test_another_torch_has_no_amd_device(
    cuda: str | None, built: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert presence(None) == Presence(0, detail=f"torch was built {built}")


@pytest.mark.parametrize(
    ("asked", "hip", "meant"),
    [
        ("cuda", "7.1", Device("rocm")),
        ("cuda:3", "7.1", Device("rocm", 3)),
        ("cuda:gfx950", "7.1", Device("rocm", None, "gfx950")),
        ("cuda:sm_90", "7.1", Device("cuda", None, "sm_90")),
        ("rocm:1", "7.1", Device("rocm", 1)),
        ("cpu", "7.1", Device("cpu")),
        ("cuda:3", None, Device("cuda", 3)),
        ("cuda:3", "", Device("cuda", 3)),
        ("rocm", None, Device("rocm")),
    ],
)
def test_cuda_means_rocm_where_torch_says_so(
    asked: str, hip: str | None, meant: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    assert located(Device.parse(asked)) == meant


def test_a_torch_that_does_not_say_what_it_was_built_for_is_not_for_rocm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch.version, "hip")
    assert located(Device.parse("cuda:1")) == Device("cuda", 1)


@pytest.mark.parametrize(
    ("name", "of_torch"),
    [("rocm", "cuda"), ("rocm:2", "cuda:2"), ("cuda:1", "cuda:1"), ("rocm:gfx942", "cuda"),
     ("npu:1", "npu:1")],
)  # fmt: skip
def test_tensors_of_amd_devices_have_the_type_that_torch_gives_them(
    name: str, of_torch: str
) -> None:
    assert Device.parse(name).torch_name == of_torch


def test_an_answer_by_manifests_alone_leaves_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1")
    answer = hal.explain("cuda", CONFIG)
    assert answer.selection is not None
    providers = {choice.provider for choice in answer.selection.choices.values()}
    assert {name.partition(".")[0] for name in providers} == {"cuda"}

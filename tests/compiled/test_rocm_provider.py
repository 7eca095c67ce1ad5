"""The AMD provider takes the table of its device's arch, and no other device."""

from types import SimpleNamespace

import pytest
import torch

from hal_rocm.arches import ARCHES
from hal_rocm.provider import TIGHTEST, TritonProvider, tuning
from hal_rocm.tables import table


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize("device", ["rocm", "rocm:1"])
def test_without_a_device_the_provider_takes_the_tightest_table(device: str) -> None:
    built = TritonProvider(device, {})
    assert built.tuning.table == table(TIGHTEST)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "rocmx", "hip"])
def test_a_device_that_is_not_amd_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match=f"device is '{device}', expected 'rocm' or 'rocm:N'"):
        TritonProvider(device, {})


@pytest.mark.parametrize("arch", ARCHES)
def test_float32_products_name_a_precision_that_the_arch_has(arch: str) -> None:
    assert tuning(arch).solve == {"mfma": "ieee", "wmma": "bf16x3"}[ARCHES[arch].unit]


@pytest.mark.parametrize(("index", "arch"), [(0, "gfx950"), (1, "gfx1201")])
def test_each_device_has_the_table_of_its_own_arch(
    index: int, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["gfx950:sramecc+:xnack-", "gfx1201"]
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda at: SimpleNamespace(gcnArchName=names[at])
    )
    assert TritonProvider(f"rocm:{index}", {}).tuning == tuning(arch)
    assert TritonProvider("rocm", {}).tuning == tuning("gfx950")


def test_a_given_tuning_asks_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> bool:
        raise AssertionError("the device was asked")

    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(torch.cuda, "is_available", asked)
    own = tuning("gfx942")
    assert TritonProvider("rocm", {"tuning": own}).tuning is own

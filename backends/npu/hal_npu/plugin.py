"""Manifest of the Ascend NPU provider; it offers nothing yet, and refusals say so."""

from hal_registry import API, Manifest, hookimpl

MANIFEST = Manifest(
    name="npu.ascend",
    device="npu",
    api=API,
    load="hal_npu.provider:AscendProvider",
    needs=("torch>=2.11", "torch-npu", "sgl-kernel-npu"),
    hints={"sgl-kernel-npu": "build it from the sgl-kernel-npu repository; it is not on PyPI"},
    offers={},
    note="this version of hybrid-hal-npu offers no operation",
)


@hookimpl
def hal_providers() -> list[Manifest]:
    """The one provider of this distribution."""
    return [MANIFEST]

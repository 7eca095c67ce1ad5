"""Manifest of the NVIDIA provider; it offers nothing yet, and refusals say so."""

from hal_registry import API, Manifest, hookimpl

MANIFEST = Manifest(
    name="cuda.triton",
    device="cuda",
    api=API,
    load="hal_cuda.provider:TritonProvider",
    needs=("torch>=2.11", "triton>=3.6"),
    hints={},
    offers={},
    note="this version of hybrid-hal-cuda offers no operation",
)


@hookimpl
def hal_providers() -> list[Manifest]:
    """The one provider of this distribution."""
    return [MANIFEST]

"""Manifest of the Ascend NPU provider: what its adapter serves, none of it ever run on an NPU."""

from collections.abc import Iterator
from dataclasses import replace

from hal_registry import API, Code, Manifest, Offer, Proof, Reason, Requirement, hookimpl

FLOATS = ("bfloat16", "float16", "float32")
HALVES = ("bfloat16", "float16")
ARCHES = ("ascend910b", "ascend910_93")
FEATURES = ("negative_slots", "strided")
DRAFTS = range(1, 9)
SCALAR = ("scalar", "ready_scalar")
CHANNEL = ("channel", "safe", "ready_channel")

CONV = Offer(
    dtypes=FLOATS,
    layouts=("CW", "WC"),
    activations=("silu", "none"),
    widths=range(2, 7),
    features=(*FEATURES, "bias"),
)
DELTA = Offer(
    dtypes=FLOATS,
    state_dtypes=("float32",),
    layouts=("VK", "KV"),
    gates=(*SCALAR, *CHANNEL),
    head_dims=range(16, 129, 8),
    ratios=range(1, 17),
    features=FEATURES,
)


def _with_drafts(offer: Offer) -> Offer:
    return replace(offer, verify=("chain",), verify_widths=DRAFTS)


OFFERS = {
    "conv.prefill": replace(CONV, track=(1,)),
    "conv.decode": CONV,
    "conv.verify": _with_drafts(CONV),
    "conv.commit": _with_drafts(CONV),
    "delta_rule.prefill": replace(DELTA, dtypes=HALVES, gates=SCALAR, track=(1,)),
    "delta_rule.decode": DELTA,
    "delta_rule.verify": _with_drafts(DELTA),
    "delta_rule.commit": _with_drafts(DELTA),
}

EVIDENCE = {
    "date": "2026-11-30",
    "versions": "sgl-kernel-npu 2026.08.21 (f425bdf1), triton 3.7.1 interpreter, torch 2.13.0+cpu",
    "report": "docs/npu.md",
}
"""Of the vendor's own kernels in Triton's interpreter, through this adapter; not on an NPU."""


def check(need: Requirement) -> Iterator[Reason]:
    """Refuse the prefill of channel gates: the vendor's package has only pieces of it."""
    if need.operation == "delta_rule.prefill" and set(need.gates) <= set(CHANNEL):
        yield Reason(
            Code.OPERATION_MISSING,
            "delta_rule.prefill of channel gates",
            need.why,
            "delta_rule.prefill of scalar gates",
            "no release of sgl-kernel-npu has a whole one, torch.ops.npu.chunk_kda_fwd",
            "install a provider for npu that offers delta_rule.prefill with channel gates",
        )


MANIFEST = Manifest(
    name="npu.ascend",
    device="npu",
    api=API,
    load="hal_npu.provider:AscendProvider",
    probe="hal_npu.probe:presence",
    needs=("torch>=2.11", "torch-npu", "sgl-kernel-npu"),
    hints={
        "sgl-kernel-npu": "take the archive for your CANN, torch and chip from the releases of "
        "sgl-project/sgl-kernel-npu; it is not on PyPI"
    },
    arches=ARCHES,
    check=check,
    offers=OFFERS,
    proofs=tuple(
        Proof(operation, dtype, "interpreter", **EVIDENCE)
        for operation, offer in OFFERS.items()
        for dtype in offer.dtypes
    ),
)


@hookimpl
def hal_providers() -> list[Manifest]:
    """The one provider of this distribution."""
    return [MANIFEST]

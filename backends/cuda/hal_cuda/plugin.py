"""Manifest of the NVIDIA provider: what parity checks on a device have covered, and no more."""

from dataclasses import replace

from hal_cuda.hopper.plugin import MANIFEST as HOPPER
from hal_registry import API, Manifest, Offer, Proof, hookimpl

FLOATS = ("bfloat16", "float16", "float32")
ARCHES = ("sm_90",)
FEATURES = ("negative_slots", "strided")
RATIOS = (1, 2, 3, 4, 8)
HEAD_DIMS = (
    (16, 24),
    (64, 64),
    (64, 96),
    (64, 128),
    (96, 192),
    (128, 64),
    (128, 128),
    (256, 256),
)
FUSED_DIMS = ((16, 24), (64, 96), (128, 128))
DRAFTS = range(1, 17)

CONV = Offer(
    dtypes=FLOATS,
    layouts=("ring", "CW", "WC"),
    activations=("silu", "none"),
    widths=range(2, 9),
    features=(*FEATURES, "bias"),
)
SHORT_CONV = replace(CONV, layouts=("ring",), activations=("none",), widths=range(3, 8))
DELTA = Offer(
    dtypes=FLOATS,
    state_dtypes=("float32",),
    layouts=("VK", "KV"),
    gates=("scalar", "channel", "safe", "ready_scalar", "ready_channel"),
    head_dims=HEAD_DIMS,
    ratios=RATIOS,
    features=FEATURES,
)
PREFILL_FUSED = replace(
    DELTA, layouts=("VK",), gates=("scalar",), head_dims=((128, 128),), ratios=(2,)
)
DECODE_FUSED = replace(
    DELTA,
    layouts=("ring", "VK"),
    gates=("scalar", "channel", "ready_scalar"),
    activations=("silu",),
    head_dims=FUSED_DIMS,
    ratios=(1, 2, 3),
    widths=(4,),
    features=(*FEATURES, "bias", "graph"),
)
SCAN = Offer(
    dtypes=FLOATS,
    state_dtypes=("float32",),
    layouts=("PN",),
    kinds=("mamba2", "mamba1", "lightning"),
    head_dims=(24, 32, 64, 80, 96, 128),
    ratios=range(1, 257),
    state_sizes=(8, 16, 48, 64, 128, 256),
    features=FEATURES,
)


def _captured(offer: Offer) -> Offer:
    return replace(offer, features=(*offer.features, "graph"))


def _drafts(offer: Offer) -> Offer:
    return replace(_captured(offer), verify=("chain", "tree"), verify_widths=DRAFTS)


OFFERS = {
    "conv.prefill": replace(CONV, track=(1,)),
    "conv.decode": _captured(CONV),
    "conv.verify": _drafts(CONV),
    "conv.commit": _drafts(CONV),
    "conv_state.step": Offer(
        dtypes=FLOATS,
        layouts=("ring", "CW", "WC"),
        kinds=("short_conv", "cca"),
        features=("negative_slots",),
    ),
    "short_conv.prefill": SHORT_CONV,
    "short_conv.decode": _captured(SHORT_CONV),
    "delta_rule.prefill": replace(DELTA, track=(64,)),
    "delta_rule.decode": _captured(DELTA),
    "delta_rule.verify": _drafts(DELTA),
    "delta_rule.commit": _drafts(DELTA),
    "delta_rule.decode_fused": DECODE_FUSED,
    "delta_rule.prefill_fused": PREFILL_FUSED,
    "scan.prefill": replace(SCAN, track=(64,)),
    "scan.decode": _captured(SCAN),
    "scan.verify": _drafts(SCAN),
    "scan.commit": _drafts(SCAN),
}

EVIDENCE = {
    "arch": "sm_90",
    "date": "2026-11-30",
    "versions": "Python 3.12.3, torch 2.11.0+cu130, triton 3.6.0",
    "report": "docs/reports/h200-2026-11-30.json",
}
"""Of the parity checks' last run; `benchmarks/gpu/proof.py` makes the report from theirs."""


MANIFEST = Manifest(
    name="cuda.triton",
    device="cuda",
    api=API,
    load="hal_cuda.provider:TritonProvider",
    probe="hal_cuda.probe:presence",
    needs=("torch>=2.11", "triton>=3.6"),
    hints={},
    arches=ARCHES,
    offers=OFFERS,
    proofs=tuple(
        Proof(operation, dtype, "hardware", **EVIDENCE) for operation in OFFERS for dtype in FLOATS
    ),
)


@hookimpl
def hal_providers() -> list[Manifest]:
    """The portable kernels, and those of Hopper, which win where they fit."""
    return [MANIFEST, HOPPER]

"""Manifest of the Hopper provider: what parity checks on a device have covered, and no more."""

from dataclasses import replace

from hal_registry import API, Manifest, Offer, Proof

PREFILL = Offer(
    dtypes=("bfloat16",),
    state_dtypes=("float32",),
    layouts=("VK",),
    gates=("scalar", "channel", "safe", "ready_scalar", "ready_channel"),
    head_dims=((128, 128),),
    ratios=(1, 2, 3, 4, 8),
    track=(64,),
    features=("negative_slots", "strided"),
)
OFFERS = {
    "delta_rule.prefill": PREFILL,
    "delta_rule.prefill_fused": replace(PREFILL),
}
EVIDENCE = {
    "arch": "sm_90",
    "date": "2026-11-30",
    "versions": "Python 3.12.3, torch 2.11.0+cu130, triton 3.6.0",
    "report": "docs/reports/h200-2026-11-30.json",
}
"""Of the parity checks' last run on a device."""

PROOFS = tuple(
    Proof(operation, dtype, "hardware", **EVIDENCE)
    for operation, offer in OFFERS.items()
    for dtype in offer.dtypes
)

MANIFEST = Manifest(
    name="cuda.hopper",
    device="cuda",
    api=API,
    load="hal_cuda.hopper.provider:HopperProvider",
    probe="hal_cuda.hopper.probe:presence",
    needs=("torch>=2.11", "triton>=3.6"),
    hints={},
    arches=("sm_90",),
    priority=10,
    note="compiled by NVRTC at the first use and kept in the user's cache",
    offers=OFFERS,
    proofs=PROOFS,
)

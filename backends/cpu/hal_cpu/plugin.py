"""Manifest of the embedded CPU provider: pure torch, no build step."""

from dataclasses import replace

from hal_registry import API, Manifest, Offer, Proof, hookimpl

FLOATS = ("float32", "bfloat16", "float16")
WIDTHS = range(2, 9)
DIMS = range(1, 257)
RATIOS = range(1, 17)
GROUP_SIZES = range(1, 257)
STATE_SIZES = range(1, 257)
DRAFTS = range(1, 33)
FEATURES = ("negative_slots", "strided")

CONV = Offer(
    dtypes=FLOATS,
    layouts=("CW", "WC"),
    activations=("silu", "none"),
    widths=WIDTHS,
    track=(1,),
    features=(*FEATURES, "bias"),
)
DELTA = Offer(
    dtypes=FLOATS,
    state_dtypes=("float32",),
    layouts=("VK", "KV"),
    gates=("scalar", "channel", "safe", "ready_scalar", "ready_channel"),
    head_dims=DIMS,
    ratios=RATIOS,
    track=(1,),
    features=FEATURES,
)
SCAN = Offer(
    dtypes=FLOATS,
    state_dtypes=("float32",),
    layouts=("PN",),
    kinds=("mamba2", "mamba1", "lightning"),
    head_dims=DIMS,
    ratios=GROUP_SIZES,
    state_sizes=STATE_SIZES,
    track=(1,),
    features=FEATURES,
)
SIDECAR = Offer(
    dtypes=FLOATS,
    layouts=("CW", "WC"),
    kinds=("short_conv", "cca"),
    features=("negative_slots",),
)


def _with_verify(interface: str, offer: Offer) -> dict[str, Offer]:
    """The four operations of an interface: prefill alone tracks, verify takes drafts."""
    decode = replace(offer, track=(), features=(*offer.features, "graph"))
    verify = replace(decode, verify=("chain", "tree"), verify_widths=DRAFTS)
    offers = {"prefill": offer, "decode": decode, "verify": verify, "commit": verify}
    return {f"{interface}.{verb}": each for verb, each in offers.items()}


OFFERS = {
    **_with_verify("conv", CONV),
    **_with_verify("delta_rule", DELTA),
    **_with_verify("scan", SCAN),
    "conv_state.step": SIDECAR,
}

EVIDENCE = {
    "date": "2026-11-30",
    "versions": "Python 3.11.7, torch 2.13.0+cpu",
    "report": "docs/reports/cpu.torch.json",
}
"""Of the conformance kit's last run; `make report` makes it anew, and a test compares the two."""

MANIFEST = Manifest(
    name="cpu.torch",
    device="cpu",
    api=API,
    load="hal_cpu.provider:TorchProvider",
    needs=("torch>=2.11",),
    offers=OFFERS,
    proofs=tuple(
        Proof(operation, dtype, "hardware", **EVIDENCE) for operation in OFFERS for dtype in FLOATS
    ),
)


@hookimpl
def hal_providers() -> list[Manifest]:
    """The one provider of this distribution."""
    return [MANIFEST]

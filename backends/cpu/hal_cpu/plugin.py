"""Manifest of the embedded CPU provider: pure torch, no build step."""

from hal_registry import API, Manifest, Offer, Proof, hookimpl

FLOATS = ("float32", "bfloat16", "float16")
WIDTHS = range(2, 9)
DIMS = range(1, 257)
RATIOS = range(1, 17)
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
OFFERS = {
    "conv.prefill": CONV,
    "conv.decode": CONV,
    "delta_rule.prefill": DELTA,
    "delta_rule.decode": DELTA,
    "conv_state.step": Offer(
        dtypes=FLOATS, layouts=("CW", "WC"), kinds=("short_conv",), features=("negative_slots",)
    ),
}

MANIFEST = Manifest(
    name="cpu.torch",
    device="cpu",
    api=API,
    load="hal_cpu.provider:TorchProvider",
    needs=("torch>=2.11",),
    offers=OFFERS,
    proofs=tuple(Proof(operation, dtype, "hardware") for operation in OFFERS for dtype in FLOATS),
)


@hookimpl
def hal_providers() -> list[Manifest]:
    """The one provider of this distribution."""
    return [MANIFEST]

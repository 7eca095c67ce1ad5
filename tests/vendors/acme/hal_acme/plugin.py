"""Manifest of the Acme provider: what it can do, as data; imports neither torch nor the vendor."""

from hal_registry import API, Manifest, Offer, hookimpl

CONV = Offer(
    dtypes=("float32", "bfloat16"),
    layouts=("WC",),
    activations=("silu", "none"),
    widths=range(2, 5),
    features=("negative_slots", "bias"),
)
DELTA = Offer(
    dtypes=("float32", "bfloat16"),
    state_dtypes=("float32",),
    layouts=("KV",),
    gates=("ready_scalar",),
    head_dims=range(16, 257, 16),
    ratios=(1, 2, 4, 8),
    features=("negative_slots", "strided"),
)

MANIFEST = Manifest(
    name="acme.torch",
    device="acme",
    api=API,
    load="hal_acme.provider:AcmeProvider",
    probe="hal_acme.provider:probe",
    needs=("torch>=2.11",),
    offers={
        "conv.prefill": CONV,
        "conv.decode": CONV,
        "delta_rule.prefill": DELTA,
        "delta_rule.decode": DELTA,
    },
)


@hookimpl
def hal_providers() -> list[Manifest]:
    """The one provider of this distribution."""
    return [MANIFEST]

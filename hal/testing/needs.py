"""The requirement that names a point of an offer."""

from hal.testing.sheets import Settings
from hal_registry import Offer, Requirement


def need_of(operation: str, settings: Settings, offer: Offer) -> Requirement:
    """The requirement that names every setting that a manifest declares."""
    s = settings.get
    bias = ("bias",) if s("bias") else ()
    features = [name for name in ("negative_slots", "strided") if name in offer.features]
    return Requirement(
        operation,
        "the conformance kit",
        dtype=s("dtype", ""),
        state_dtypes=(settings["state_dtype"],) if s("state_dtype") else (),
        gates=(settings["gate"],) if s("gate") else (),
        kind=s("kind", ""),
        activation=s("activation", ""),
        head_dims=_head_dims(settings),
        ratio=s("ratio") if s("kind", "mamba2") == "mamba2" else None,
        width=s("width"),
        state_size=s("N"),
        track=s("track"),
        verify=s("verify", ""),
        verify_width=s("verify_width"),
        features=(*bias, *features),
    )


def _head_dims(settings: Settings) -> tuple[int, int] | None:
    """(K, V) of a delta rule, (P, P) of a Mamba-2 scan; the others name none."""
    if "K" in settings:
        return settings["K"], settings["V"]
    return (settings["P"],) * 2 if settings.get("kind") == "mamba2" else None

"""How each operation is planned: a base of settings, and one declared field changed at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hal.testing.borders import each, members, pairs, typical
from hal_registry import DTYPES, LAYOUTS, Offer

Settings = Mapping[str, Any]
Axis = Iterator[tuple[str, Settings]]


def states_with(layout: str) -> list[str]:
    """The states that know a layout of that name."""
    return [state for state, names in LAYOUTS.items() if layout in names]


def first_dtype(offer: Offer) -> str:
    """The dtype that an offer is tested in first: float32 shows more than rounding."""
    return next((name for name in DTYPES if name in offer.dtypes), "")


def common(offer: Offer, base: Settings) -> Axis:
    """Fields that every operation has."""
    yield from ((f"dtype={name}", {"dtype": name}) for name in offer.dtypes)
    layouts = [name for name in offer.layouts if states_with(name) == states_with(base["layout"])]
    yield from ((f"layout={name}", {"layout": name}) for name in layouts)
    yield from ((f"track={grid}", {"track": grid}) for grid in members(offer.track))


def _conv_base(offer: Offer) -> Settings:
    return {
        "dtype": first_dtype(offer),
        "layout": _layout(offer, "conv"),
        "width": typical(offer.widths, 4),
        "bias": "bias" in offer.features,
    } | ({"activation": next(iter(offer.activations))} if offer.activations else {})


def _conv_axes(offer: Offer, base: Settings) -> Axis:
    yield from ((f"width={width}", {"width": width}) for width in each(offer.widths))
    yield from ((f"activation={word}", {"activation": word}) for word in offer.activations)
    yield from ((f"channels={n}", {"channels": n}) for n in (1, 7, 100))
    yield "without bias", {"bias": False}
    half = [name for name in offer.dtypes if name != "float32"]
    yield from (("float32 weight", {"dtype": n, "weight_dtype": "float32"}) for n in half[:1])
    yield "large inputs", {"scale": 300.0}


def _delta_base(offer: Offer) -> Settings:
    return {
        "dtype": first_dtype(offer),
        "state_dtype": next(name for name in DTYPES if name in offer.state_dtypes),
        "layout": _layout(offer, "recurrent"),
        "gate": next(iter(offer.gates)),
        "ratio": typical(offer.ratios, 2),
        **_dims(min(_base_pairs(offer), key=lambda pair: (pair[0] == pair[1], sum(pair)))),
    }


def _base_pairs(offer: Offer) -> Iterator[tuple[int, int]]:
    """Small (K, V), different where they may be."""
    yield from (pair for pair in offer.head_dims if isinstance(pair, tuple))
    single = [dim for dim in offer.head_dims if not isinstance(dim, tuple)]
    if single:
        first = typical(single, 16)
        rest = [dim for dim in single if dim != first]
        yield first, typical(rest, 24) if rest else first


def _dims(pair: tuple[int, int]) -> Settings:
    return {"K": pair[0], "V": pair[1]}


def _delta_axes(offer: Offer, base: Settings) -> Axis:
    yield from ((f"state={name}", {"state_dtype": name}) for name in offer.state_dtypes)
    for gate in offer.gates:
        doubled = {"gate": gate, "beta_scale": 2.0, "hard": True}
        yield f"gate={gate}, shared keys, beta to 2", doubled
        yield f"gate={gate}", {"gate": gate}
        if not gate.startswith("ready_"):
            yield f"gate={gate}, tail", {"gate": gate, "tail": True}
        if gate == "safe":
            yield "gate=safe, bound of -1", {"gate": gate, "bound": -1.0}
        if gate.startswith("ready_"):
            yield from ((f"gate={gate}, g={g}", {**doubled, "log_g": g}) for g in (-1e-3, -1e-4))
    for pair in pairs(offer.head_dims):
        yield f"K={pair[0]}, V={pair[1]}", _dims(pair)
    yield from ((f"HV/H={ratio}", {"ratio": ratio}) for ratio in members(offer.ratios))
    odd = next((ratio for ratio in members(offer.ratios) if ratio % 2), base["ratio"])
    yield "H=1", {"H": 1}
    yield f"H=3, HV/H={odd}", {"H": 3, "ratio": odd}
    yield "inputs of 1e-4", {"scale": 1e-4}
    yield "large values", {"v_scale": 300.0}


def _plain_axes(offer: Offer, base: Settings) -> Axis:
    yield from _delta_axes(offer, base)
    yield "without the norm", {"qk_l2norm": False, "scale": 0.2}


def _norm_axes(offer: Offer, base: Settings) -> Axis:
    yield from _delta_axes(offer, base)
    yield from ((f"norm, gate={gate}", {"gate": gate, "norm": True}) for gate in offer.gates)


def _fused_base(offer: Offer) -> Settings:
    conv = _conv_base(offer)
    return {**conv, **_delta_base(offer), "conv_layout": conv["layout"]}


def _fused_axes(offer: Offer, base: Settings) -> Axis:
    yield from _norm_axes(offer, base)
    yield from ((f"width={width}", {"width": width}) for width in each(offer.widths))
    rings = [name for name in offer.layouts if name in LAYOUTS["conv"]]
    yield from ((f"conv layout={name}", {"conv_layout": name}) for name in rings)


def _scan_base(offer: Offer) -> Settings:
    kind = next(name for name in ("mamba2", *offer.kinds) if name in offer.kinds)
    mamba2 = {"P": typical(_singles(offer), 8), "ratio": typical(offer.ratios, 2)}
    return {
        "dtype": first_dtype(offer),
        "state_dtype": next(name for name in DTYPES if name in offer.state_dtypes),
        "layout": _layout(offer, "scan"),
        "kind": kind,
        "N": typical(offer.state_sizes, 16),
    } | (mamba2 if "mamba2" in offer.kinds else {})


def _singles(offer: Offer) -> list[int]:
    """Head dims of a scan, where both of a pair are P."""
    return [dim[0] if isinstance(dim, tuple) else dim for dim in offer.head_dims]


def _scan_axes(offer: Offer, base: Settings) -> Axis:
    yield from ((f"state={name}", {"state_dtype": name}) for name in offer.state_dtypes)
    for kind in offer.kinds:
        yield f"kind={kind}", {"kind": kind}
        yield f"kind={kind}, z", {"kind": kind, "z": True}
        if kind != "lightning":
            yield f"kind={kind}, tail", {"kind": kind, "tail": True}
        limits = ((0.0, 0.1), (0.5, float("inf"))) if kind != "lightning" else ()
        for limit in limits:
            yield f"kind={kind}, dt in {limit[0]}..{limit[1]}", {"kind": kind, "dt_limit": limit}
    yield from ((f"N={size}", {"N": size}) for size in members(offer.state_sizes))
    if "mamba2" in offer.kinds:
        yield from ((f"P={dim}", {"P": dim}) for dim in members(_singles(offer)))
        yield from ((f"H/G={ratio}", {"ratio": ratio}) for ratio in members(offer.ratios))
    yield from ((f"G={groups}", {"G": groups}) for groups in (1, 3))
    yield "large inputs", {"x_scale": 100.0}
    half = [name for name in offer.dtypes if name != "float32"]
    yield from (("float32 dt", {"dtype": name, "dt_dtype": "float32"}) for name in half[:1])
    for kind in (kind for kind in offer.kinds if kind != "lightning"):
        bare = {"kind": kind, "dt_bias": False}
        yield f"kind={kind}, without D and dt bias", {**bare, "D": False}
        limit = (0.001, 0.1)
        yield f"kind={kind}, dt as it is", {**bare, "dt_softplus": False, "dt_limit": limit}


def _layout(offer: Offer, state: str) -> str:
    return next(name for name in offer.layouts if name in LAYOUTS[state])


@dataclass(frozen=True, slots=True)
class Sheet:
    """How an operation is planned: fields an offer may not leave out, a base, and variations."""

    required: tuple[str, ...]
    base: Callable[[Offer], Settings]
    axes: Callable[[Offer, Settings], Axis]


_CONV = Sheet(("dtypes", "layouts", "widths"), _conv_base, _conv_axes)
_RECURRENT: Final = ("dtypes", "state_dtypes", "layouts", "gates", "head_dims", "ratios")
_FUSED = Sheet((*_RECURRENT, "widths", "activations"), _fused_base, _fused_axes)
_NAMED: Final = ("dtypes", "state_dtypes", "layouts", "kinds", "state_sizes")
_SCANS = Sheet(_NAMED, _scan_base, _scan_axes)


def _verify(sheet: Sheet) -> Sheet:
    """The plan of a verify operation: what prefill has, at every shape and border of width."""

    def base(offer: Offer) -> Settings:
        shape, width = next(iter(offer.verify)), typical(offer.verify_widths, 4)
        return {**sheet.base(offer), "verify": shape, "verify_width": width}

    def axes(offer: Offer, settings: Settings) -> Axis:
        yield from sheet.axes(offer, settings)
        for shape in offer.verify:
            for width in members(offer.verify_widths):
                yield f"{shape} of {width}", {"verify": shape, "verify_width": width}

    return Sheet((*sheet.required, "verify", "verify_widths"), base, axes)


_DELTA = Sheet(_RECURRENT, _delta_base, _plain_axes)
SHEETS: Final[Mapping[str, Sheet]] = {
    "conv.prefill": _CONV,
    "conv.decode": _CONV,
    "short_conv.prefill": _CONV,
    "short_conv.decode": _CONV,
    "delta_rule.prefill": _DELTA,
    "delta_rule.decode": _DELTA,
    "delta_rule.prefill_fused": Sheet(_RECURRENT, _delta_base, _norm_axes),
    "delta_rule.decode_fused": _FUSED,
    "scan.prefill": _SCANS,
    "scan.decode": _SCANS,
    "conv.verify": _verify(_CONV),
    "delta_rule.verify": _verify(_DELTA),
    "scan.verify": _verify(_SCANS),
}
"""The plan of every operation that is called with tokens."""

"""The manifest as a test plan: every declared field becomes trials at its borders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Final

import torch

from hal.model.spec import GateKind
from hal.testing.borders import members
from hal.testing.case import Case
from hal.testing.conv_cases import conv_case, short_conv_case
from hal.testing.corner import corner
from hal.testing.delta_cases import Delta, delta_case
from hal.testing.edits import with_pads
from hal.testing.fused_cases import decode_fused_case, prefill_fused_case
from hal.testing.joint import CHUNK_EDGES, Batch, large, pairwise
from hal.testing.needs import need_of
from hal.testing.rows import NAN, Rows, make_rows
from hal.testing.scan_cases import Scan, scan_case
from hal.testing.sheets import SHEETS, Settings, Sheet, common, states_with
from hal_registry import Candidate, Manifest, Offer, Requirement, interface_of, judge

PACKED: Final = (
    (5, "fork"),
    (0, "continue"),
    (1, "continue"),
    (70, "fresh"),
    (2, "stateless"),
    (0, "fork"),
    (1, "fork"),
    (3, "fresh"),
    (2, "continue"),
    (1, "score"),
    (4, "twin"),
    (0, "pad"),
)
TOKENS: Final = tuple(
    (1, k) for k in ("fork", "pad", "continue", "fresh", "stateless", "twin", "pad")
)
WITHOUT_NONE: Final = frozenset({"continue", "fork", "twin"})
"""Kinds of rows that have both slots."""

ADMISSIONS: Final = frozenset({"tf32"})
"""Feature words that admit a weakness; nobody requires them."""

CHUNKED: Final = frozenset({"prefill", "prefill_fused", "verify"})


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """One declared point of an operation: how to make cases there, and the need that names it."""

    operation: str
    label: str
    settings: Settings
    offer: Offer
    batch: Batch = ()
    arch: str = ""

    def __str__(self) -> str:
        """What the trial is called in reports: the operation and what is special."""
        return f"{self.operation}: {self.label}"

    @property
    def decode(self) -> bool:
        """Whether every row is one token."""
        return self.operation.endswith((".decode", ".decode_fused"))

    @property
    def room(self) -> int:
        """The width that scratch is asked for: a declared one above the drafts', if there is."""
        width: int = self.settings["verify_width"]
        return max(w for w in self.offer.verify_widths if w <= 2 * width + 1)

    @property
    def kind(self) -> str:
        """The class of limits that the operation is held to."""
        interface, _, verb = self.operation.partition(".")
        if interface in ("conv", "short_conv") or verb not in CHUNKED:
            return "one rounding"
        tf32 = "tf32" in self.offer.features and self.settings["dtype"] == "float32"
        return "tf32" if tf32 else "chunked"

    @property
    def need(self) -> Requirement:
        """The requirement that a model of these settings would have."""
        return replace(need_of(self.operation, self.settings, self.offer), arch=self.arch)

    @property
    def layouts(self) -> dict[str, str]:
        """The layouts that the provider is built with, by state."""
        own = {name: self.settings["layout"] for name in states_with(self.settings["layout"])}
        conv = self.settings.get("conv_layout")
        return own | ({"conv": conv} if conv else {})

    def case(self, batch: Batch = (), *, seed: int = 0, pads: int = 3, **changes: Any) -> Case:
        """A case of these settings over a batch of (length, kind) rows."""
        settings = {**self.settings, **changes}
        settings.pop("verify", None)
        rows = batch or self.batch or (TOKENS if self.decode else PACKED)
        if width := settings.pop("verify_width", None):
            most = max(self.offer.verify_widths)
            rows = [(min(n, most), kind) for n, kind in batch or self.batch or verify_batch(width)]
        if "negative_slots" not in self.offer.features:
            rows = [row for row in rows if row[1] in WITHOUT_NONE]
        made = make_rows(rows, seed=seed, pads=0 if self.decode else pads, spare=20)
        made = replace(made, slots=made.slots + 1)  # nobody's slot is where index -1 leads
        if track := settings.pop("track", None):
            settings["track"] = track_points(made, track)
        case = BUILDERS[self.operation](made, seed=seed, **_arguments(self.operation, settings))
        case = replace(case, operation=self.operation)
        return with_pads(case, NAN) if self.decode else case


def track_points(rows: Rows, grid: int) -> torch.Tensor:
    """Points at the first, a middle and the last multiple of every row, and unused ones.

    The last row comes first, since nothing promises an order.
    """
    used = {*rows.src, *rows.dst}
    free = iter(slot for slot in range(1, rows.slots) if slot not in used)
    counts = [
        (row, count)
        for row, n in enumerate(rows.lengths)
        for count in sorted({grid, (n // 2) // grid * grid, n // grid * grid})
        if 0 < count <= n
    ]
    pairs = zip(counts, free, strict=False)
    points = [[row, count, slot] for (row, count), slot in pairs][::-1]
    return torch.tensor([[0, grid, -1], *points, [99, 99, -7]], dtype=torch.int32)


_DELTA: Final = frozenset(f.name for f in fields(Delta))
_SCAN: Final = frozenset(f.name for f in fields(Scan))


def _arguments(operation: str, settings: Settings) -> dict[str, Any]:
    """Settings as the case builder of the operation takes them."""
    given = {**settings}
    for name in ("dtype", "state_dtype", "weight_dtype", "dt_dtype"):
        if name in given:
            given[name] = getattr(torch, given[name])
    if given.get("activation") == "none":
        given["activation"] = None
    if interface_of(operation) == "delta_rule":
        ready, ratio = given["gate"].startswith("ready_"), given.pop("ratio")
        given["per_channel"] = given["gate"].endswith("channel")
        given["gate"] = None if ready else GateKind(given["gate"])
        heads = given.pop("H", 2)
        dims = {"HV": heads * ratio, **{n: given.pop(n) for n in _DELTA & set(given)}}
        given["dims"] = Delta(H=heads, **dims)
    elif interface_of(operation) == "scan":
        groups = given.pop("G", 2)
        dims = {n: given.pop(n) for n in _SCAN & set(given)}
        given["dims"] = Scan(G=groups, H=groups * given.pop("ratio", 2), **dims)
    return given


def _scan(rows: Rows, *, state_dtype: torch.dtype, layout: str, **settings: Any) -> Case:
    """A scan whose state is kept in another dtype than the case's own."""
    case = scan_case(rows, **settings)
    state = case.args["state"]
    return case if state.dtype == state_dtype else case.replace(state=state.to(state_dtype))


def verify_batch(width: int) -> Batch:
    """Rows of at most `width` drafts: full ones, shorter ones, and one without a draft."""
    full = tuple((width, kind) for kind in ("continue", "fork", "stateless"))
    ends = ((max(1, width - 1), "fresh"), (width, "twin"), (0, "pad"))
    return (*full, (1, "fork"), (0, "fork"), *ends)


BUILDERS: Final[Mapping[str, Callable[..., Case]]] = {
    "conv.prefill": conv_case,
    "conv.decode": partial(conv_case, decode=True),
    "short_conv.prefill": short_conv_case,
    "short_conv.decode": partial(short_conv_case, decode=True),
    "delta_rule.prefill": delta_case,
    "delta_rule.decode": partial(delta_case, decode=True),
    "delta_rule.prefill_fused": prefill_fused_case,
    "delta_rule.decode_fused": decode_fused_case,
    "scan.prefill": _scan,
    "scan.decode": partial(_scan, decode=True),
    "conv.verify": conv_case,
    "delta_rule.verify": delta_case,
    "scan.verify": _scan,
}
"""How cases of an operation are made."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The trials of a manifest: `base` one an operation, `trials` all, `refused` by its check.

    `corners` has another one an operation, made of the last words where `base` has the first.

    Those of verify are apart in `verify`, since they are judged together with commit.
    `lacks` names the required fields that an offer leaves out, by operation.
    """

    base: dict[str, Trial] = field(default_factory=dict)
    corners: dict[str, Trial] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    refused: list[Trial] = field(default_factory=list)
    verify: list[Trial] = field(default_factory=list)
    lacks: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest, arch: str = "") -> Plan:
        """Plan all operations that the manifest offers on an arch, if one is given."""
        plan, candidate = cls(), Candidate(manifest, "", "")
        for operation, offer in manifest.offers.items():
            arches = offer.arches or manifest.arches
            if operation in SHEETS and not (arch and arches and arch not in arches):
                plan._add(candidate, Trial(operation, "plain", {}, offer, arch=arch))
        return plan

    def _add(self, candidate: Candidate, bare: Trial) -> None:
        operation, offer, sheet = bare.operation, bare.offer, SHEETS[bare.operation]
        if missing := [name for name in sheet.required if not getattr(offer, name)]:
            self.lacks[operation] = missing
            return

        def fits(trial: Trial) -> bool:
            return judge(candidate, [trial.need]).fits(operation)

        first = replace(bare, settings=sheet.base(offer))
        found = [first, *_variations(first, sheet)]
        last = _opposite(first, fits)
        if last.settings != first.settings and fits(last):
            self.corners[operation] = last
            found += [last, *_variations(last, sheet, joint=False)]
        fitting = [trial for trial in found if fits(trial)]
        verify = operation.endswith(".verify")
        (self.verify if verify else self.trials).extend(fitting)
        self.refused.extend(trial for trial in found if trial not in fitting)
        if fitting and not verify:
            self.base[operation] = fitting[0]


def _opposite(first: Trial, fits: Callable[[Trial], bool]) -> Trial:
    """The trial of the last words, as far as they go together."""
    settings = corner(first.offer, first.settings, lambda s: fits(replace(first, settings=s)))
    return replace(first, label="corner", settings=settings)


def _variations(base: Trial, sheet: Sheet, *, joint: bool = True) -> Iterator[Trial]:
    """The base with a declared field or two changed, and sizes beyond those of the base."""
    for trial in _changed(base, sheet, joint=joint):
        yield trial if joint else replace(trial, label=f"{base.label}, {trial.label}")


def _changed(base: Trial, sheet: Sheet, *, joint: bool) -> Iterator[Trial]:
    offer, settings = base.offer, base.settings
    prefill = not base.decode and "verify" not in settings
    for label, changes in (*common(offer, settings), *sheet.axes(offer, settings)):
        if prefill or "track" not in changes:
            yield replace(base, label=label, settings={**settings, **changes})
    for label, changes, batch in (
        *large(base.operation, offer, settings),
        *(pairwise(offer, settings) if joint else ()),
    ):
        if prefill or not (batch == CHUNK_EDGES or "track" in changes):
            yield replace(base, label=label, settings={**settings, **changes}, batch=batch)
    if prefill:
        yield replace(base, label="chunk edges", batch=CHUNK_EDGES)
        for grid in (grid for grid in members(offer.track) if grid > 32):
            batch = ((2 * grid + 3, "fork"), (grid, "fresh"), (1, "continue"))
            tracked = {**settings, "track": grid}
            yield replace(base, label=f"track={grid}, long", settings=tracked, batch=batch)

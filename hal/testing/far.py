"""A case moved to slots whose first element lies past 2^32, where 32-bit offsets have wrapped."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hal.testing.metric import by_head, worst
from hal.testing.rows import i32

if TYPE_CHECKING:
    from hal.testing.case import Call, Case, Pools


@dataclass(frozen=True, slots=True, eq=False)
class Far:
    """A case of one row that continues in its slot, and may have track points."""

    place: torch.device
    case: Case
    kind: str

    @property
    def size(self) -> int:
        """Elements of a slot of the first pool."""
        return prod(self.case.args[self.case.pools[0]].shape[1:])

    @property
    def names(self) -> dict[int, int]:
        """The far slot of each slot that is written, the row's own first."""
        first = 2**32 // self.size + 2
        return {slot: first + i for i, slot in enumerate(self.case.rows.ends(self.case.track))}

    def check(self, call: Call) -> None:
        """Assert that the far slots hold what the oracle says, and nothing was written nearby."""
        case, name, names = self.case, self.case.pools[0], self.names
        with tempfile.TemporaryDirectory() as folder:
            pools = self._pools(Path(folder))
            moved = self._moved(pools)
            got = call(**moved.args, **moved.options)
            want, ends = case.expect()
            limits = case.limits(self.kind)
            assert by_head(got, want, case.heads) <= limits[0]
            pool = pools[name]
            for slot, far in names.items():
                mine = self._held(moved, {far}, pool)
                right = self._held(case, {slot}, ends)
                assert worst(mine, right, 1 if case.heads else 0) <= limits[1], f"slot {far}"
            assert not pool[self._wrapped()].any(), "a slot of a wrapped offset was written"

    def _held(self, case: Case, slots: set[int], pool: Tensor) -> Tensor:
        """What one of the written slots holds."""
        order = sorted(case.rows.ends(case.track))
        return case.held(case.pools[0], pool)[[order.index(slot) for slot in slots]][0].cpu()

    def _pools(self, folder: Path) -> Pools:
        """Pools that reach to the last far slot, with the row's start state in its own."""
        (source,), (own, *_) = self.case.rows.src, self.names.values()
        pools = {}
        for each in self.case.pools:
            near, last = self.case.args[each], max(self.names.values())
            pools[each] = _huge(self.place, last + 1, near, folder / each)
            pools[each][own] = near[source].to(pools[each].device)
        return pools

    def _moved(self, pools: Pools) -> Case:
        """The case in its far slots."""
        case, names = self.case, self.names
        own = next(iter(names.values()))
        options = dict(case.options)
        if case.track is not None:
            points = [[row, n, names.get(slot, slot)] for row, n, slot in case.track.tolist()]
            options["track"] = torch.tensor(points, dtype=torch.int32)
        rows = replace(case.rows, src=(own,), dst=(own,))
        moved = replace(case, rows=rows, options=options)
        return moved.replace(**pools, src=i32(own), dst=i32(own))

    def _wrapped(self) -> list[int]:
        """Where offsets of too few bits lead, and slots beside the far ones."""
        found = {1, min(self.names.values()) - 1}
        for far in self.names.values():
            found |= {(far * self.size % 2**bits) // self.size for bits in (31, 32)}
        return sorted(found)


def _huge(place: torch.device, slots: int, like: Tensor, path: Path) -> Tensor:
    """A dense pool whose last slots lie past 2^32 elements; on the CPU it is a file with holes."""
    count = slots * prod(like.shape[1:])
    if place.type != "cpu":
        flat = torch.zeros(count, dtype=like.dtype, device=place)
    else:
        path.touch()
        flat = torch.from_file(str(path), shared=True, size=count, dtype=like.dtype)
    return flat.view(slots, *like.shape[1:])

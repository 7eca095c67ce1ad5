"""Scan layers bound to their providers: Mamba-2, Mamba-1 and lightning attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from hal.runtime.batch import Mode
from hal.runtime.gates import grouped_norm
from hal.runtime.phases import Phases, not_by_phase
from hal.runtime.seam import (
    check_act,
    check_beside,
    check_once,
    check_tokens,
    failed,
    filling,
    result,
    verifier,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from hal.interfaces import Scan
    from hal.model.spec import ScanDims
    from hal.runtime.bound_conv import BoundConv
    from hal.runtime.params import ScanParams
    from hal.runtime.seam import Current, Draft
    from hal.runtime.step import Step


@dataclass(slots=True)
class ScanLayer:
    """A scan layer, bound; a step's prefill and decode rows go through one call.

    A Mamba-2 layer is called with mixed `[T, C]` before the conv (x, B, C side by side), dt raw
    `[T, H]`, and z `[T, I]` or None; the result is `[T, I]`, normed and gated where z is given.
    Mamba-1 projects dt, B and C from the conv's output, and lightning has no conv: their engines
    call `conv` and `scan`.
    """

    phases: ClassVar[Phases] = Phases.UNIFIED

    current: Current
    dims: ScanDims
    params: ScanParams
    bound_conv: BoundConv | None
    prefill: Scan
    decode: Scan
    state: Tensor
    A: Tensor
    dtype: torch.dtype
    verify: Scan | None = None
    draft: Draft | None = None
    ran: Step | None = None
    over_ranks: Callable[[Tensor], Tensor] | None = None
    """The mean over the ranks that share a group of the norm; None: no group is cut."""

    def __call__(self, mixed: Tensor, dt: Tensor, z: Tensor | None = None) -> Tensor:
        """Conv, split, scan, and the gated norm or the gate inside the scan where z is given."""
        dims, tokens = self.dims, mixed.shape[0]
        check_tokens("mixed", mixed, (tokens, dims.I + 2 * dims.G * dims.N))
        check_beside("dt", dt, (tokens, dims.H))
        normed = self.params.norm_weight is not None
        if z is not None:
            check_beside("z", z, (tokens, dims.I))
            if not normed:
                check_act("z", z, self.dtype, self.current.get())
        sizes = (dims.I, dims.G * dims.N, dims.G * dims.N)
        x, B, C = self.conv(mixed).split_with_sizes(sizes, dim=-1)
        heads = (tokens, dims.H, dims.P)
        y = self.scan(
            x.view(heads),
            dt,
            B.view(tokens, dims.G, dims.N),
            C.view(tokens, dims.G, dims.N),
            z.view(heads) if z is not None and not normed else None,
        ).reshape(tokens, dims.I)
        if z is None or self.params.norm_weight is None:
            return y
        groups = dims.norm_groups or 1
        weight, eps = self.params.norm_weight, self.params.norm_eps
        before, over_ranks = self.params.norm_before_gate, self.over_ranks
        out = grouped_norm(y, z, weight, eps, groups, before, over_ranks)
        return self.current.get().clear_pads(out)

    def forward(self, mixed: Tensor, dt: Tensor, z: Tensor | None = None) -> Tensor:
        """The layer under the name that engines know: prefill and decode rows in one call."""
        return self(mixed, dt, z)

    def forward_decode(self, mixed: Tensor, dt: Tensor, z: Tensor | None = None) -> Tensor:
        """Not offered; the error names the call that is."""
        raise not_by_phase("forward_decode", "forward(mixed, dt, z)")

    def forward_extend(self, mixed: Tensor, dt: Tensor, z: Tensor | None = None) -> Tensor:
        """Not offered; the error names the call that is."""
        raise not_by_phase("forward_extend", "forward(mixed, dt, z)")

    def conv(self, mixed: Tensor) -> Tensor:
        """The convolution alone, `[T, C]` to `[T, C]`."""
        if self.bound_conv is None:
            raise ValueError("this scan layer has no conv")
        return self.bound_conv(mixed, self.current.get())

    def heads(self) -> tuple[ScanLayer, ...]:
        """A Mamba-1 layer head by head, for model code that scans them one by one (Zamba).

        Each is a view of this layer's state and weights, without the conv: x, dt and z `[T, I/G]`.
        """
        groups, params = self.dims.G, self.params
        if groups == 1:
            return (self,)
        if self.draft is not None:
            raise ValueError("a scan that is run head by head has no verify")
        dims = replace(self.dims, H=1, P=self.dims.I // groups, G=1)
        cuts = [slice(i * dims.P, (i + 1) * dims.P) for i in range(groups)]
        return tuple(
            replace(
                self,
                dims=dims,
                params=replace(
                    params,
                    A_log=params.A_log[cut],
                    D=None if params.D is None else params.D[cut],
                    dt_bias=None if params.dt_bias is None else params.dt_bias[cut],
                ),
                bound_conv=None,
                state=self.state[:, cut],
                A=self.A[cut],
            )
            for cut in cuts
        )

    def scan(
        self, x: Tensor, dt: Tensor | None, B: Tensor, C: Tensor, z: Tensor | None = None
    ) -> Tensor:
        """The recurrence alone, D skip and z included; dt is raw, its bias is the layer's."""
        step = self.current.get()
        for name, tensor in (("x", x), ("B", B), ("C", C), ("z", z)):
            if tensor is not None:
                check_act(name, tensor, self.dtype, step)
        if dt is not None:
            check_beside("dt", dt)
        if step.mode is Mode.VERIFY:
            return self._verify(x, dt, B, C, z, step)
        check_once(self.ran, step, "the scan")
        try:
            out = self._run(x, dt, B, C, z, step)
        except RuntimeError as error:
            raise failed("scan", error, x, B, C, self.state) from error
        self.ran = step
        return result("scan", out, x.shape, x.dtype)

    def _run(
        self, x: Tensor, dt: Tensor | None, B: Tensor, C: Tensor, z: Tensor | None, step: Step
    ) -> Tensor:
        params, limit, soft = self.params, self.dims.dt_limit, dt is not None
        rest = (B, C, params.D, params.dt_bias, z, self.state, step.src, step.dst)
        if step.mode is Mode.DECODE:
            decode = step.opaque(self.decode.decode)
            out = decode(x, dt, self.A, *rest, dt_limit=limit, dt_softplus=soft)
            step.track_decode(self.state)
            return out
        rows = (step.query_start_loc, step.max_len)
        return self.prefill.prefill(
            x, dt, self.A, *rest, *rows, dt_limit=limit, dt_softplus=soft, track=step.track
        )

    def _verify(
        self, x: Tensor, dt: Tensor | None, B: Tensor, C: Tensor, z: Tensor | None, step: Step
    ) -> Tensor:
        rule, draft = verifier(self.verify, self.draft)
        with filling(step, (draft,), "scan.verify", x, B, C, self.state):
            out = step.opaque(rule.verify)(
                x, dt, self.A, B, C, self.params.D, self.params.dt_bias, z, self.state, step.src,
                step.query_start_loc, step.max_len, draft.scratch,
                dt_limit=self.dims.dt_limit, dt_softplus=dt is not None, parents=step.parents,
            )  # fmt: skip
            return result("scan.verify", out, x.shape, x.dtype)

    def check_verified(self, step: Step) -> None:
        """Refuse a commit of a step whose tokens are not in the scratch."""
        verifier(self.verify, self.draft)[1].take(step, "a scan")
        if self.bound_conv is not None:
            self.bound_conv.check_verified(step)

    def commit(self, step: Step, last: Tensor, dst: Tensor | None = None) -> None:
        """Leave the states after each row's accepted path in its `dst`, by default the step's."""
        rule, draft = verifier(self.verify, self.draft)
        scratch = draft.take(step, "a scan")
        target = step.dst if dst is None else dst
        if self.bound_conv is not None:
            self.bound_conv.commit(step, last, target)
        commit = step.opaque(rule.commit)
        commit(self.state, scratch, step.src, target, step.query_start_loc, last)

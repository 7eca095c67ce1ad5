"""What of `hal` stands where a mixer of transformers calls its kernels.

A mixer's forward looks its kernels up among its module's names. Bound to `hal`, one instance runs
the same code over a copy of those names in which the kernels are bound layers. Without a cache a
mixer takes its branch for many tokens, for prompts and decode rows alike, so the functions of that
branch are all there is to replace. A mixer that calls no kernel gets another forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import torch

from hal.runtime.cca_layer import CcaLayer
from hal.runtime.layers import DeltaLayer
from hal.runtime.scan_layer import ScanLayer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from hal.integrations.transformers.witness import Place

CONV: Final = "causal_conv1d_fn"
DELTA: Final = "torch_chunk_gated_delta_rule"
KDA: Final = "chunk_kimi_delta_attention"
SCAN: Final = "mamba2_chunk_scan"
HEAD_SCAN: Final = "mamba_selective_scan"

LIGHTNING: Final = "set_linear_cache"
CCA: Final = "conv_qk_grouped"
"""Names in the forward of a mixer without kernels: it is known by them."""


class Seam(Protocol):
    """Stands in for one kernel of one layer; a step calls it `calls` times."""

    calls: int

    @property
    def __call__(self) -> Callable[..., object]:
        """Takes what the kernel takes."""
        ...


class ConvSeam:
    """Stands for `causal_conv1d_fn`: `[1, C, T]` to `[1, C, T]` over the step's rows."""

    calls = 1

    def __init__(self, place: Place) -> None:
        self._place = place

    def __call__(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Convolve with the weights that were bound; `weight` and `bias` are the same ones."""
        place, layer = self._place, self._place.layer
        if isinstance(layer, CcaLayer) or layer.bound_conv is None:
            raise place.error("it has no conv, but one was called")
        if activation != layer.bound_conv.activation:
            bound = layer.bound_conv.activation
            raise place.error(f"its conv has activation {activation}, hal bound {bound}")
        place.note(kwargs)
        return layer.conv(hidden_states[0].transpose(0, 1)).transpose(0, 1)[None]


class DeltaSeam:
    """Stands for the chunked delta rule: q, k `[1, T, H, K]`, v `[1, T, HV, V]`, g and beta made.

    g is `[1, T, HV]`, or `[1, T, HV, K]` of Kimi Delta. The state stays in the pool, so the second
    result is None.
    """

    calls = 1

    def __init__(self, place: Place) -> None:
        self._place = place

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        """Run the recurrence over the step's rows; g is the log decay, beta is ready."""
        place = self._place
        if not isinstance(place.layer, DeltaLayer) or not use_qk_l2norm_in_kernel:
            raise place.error("expected a delta rule with normed q and k")
        place.note(kwargs)
        return place.layer.delta_rule(query[0], key[0], value[0], g[0], beta[0])[None], None


class ScanSeam:
    """Stands for the chunked scan of Mamba-2: x `[1, T, H, P]`, dt raw, B and C `[1, T, G, N]`.

    The mixer gates and norms the result itself, so z is None.
    """

    calls = 1

    def __init__(self, place: Place) -> None:
        self._place = place

    def __call__(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        z: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: Sequence[float] = (0.0, float("inf")),
        **kwargs: object,
    ) -> Tensor:
        """Scan the step's rows with the A, D and bias that were bound."""
        place, layer = self._place, self._place.layer
        if not isinstance(layer, ScanLayer) or not dt_softplus or z is not None:
            raise place.error("expected a scan with softplus and without z")
        if tuple(dt_limit) != layer.dims.dt_limit:
            raise place.error(f"its dt limit is {dt_limit}, hal read {layer.dims.dt_limit}")
        place.note(kwargs)
        return layer.scan(hidden_states[0], dt[0], B[0], C[0])[None]


class HeadScanSeam:
    """Stands for the scan of Mamba-1: x, dt, z `[1, I, T]`, B and C `[1, N, T]`.

    Zamba's mixer scans its heads one by one, so the n-th call of a step is that of head n.
    """

    def __init__(self, place: Place) -> None:
        layer = place.layer
        self._place = place
        self._heads = layer.heads() if isinstance(layer, ScanLayer) else ()
        self.calls = len(self._heads)

    def __call__(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        **kwargs: object,
    ) -> Tensor:
        """Scan one head over the step's rows, gated by z; A, D and bias are the bound ones."""
        head = self._place.note(kwargs)
        if head >= self.calls or not delta_softplus:
            raise self._place.error(f"expected {self.calls} scans a step, all with softplus")
        x, step = hidden_states[0].T, dt[0].T
        gate = None if z is None else z[0].T
        y = self._heads[head].scan(x, step, B[0].T[:, None], C[0].T[:, None], gate)
        return y.T[None]


class LightningForward:
    """Stands for the forward of MiniMax's lightning attention: a scan of v by k, read by q."""

    calls = 1

    def __init__(self, place: Place) -> None:
        self._place = place

    def __call__(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: object
    ) -> tuple[Tensor, None]:
        """`[1, T, hidden]` to the same; the projections, the norm and the gate are the mixer's."""
        place, layer = self._place, self._place.layer
        if not isinstance(layer, ScanLayer) or attention_mask is not None:
            raise place.error("expected a scan without a mask")
        place.note(kwargs)
        part = place.mixer.get_submodule
        x, dims = hidden_states[0], layer.dims
        mixed = part("act_fn")(part("qkv_proj")(x)).view(-1, dims.H, 3 * dims.P)
        q, k, v = mixed.chunk(3, dim=-1)
        y = part("norm")(layer.scan(v, None, k, q).reshape(-1, dims.I))
        return part("out_proj")(torch.sigmoid(part("output_gate")(x)) * y)[None], None


class CcaForward:
    """Stands for the forward of ZAYA's projection: hidden states to q, k and v.

    The delayed value is projected from the hidden state before, which a fresh row has as zeros.
    """

    calls = 1

    def __init__(self, place: Place) -> None:
        self._place = place

    def __call__(
        self,
        hidden_states: Tensor,
        cache: object = None,
        conv_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`[1, T, hidden]` to q `[1, T, HQ, D]`, k and v `[1, T, HKV, D]`, before norm and rope."""
        place, layer = self._place, self._place.layer
        if not isinstance(layer, CcaLayer) or conv_mask is not None:
            raise place.error("expected CCA without a mask")
        place.note()
        part, h, dims = place.mixer.get_submodule, hidden_states[0], layer.dims
        raw_q, raw_k = part("q_proj")(h), part("k_proj")(h)
        mixed, before = layer(torch.cat((raw_q, raw_k), dim=-1), h)
        q, k = mixed.split_with_sizes((dims.HQ * dims.D, dims.HKV * dims.D), dim=-1)
        by_kv, whole = (-1, dims.HKV, dims.HQ // dims.HKV, dims.D), (1, -1, dims.HQ, dims.D)
        mean = (raw_q.view(by_kv) + raw_k.view(-1, dims.HKV, 1, dims.D)) * 0.5
        v = torch.cat((part("v_proj_current")(h), part("v_proj_delayed")(before)), dim=-1)
        return (
            q.view(whole) + mean.view(whole),
            (k.view(-1, dims.HKV, dims.D) + mean.mean(2))[None],
            v.view(1, -1, dims.HKV, dims.D),
        )

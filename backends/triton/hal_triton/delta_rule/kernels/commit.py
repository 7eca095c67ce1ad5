"""The state after an accepted path: replayed from what verify kept, one read and one write."""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"

import triton
import triton.language as tl


@triton.jit
def delta_commit(
    keys, updates, decays, paths, state, src, dst, query_start_loc, last_at,
    s_slot, s_h, s_v: tl.constexpr, s_k: tl.constexpr, HV: tl.constexpr, SHARED: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BG: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """Replay one row over BV value rows of one head, as decodes of its path would move it.

    Tokens are taken BG at a time, so that what they add is read in one wait. A path is a bit a
    token; beside it stands whether decays are one a channel or one a head.
    """
    tiles: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    head, row = (pid // tiles) % HV, pid // (tiles * HV)
    begin, end = tl.load(query_start_loc + row), tl.load(query_start_loc + row + 1)
    slot, last = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
    tip = tl.load(last_at + row)
    if (begin < end) & (last >= 0) & (tip >= 0):
        ks, vs = tl.arange(0, BK), (pid % tiles) * BV + tl.arange(0, BV)
        k_ok = ks >= 0 if BK == K else ks < K
        v_ok = vs >= 0 if V % BV == 0 else vs < V
        ok = v_ok[:, None] & k_ok[None, :]
        at = head.to(tl.int64) * s_h + (vs[:, None] * s_v + ks[None, :] * s_k)
        S = tl.load(state + slot * s_slot + at, mask=ok & (slot >= 0), other=0.0,
                    eviction_policy=EVICT).to(tl.float32)  # fmt: skip
        first = begin.to(tl.int64)
        path = tl.load(paths + (first + tip) * 2)
        step = tl.load(paths + (first + tip) * 2 + 1)
        for t in range(0, tip + 1, BG):
            held = ()
            for r in tl.static_range(BG):
                on = (t + r <= tip) & (((path >> tl.minimum(t + r, 31)) & 1) != 0)
                n = first + t + r
                key = tl.load(keys + (n * (HV // SHARED) + head // SHARED) * K + ks,
                              mask=k_ok & on, other=0.0)  # fmt: skip
                fall = tl.load(decays + (n * HV + head) * K + ks * step, mask=k_ok & on, other=1.0)
                update = tl.load(updates + (n * HV + head) * V + vs, mask=v_ok & on, other=0.0)
                held = held + ((key, fall, update),)  # noqa: RUF005
            for r in tl.static_range(BG):
                key, fall, update = held[r]
                S = S * fall[None, :] + update[:, None] * key[None, :]
        tl.store(state + last * s_slot + at, S.to(state.dtype.element_ty), mask=ok,
                 eviction_policy=EVICT)  # fmt: skip

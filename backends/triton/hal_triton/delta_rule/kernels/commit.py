"""The state after an accepted path: replayed from what verify kept, one read and one write.

A token's update decays by what the path's later tokens decay, and the state by all of them. That is
known once a group of tokens is read, so that a group costs one product with the state and one
multiply-add a token, and all that it adds goes out beside the state, before the path is known:
loads that wait for one another are what a commit would take longer for than a decode.
"""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"

import triton
import triton.language as tl

from hal_triton.kernels.chain import chain


@triton.jit
def _is_on(path, t, tip):
    """Whether token t is on a path that ends at `tip`; a path is a bit a token."""
    return (t <= tip) & (((path >> tl.minimum(t, 31)) & 1) != 0)


@triton.jit
def _read(keys, updates, decays, first, t, tip, head, ks, vs, k_ok, v_ok, HV: tl.constexpr,
          SHARED: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BG: tl.constexpr):  # fmt: skip
    """What BG tokens from t on add, on the path or not, and their decays as one a head."""
    held = ()
    for r in tl.static_range(BG):
        live, n = t + r <= tip, first + t + r
        key = tl.load(keys + (n * (HV // SHARED) + head // SHARED) * K + ks, mask=k_ok & live,
                      other=0.0)  # fmt: skip
        update = tl.load(updates + (n * HV + head) * V + vs, mask=v_ok & live, other=0.0)
        fall = tl.load(decays + (n * HV + head) * K, mask=live, other=1.0)
        held = held + ((key, update, fall),)  # noqa: RUF005
    return held


@triton.jit
def _replay(S, held, path, t, tip, BG: tl.constexpr):
    """S after those of BG tokens that are on the path, where a head decays as one."""
    behind = 1.0
    for r in tl.static_range(BG):
        behind *= tl.where(_is_on(path, t + r, tip), held[r][2], 1.0)
    S *= behind
    behind = 1.0
    for i in tl.static_range(BG):
        key, update, fall = held[BG - 1 - i]
        on = _is_on(path, t + (BG - 1 - i), tip)
        key = tl.where(on, key * behind, 0.0)
        S += tl.where(on, update, 0.0)[:, None] * key[None, :]
        behind *= tl.where(on, fall, 1.0)
    return S


@triton.jit
def _replay_channels(S, held, own, path, t, tip, ks, k_ok, HK: tl.constexpr, BG: tl.constexpr):
    """The same where every channel decays by itself; `own` points at the decays of token t."""
    for r in tl.static_range(BG):
        key, update, _ = held[r]
        on = _is_on(path, t + r, tip)
        fall = tl.load(own + r * HK + ks, mask=k_ok & on, other=1.0)
        S = S * fall[None, :] + tl.where(on, update, 0.0)[:, None] * tl.where(on, key, 0.0)[None, :]
    return S


@triton.jit
def delta_commit(
    keys, updates, decays, paths, state, src, dst, query_start_loc, last_at,
    s_slot, s_h, s_v: tl.constexpr, s_k: tl.constexpr, HV: tl.constexpr, SHARED: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BG: tl.constexpr,
    EVICT: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Replay one row over BV value rows of one head, as decodes of its path would move it.

    Tokens are taken BG at a time, the first of them beside the state. Next to a path stands whether
    decays are one a channel or one a head.
    """
    chain(CHAIN)
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
        first = begin.to(tl.int64)
        path = tl.load(paths + (first + tip) * 2)
        by_channel = tl.load(paths + (first + tip) * 2 + 1) != 0
        S = tl.load(state + slot * s_slot + at, mask=ok & (slot >= 0), other=0.0,
                    eviction_policy=EVICT).to(tl.float32)  # fmt: skip
        held = _read(keys, updates, decays, first, 0, tip, head, ks, vs, k_ok, v_ok, HV, SHARED, K,
                     V, BG)  # fmt: skip
        own = decays + (first * HV + head) * K
        if by_channel:
            S = _replay_channels(S, held, own, path, 0, tip, ks, k_ok, HV * K, BG)
        else:
            S = _replay(S, held, path, 0, tip, BG)
        for t in range(BG, tip + 1, BG):
            held = _read(keys, updates, decays, first, t, tip, head, ks, vs, k_ok, v_ok, HV,
                         SHARED, K, V, BG)  # fmt: skip
            if by_channel:
                at_t = own + t * (HV * K)
                S = _replay_channels(S, held, at_t, path, t, tip, ks, k_ok, HV * K, BG)
            else:
                S = _replay(S, held, path, t, tip, BG)
        tl.store(state + last * s_slot + at, S.to(state.dtype.element_ty), mask=ok,
                 eviction_policy=EVICT)  # fmt: skip

"""Draft tokens from one read of the state, in chains and trees.

A token's ancestors are the tokens on its path from a root, G is the sum of log decays along that
path. With the committed state S, updates and outputs of a row are

    (I + L) u = beta * (v - S (exp(G) k'))      L_ts = beta_t k'_t.k'_s exp(G_t - G_s)
    o_t = S (exp(G_t) q'_t) + sum_s u_s q'_t.k'_s exp(G_t - G_s)

where s runs over the ancestors of t, itself included in o. So S meets the keys and queries of all
tokens in one product and leaves the registers; all that is left is small. `delta_drafts` makes the
small matrices once a head, `delta_verify` applies them tile by tile. Keys and queries lie side by
side, token by token, so that a product of 16 columns serves eight tokens.
"""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"

import triton
import triton.language as tl

from hal_triton.delta_rule.kernels.step import read_gates
from hal_triton.kernels.chain import chain
from hal_triton.kernels.math import inverse_norm


@triton.jit
def _parent(parents, at, TREE: tl.constexpr):
    """The row-relative parent of a token; parents point at the row's first.

    It comes before the token whatever memory says, so that every walk ends.
    """
    if TREE:
        return tl.minimum(tl.load(parents + at), at - 1)
    else:
        return at - 1


@triton.jit
def _read_unit(x, ks, k_ok, factor, L2: tl.constexpr):
    """A key or query in float32, and what norms and scales it."""
    value = tl.load(x + ks, mask=k_ok, other=0.0).to(tl.float32)
    if L2:
        factor = factor * inverse_norm(value, 0)
    return value * factor, factor


@triton.jit
def delta_drafts(
    q, k, a, b, A_log, dt_bias, query_start_loc, parents, keys, decays, paths, operands, weights,
    q_t, q_h, k_t, k_h, a_t, a_h, b_t, scale, beta_scale, lower_bound,
    HV: tl.constexpr, R: tl.constexpr, SHARED: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    BT: tl.constexpr, GATE: tl.constexpr, CHANNEL: tl.constexpr, TREE: tl.constexpr,
    L2: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Prepare one row of one head; keep normed keys, decays and paths for commit.

    weights `[rows, HV, BT, 2, BT]`: (I + L)^-1 beta, and what the outputs add to it. operands:
    exp(G) times the norms, `[rows, HV, BT, 2]`, the keys' negated; where channels decay by
    themselves the keys and queries that S meets, `[rows, HV, BT, 2, K]`. A kept key serves SHARED
    value heads.
    """
    chain(CHAIN)
    head, row = tl.program_id(0) % HV, tl.program_id(0) // HV
    begin, end = tl.load(query_start_loc + row), tl.load(query_start_loc + row + 1)
    i, ks, k_head = tl.arange(0, BT), tl.arange(0, BK), head // R
    k_ok = ks >= 0 if BK == K else ks < K
    place, first = (row * HV + head).to(tl.int64), begin.to(tl.int64)
    own = decays + (first * HV + head) * K
    solved = tl.zeros((BT, BT), tl.float32)
    for t in range(0, end - begin):
        n = first + t
        key, by_key = _read_unit(k + n * k_t + k_head * k_h, ks, k_ok, 1.0, L2)
        query, by_query = _read_unit(q + n * q_t + k_head * q_h, ks, k_ok, scale, L2)
        fall, beta = read_gates(
            a + n * a_t + head * a_h, b + n * b_t + head, A_log, dt_bias, head, ks, k_ok,
            lower_bound, beta_scale, GATE, CHANNEL, K,
        )  # fmt: skip
        if head % SHARED == 0:
            tl.store(keys + (n * (HV // SHARED) + head // SHARED) * K + ks, key, mask=k_ok)
        if CHANNEL:
            tl.store(own + t * (HV * K) + ks, fall, mask=k_ok)
        else:
            tl.store(own + t * (HV * K), fall)
        # ancestors' decays are read back, by other threads than wrote them
        tl.debug_barrier()
        meets = tl.zeros((BT,), tl.float32)
        scores = tl.where(i == t, tl.sum(query * key, 0), 0.0)
        path, at = 1 << t, _parent(parents + first, t, TREE)
        while at >= 0:
            path |= 1 << at
            other, _ = _read_unit(k + (first + at) * k_t + k_head * k_h, ks, k_ok, 1.0, L2)
            other *= fall
            meets = tl.where(i == at, tl.sum(key * other, 0), meets)
            scores = tl.where(i == at, tl.sum(query * other, 0), scores)
            if CHANNEL:
                fall *= tl.load(own + at * (HV * K) + ks, mask=k_ok, other=1.0)
            else:
                fall *= tl.load(own + at * (HV * K))
            at = _parent(parents + first, at, TREE)
        line = beta * (tl.where(i == t, 1.0, 0.0) - tl.sum(meets[:, None] * solved, 0))
        solved = tl.where((i == t)[:, None], line[None, :], solved)
        to = weights + (place * BT + t) * (2 * BT) + i
        tl.store(to, line)
        tl.store(to + BT, tl.sum(scores[:, None] * solved, 0))
        if CHANNEL:
            to = operands + (place * BT + t) * (2 * K) + ks
            tl.store(to, key * fall, mask=k_ok)
            tl.store(to + K, query * fall, mask=k_ok)
        else:
            to = operands + (place * BT + t) * 2
            tl.store(to, -fall * by_key)
            tl.store(to + 1, fall * by_query)
        if head == 0:
            tl.store(paths + n * 2, path)
            tl.store(paths + n * 2 + 1, 1 if CHANNEL else 0)


@triton.jit
def _read_pairs(of_key, of_query, of_pair, ks, k_ok, live, is_query, CHANNEL: tl.constexpr):
    """Keys and queries side by side; where channels decay by themselves `of_pair` has them."""
    if CHANNEL:
        return tl.load(of_pair + ks[None, :], mask=live[:, None] & k_ok[None, :], other=0.0)
    else:
        ok = (live & ~is_query)[:, None] & k_ok[None, :]
        pairs = tl.load(of_key + ks[None, :], mask=ok, other=0.0)
        ok = (live & is_query)[:, None] & k_ok[None, :]
        query = tl.load(of_query + ks[None, :], mask=ok, other=0.0)
        return tl.where(is_query[:, None], query, pairs)


@triton.jit
def _read_small(of_value, of_factor, of_weight, v_t, vs, v_ok, c, live, is_query,
                BT: tl.constexpr, CHANNEL: tl.constexpr):  # fmt: skip
    """Values, factors of the columns of the product, and the matrix behind it."""
    t, is_update = c // 2, live & ~is_query
    if CHANNEL:
        factor = tl.where(is_query, 1.0, -1.0)
    else:
        factor = tl.load(of_factor + c, mask=live, other=0.0)
    weight = tl.load(of_weight + (c[None, :] * BT + t[:, None]),
                     mask=is_update[:, None] & live[None, :], other=0.0)  # fmt: skip
    values = tl.load(of_value + (t[None, :] * v_t + vs[:, None]),
                     mask=v_ok[:, None] & is_update[None, :], other=0.0)  # fmt: skip
    return values, factor, weight


@triton.jit
def _meet(S, pairs, product, PRECISION: tl.constexpr):
    """`product` plus S `[BV, BK]` times keys and queries `[N, BK]`.

    "split" is for bfloat16 ones, which are exact operands: S alone is cut, into its first 8 bits
    and the next, which costs two products and 2^-16.
    """
    if PRECISION == "split":
        high = (S.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        low = (S - high).to(pairs.dtype)
        turned = tl.trans(pairs)
        product = tl.dot(high.to(pairs.dtype), turned, product, input_precision="ieee")
        return tl.dot(low, turned, product, input_precision="ieee")
    else:
        turned = tl.trans(pairs.to(tl.float32))
        return tl.dot(S, turned, product, input_precision=PRECISION)


@triton.jit(do_not_specialize=["rows", "tokens"])
def delta_verify(
    q, k, v, operands, weights, state, src, query_start_loc, updates, out,
    rows, tokens, q_t, q_h, k_t, k_h, v_t, v_h, out_t, out_h, s_slot, s_h,
    s_v: tl.constexpr, s_k: tl.constexpr, HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr, SMALL: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Outputs and updates of one row over BV value rows of one head; row `rows` clears the pads.

    Columns 2t and 2t + 1 belong to token t: what its value wants of the state and its update, and
    what its query reads and its output.
    """
    chain(CHAIN)
    tiles: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    head, row = (pid // tiles) % HV, pid // (tiles * HV)
    vs, c = (pid % tiles) * BV + tl.arange(0, BV), tl.arange(0, 2 * BT)
    v_ok = vs >= 0 if V % BV == 0 else vs < V
    t, is_query = c // 2, (c % 2) == 1
    begin = tl.load(query_start_loc + row)
    first = begin.to(tl.int64)
    o_at = out + first * out_t + head * out_h + (t[None, :] * out_t + vs[:, None])
    if row == rows:
        for past in range(0, tokens - begin, BT):
            ok = is_query & (past + t < tokens - begin)
            tl.store(o_at, tl.zeros((BV, 2 * BT), out.dtype.element_ty),
                     mask=v_ok[:, None] & ok[None, :])  # fmt: skip
            o_at += BT * out_t
    else:
        end = tl.load(query_start_loc + row + 1)
        if begin < end:
            live, k_head = t < end - begin, head // R
            place = (row * HV + head).to(tl.int64)
            slot = tl.load(src + row).to(tl.int64)
            of_state = state + slot * s_slot + head.to(tl.int64) * s_h + vs[:, None] * s_v
            of_key = k + first * k_t + k_head * k_h + t[:, None] * k_t
            of_query = q + first * q_t + k_head * q_h + t[:, None] * q_t
            of_pair = operands + place * (2 * BT * K) + c[:, None] * K
            is_update, is_output = live & ~is_query, live & is_query
            of_factor, of_weight = operands + place * (2 * BT), weights + place * (2 * BT * BT)
            of_value = v + first * v_t + head * v_h
            # what is small goes out before S where registers hold it: behind S it would wait
            ahead: tl.constexpr = (BT <= 8) and (K <= 128)
            if ahead:
                wanted, factor, weight = _read_small(
                    of_value, of_factor, of_weight, v_t, vs, v_ok, c, live, is_query, BT, CHANNEL
                )
            product = tl.zeros((BV, 2 * BT), tl.float32)
            for part in tl.static_range((K + BK - 1) // BK):
                ks = part * BK + tl.arange(0, BK)
                k_ok = ks >= 0 if K % BK == 0 else ks < K
                if ahead:
                    pairs = _read_pairs(
                        of_key, of_query, of_pair, ks, k_ok, live, is_query, CHANNEL
                    )
                S = tl.load(of_state + ks[None, :] * s_k, other=0.0,
                            mask=(v_ok[:, None] & k_ok[None, :]) & (slot >= 0))  # fmt: skip
                if not ahead:
                    pairs = _read_pairs(
                        of_key, of_query, of_pair, ks, k_ok, live, is_query, CHANNEL
                    )
                product = _meet(S.to(tl.float32), pairs, product, PRECISION)
            if not ahead:
                wanted, factor, weight = _read_small(
                    of_value, of_factor, of_weight, v_t, vs, v_ok, c, live, is_query, BT, CHANNEL
                )
            wanted = wanted.to(tl.float32) + product * factor[None, :]
            read = tl.where(is_query[None, :], wanted, 0.0)
            wanted = tl.where(is_query[None, :], 0.0, wanted)
            result = tl.dot(wanted, weight, read, input_precision=SMALL)
            tl.store(updates + (first * HV + head) * V + (t[None, :] * (HV * V) + vs[:, None]),
                     result, mask=v_ok[:, None] & is_update[None, :])  # fmt: skip
            tl.store(o_at, result.to(out.dtype.element_ty),
                     mask=v_ok[:, None] & is_output[None, :])  # fmt: skip

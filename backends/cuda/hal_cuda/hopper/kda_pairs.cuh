// Products of a chunk's keys and queries with its keys, each decayed from token to token; a warp's 16 rows of them.
#pragma once

struct Pairs {
  u32 smem, sums;
  int w, lane, first, g, t;
  __device__ Pairs(u32 smem, u32 sums, int w, int lane, int first) : smem(smem), sums(sums), w(w), lane(lane), first(first), g(lane >> 2), t(lane & 3) {}
  // a fragment of 16 tokens and 16 channels as it lies in a swizzled panel
  __device__ u32 place(u32 panel, int block, int i) const { return smem + panel + (strip(block, lane) ^ ((i & 3) * 32)) + (i >> 2) * TILE; }
  __device__ u32 sum_at(int row, int i) const { return sums + row * ROW + (i * 16 + t * 2) * 4; }

  // pairs within the warp's own 16 tokens, and the squares of rows
  __device__ __forceinline__ void within(float (&kk)[32], float (&qk)[32], float2& square_k, float2& square_q) const {
    float across[4] = {}, up[3][4] = {}, down[3][4] = {}, own_up[4] = {}, own_down[4] = {}, q_up[4] = {}, q_down[4] = {};
    const int row = w * 16 + g;
#pragma unroll 1
    for (int i = first; i < first + 4; i++) {
      u32 k[4], q[4], a[4], b[4];
      ldsm4(k, place(K_DOWN, w, i));
      ldsm4(q, place(Q_DOWN, w, i));
      upper(own_up, k, q);
      lower(own_down, k, q);
      if (USE_L2) {
        mma16b(q_up, q, q[0], q[2]);
        mma16b(q_down, q, q[1], q[3]);
      }
      float2 sum[4], middle[4], f[4];
      pairs(sum, sum_at(row, i), sum_at(row + 8, i));
      {  // the lower half of 16 with the upper one
        const u32 at = sum_at(w * 16 + 7, i);
        pairs(middle, at, at);
#pragma unroll
        for (int j = 0; j < 4; j++) f[j] = make_float2(ex2(-fabsf(sum[j].x - middle[j].x)), ex2(-fabsf(sum[j].y - middle[j].y)));
        near(a, b, k, q, f);
        const u32 rows[4] = {a[1], b[1], a[3], b[3]};
        mma16b(across, rows, a[0], a[2]);
      }
#pragma unroll
      for (int level = 0; level < 3; level++) {
        const int half = 4 >> level, at = w * 16 + (g & ~(2 * half - 1)) + half - 1;
        pairs(middle, sum_at(at, i), sum_at(at + 8, i));
#pragma unroll
        for (int j = 0; j < 4; j++) f[j] = make_float2(ex2(-fabsf(sum[j].x - middle[j].x)), ex2(-fabsf(sum[j].y - middle[j].y)));
        near(a, b, k, q, f);
        upper(up[level], a, b);
        lower(down[level], a, b);
      }
    }
    square_k = diagonal(own_up[0], own_up[1], own_down[0], own_down[1]);
    square_q = diagonal(q_up[0], q_up[1], q_down[2], q_down[3]);
    float dk[8], dq[8];
#pragma unroll
    for (int j = 0; j < 2; j++) {  // rows g, columns 0 to 7, and rows g + 8, columns 8 to 15
      const int c = t * 2 + j, far = g ^ c;
      dk[j] = g <= c ? 0.f : far >= 4 ? up[0][j] : far >= 2 ? up[1][j] : up[2][j];
      dk[j + 6] = g <= c ? 0.f : far >= 4 ? down[0][j] : far >= 2 ? down[1][j] : down[2][j];
      dq[j] = g < c ? 0.f : g == c ? own_up[j + 2] : far >= 4 ? up[0][j + 2] : far >= 2 ? up[1][j + 2] : up[2][j + 2];
      dq[j + 6] = g < c ? 0.f : g == c ? own_down[j + 2] : far >= 4 ? down[0][j + 2] : far >= 2 ? down[1][j + 2] : down[2][j + 2];
      dk[j + 2] = across[j];
      dq[j + 2] = across[j + 2];
      dk[j + 4] = dq[j + 4] = 0.f;
    }
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
      for (int j = 0; j < 8; j++) {
        kk[8 * m + j] = m == w ? dk[j] : 0.f;
        qk[8 * m + j] = m == w ? dq[j] : 0.f;
      }
  }
  // of rows g and g + 8, in the lanes with t == g / 2
  __device__ __forceinline__ float2 diagonal(float up_even, float up_odd, float down_even, float down_odd) const {
    return (g & 1) ? make_float2(up_odd, down_odd) : make_float2(up_even, down_even);
  }

  // the warp's rows with the keys of the blocks of 16 before
  __device__ __forceinline__ void before(float (&kk)[32], float (&qk)[32]) const {
    if (w == 0) return;
    float ka[3][8] = {}, qa[3][8] = {};
#pragma unroll 1
    for (int i = first; i < first + 4; i++) {
      u32 x[4], a[4], b[4], c[4];
      float2 start[4], sum[4], f[4];
      pairs(start, sum_at(w * 16 - 1, i), sum_at(w * 16 - 1, i));
      pairs(sum, sum_at(w * 16 + g, i), sum_at(w * 16 + g + 8, i));
      apart(f, sum, start);
      ldsm4(x, place(K_DOWN, w, i));
      ldsm4(c, place(Q_DOWN, w, i));
      near(a, b, x, c, f);
#pragma unroll
      for (int m = 0; m < 3; m++) {
        if (m < w) {
          pairs(sum, sum_at(m * 16 + g, i), sum_at(m * 16 + g + 8, i));
          apart(f, start, sum);
          ldsm4(x, place(K_DOWN, m, i));
#pragma unroll
          for (int j = 0; j < 4; j++) c[j] = times_bf16(x[j], pack_bf16(f[j].x, f[j].y));
          product(ka[m], a, c);
          product(qa[m], b, c);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < 3; m++)
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (m < w) {
          kk[8 * m + j] = ka[m][j];
          qk[8 * m + j] = qa[m][j];
        }
  }
  // d += a c', 16 x 16 from fragments of 16 rows each
  __device__ __forceinline__ void product(float (&d)[8], const u32 (&a)[4], const u32 (&c)[4]) const {
    float (&low)[4] = *(float (*)[4])d, (&high)[4] = *(float (*)[4])(d + 4);
    mma16b(low, a, c[0], c[2]);
    mma16b(high, a, c[1], c[3]);
  }

  // the two groups of warps each have half of the channels; `to` holds one's share of the other's products
  __device__ __forceinline__ void give(const float (&x)[32], u32 to) const {
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (j >> 1 <= w)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + (j * 128 + w * 32 + lane) * 16), "f"(x[4 * j]), "f"(x[4 * j + 1]), "f"(x[4 * j + 2]), "f"(x[4 * j + 3]) : "memory");
  }
  __device__ __forceinline__ void take(float (&x)[32], u32 from) const {
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (j >> 1 <= w) {
        const float4 more = lds4(from + (j * 128 + w * 32 + lane) * 16);
        x[4 * j] += more.x; x[4 * j + 1] += more.y; x[4 * j + 2] += more.z; x[4 * j + 3] += more.w;
      }
  }
  __device__ __forceinline__ void tell(u32 to, float2 square_k, float2 square_q) const {
    if (t != g >> 1) return;
    const int row = w * 16 + g;
    sts1(to + row * 4, square_k.x);
    sts1(to + (row + 8) * 4, square_k.y);
    sts1(to + (64 + row) * 4, square_q.x);
    sts1(to + (72 + row) * 4, square_q.y);
  }
  __device__ __forceinline__ float2 of_rows(u32 at) const { return make_float2(lds1(at + (w * 16 + g) * 4), lds1(at + (w * 16 + g + 8) * 4)); }

  // keys and queries decayed since the chunk's start, keys decayed until its end; in place, each by its own warp
  __device__ __forceinline__ void panels(float2 rk, float2 rq) const {
#pragma unroll 1
    for (int i = first; i < first + 4; i++) {
      u32 k[4], q[4], to[4];
      float2 sum[4], end[4], f[4], n[4];
      pairs(sum, sum_at(w * 16 + g, i), sum_at(w * 16 + g + 8, i));
      pairs(end, sum_at(63, i), sum_at(63, i));
      ldsm4(k, place(K_DOWN, w, i));
      ldsm4(q, place(Q_DOWN, w, i));
#pragma unroll
      for (int j = 0; j < 4; j++) {
        f[j] = make_float2(ex2(sum[j].x), ex2(sum[j].y));
        const float by = j & 1 ? rq.y : rq.x;
        n[j] = make_float2(f[j].x * by, f[j].y * by);
      }
      decayed(to, q, n);
      store(Q_DOWN, i, to);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float by = j & 1 ? rk.y : rk.x;
        n[j] = make_float2(f[j].x * by, f[j].y * by);
        f[j] = make_float2(ex2(end[j].x - sum[j].x) * by, ex2(end[j].y - sum[j].y) * by);
      }
      decayed(to, k, n);
      store(K_DOWN, i, to);
      decayed(to, k, f);
      store(K_END, i, to);
    }
  }
  __device__ void store(u32 panel, int i, const u32 (&x)[4]) const { stsm4(place(panel, w, i), x[0], x[1], x[2], x[3]); }

  // factors of rows, and those of keys
  __device__ __forceinline__ void scale(float (&x)[32], float2 rows, u32 keys) const {
#pragma unroll
    for (int m = 0; m < 8; m++) {
      const float2 by = lds2(keys + (m * 8 + t * 2) * 4);
      x[4 * m] *= rows.x * by.x; x[4 * m + 1] *= rows.x * by.y; x[4 * m + 2] *= rows.y * by.x; x[4 * m + 3] *= rows.y * by.y;
    }
  }
  __device__ __forceinline__ void keep(const float (&s)[32], u32 tile) const {
#pragma unroll
    for (int m = 0; m < 4; m++)
      if (m <= w)
        stsm4(tile + (strip(w, lane) ^ (32 * m)), pack_bf16(s[8 * m], s[8 * m + 1]), pack_bf16(s[8 * m + 2], s[8 * m + 3]),
              pack_bf16(s[8 * m + 4], s[8 * m + 5]), pack_bf16(s[8 * m + 6], s[8 * m + 7]));
  }
};

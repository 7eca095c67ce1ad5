// A chunk of the gated delta rule: arguments of the kernels, decays, scores, and the inverse.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef long long i64;

constexpr int BT = 64;
constexpr int TILE = 8192;  // 64 rows of 128 bytes
constexpr int OFF_K = 0, OFF_Q = 2 * TILE, OFF_V = 4 * TILE;  // of a chunk's inputs
constexpr int OFF_SOLVE = 0, OFF_SCORE = TILE, PREP = 2 * TILE;  // of what is prepared of a chunk
constexpr int FAC = 1536, SOLVER = 4096 + 2304, RECORD = PREP + FAC;
// where every channel decays by itself: squares, keys decayed until the chunk's end, keys and queries since its start, and
// what the chunk does to each channel
constexpr int OFF_ENDS = 2 * TILE, OFF_KEYS = 4 * TILE, OFF_TOTALS = 8 * TILE, CHANNEL_RECORD = OFF_TOTALS + 512;
constexpr int KEPT = CHANNEL ? CHANNEL_RECORD : RECORD, KEPT_TILES = CHANNEL ? OFF_TOTALS : 0, KEPT_SQUARES = CHANNEL ? OFF_TOTALS : PREP;
// floats of a chunk's factors; of the preparing groups' own: sum of log decays and log norm of each key, and more
constexpr int BY_KEY = 0, BY_QUERY = 64, TO_END = 128, TOTAL = 192, KEYS = 256, SUMS = 320;
constexpr int LOGQ = 0, GSUM = 0, BETAS = 64;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float TINY = 1e-36f;  // less than that has no reciprocal, and is nothing beside what is rounded

struct alignas(64) Map { char bytes[128]; };
struct Args {
  Map q, k, v;  // [64 dims, tokens, halves, heads]
  const void *a, *b;
  const float *A_log, *dt_bias;
  const int *query_start_loc, *src, *dst, *track;
  float *state;
  u16 *out;
  char *records;  // of prepared chunks
  float *sums;    // states at the borders of parts, and what parts do to a state
  i64 out_t, out_h, s_slot, s_h;
  int a_t, b_t, rows, tokens, HV, R, points, parts, waves, phase, a_h;
  float scale, beta_scale, lower_bound;
};

static_assert(sizeof(Args) == 576, "arguments.py lays it out");

#include "ptx.cuh"

// how the chunks of a row are cut: parts of one size between two ends that are `waves` times as long
struct Parts {
  int count, chunks, middle, ends;
  __device__ Parts(const Args& p, int row) : count(p.parts) {
    chunks = (p.query_start_loc[row + 1] - p.query_start_loc[row] + BT - 1) / BT;
    const int shares = 2 * p.waves + count - 2;
    middle = (chunks + shares - 1) / shares;
    ends = count == 1 ? chunks : middle * p.waves;
  }
  __device__ int first(int i) const { return i ? ends + (i - 1) * middle : 0; }
  __device__ int past(int i) const { return i == count - 1 ? chunks : min(first(i + 1), chunks); }
  // the last part that has a chunk
  __device__ int last() const { return chunks <= ends ? 0 : min(count - 1, 1 + (chunks - 1 - ends) / middle); }
};

__device__ __forceinline__ float raw_of(const void* p, i64 i, bool wide) {
  if (wide) return ((const float*)p)[i];
  return __uint_as_float((u32)((const u16*)p)[i] << 16);
}
// log2(1 + 2^y): of 2^-|y| = e, log2(1 + e) / e is a polynomial within 1.4e-6 of it, so that small ones keep their digits
__device__ __forceinline__ float softplus2(float y) {
  const float e = ex2(-fabsf(y));
  float p = fmaf(e, 0.02040112f, -0.09579735f);
  p = fmaf(e, p, 0.21528432f);
  p = fmaf(e, p, -0.33908892f);
  p = fmaf(e, p, 0.47766834f);
  p = fmaf(e, p, -0.72115946f);
  p = fmaf(e, p, 1.44269323f);
  return fmaf(e, p, fmaxf(y, 0.f));
}

__device__ __forceinline__ void clear_rows(u32 tile, int first, int tiles, int tid) {
  for (int i = tid; i < (BT - first) * tiles * 8; i += 128) {
    int sub = i / ((BT - first) * 8), c = i % ((BT - first) * 8);
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(tile + sub * TILE + first * 128 + c * 16), "r"(0) : "memory");
  }
}
// 16x16 f16 blocks with rows of 48 bytes
__device__ __forceinline__ u32 block_at(u32 base, int lane) { return base + (lane & 15) * 48 + (lane >> 4) * 16; }
// lanes' addresses for ldmatrix: matrices (rows 0-7, cols 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15)

__device__ __forceinline__ void neg(float (&d)[2][4]) {
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) d[i][j] = -d[i][j];
}
// d += A [16, 16] B [16, 16], B stored by rows in shared memory
__device__ __forceinline__ void mul_stored(float (&d)[2][4], const u32 (&a)[4], u32 at) {
  u32 b[4];
  ldsm4t(b, at);  // b0: k 0-7 n 0-7; b1: k 8-15 n 0-7; b2: k 0-7 n 8-15; b3: k 8-15 n 8-15
  mma16(d[0], a, b[0], b[1]);
  mma16(d[1], a, b[2], b[3]);
}
// d += A [16, 16] P [16, 16], P an accumulator
__device__ __forceinline__ void mul_held(float (&d)[2][4], const u32 (&a)[4], const float (&p)[2][4]) {
#pragma unroll
  for (int n = 0; n < 2; n++)
    mma16(d[n], a, transpose8(pack_f16(p[n][0], p[n][1])), transpose8(pack_f16(p[n][2], p[n][3])));
}
__device__ __forceinline__ void store_block(u32 base, const float (&d)[2][4], int g, int t) {
#pragma unroll
  for (int n = 0; n < 2; n++) {
    sts_u(base + g * 48 + n * 16 + t * 4, pack_f16(d[n][0], d[n][1]));
    sts_u(base + (g + 8) * 48 + n * 16 + t * 4, pack_f16(d[n][2], d[n][3]));
  }
}

// kinds of gate where every channel decays by itself
constexpr int READY_GATE = 1, CHANNEL_GATE = 2, SAFE_GATE = 3;

struct Gates {
  float rate, bias;
  __device__ Gates(const Args& p, int head) {
    rate = GATE_READY ? 0.f : -__expf(p.A_log[head]);
    bias = GATE_READY ? 0.f : p.dt_bias[head] * LOG2E;
  }
  __device__ float decay(float a) const { return GATE_READY ? a * LOG2E : rate * softplus2(fmaf(a, LOG2E, bias)); }
};
__device__ __forceinline__ float scan32(float sum, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) { float up = __shfl_up_sync(~0u, sum, d); if (lane >= d) sum += up; }
  return sum;
}
__device__ __forceinline__ void products(float (&acc)[32], u32 left, u32 right) {
  u64 a = desc_of(left), b = desc_of(right);
  wg_fence();
#pragma unroll
  for (int i = 0; i < 8; i++) { u64 o = (i >> 2) * (TILE >> 4) + (i & 3) * 2; wg_ss(acc, a + o, b + o, i); }
  wg_commit();
}

__device__ __forceinline__ float lg2(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// where a lane's row of a 16-row strip lies in a swizzled tile; ^ (32 * i) is 16 columns further
__device__ __forceinline__ u32 strip(int w, int lane) {
  const int row = w * 16 + (lane & 15);
  return row * 128 + (((lane >> 4) ^ (row & 7)) << 4);
}

// half the log of the squared norms of a warp's rows g and g + 8, in the lanes with t == g / 2
__device__ __forceinline__ float2 log_norms(u32 tile, int w, int lane) {
  float d0[4] = {0.f, 0.f, 0.f, 0.f}, d1[4] = {0.f, 0.f, 0.f, 0.f};
  const u32 at = tile + strip(w, lane);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    u32 a[4];
    ldsm4(a, (at ^ ((i & 3) * 32)) + (i >> 2) * TILE);
    mma16b(d0, a, a[0], a[2]);
    mma16b(d1, a, a[1], a[3]);
  }
  const bool odd = lane >> 2 & 1;
  return make_float2(0.5f * lg2((odd ? d0[1] : d0[0]) + 1e-6f), 0.5f * lg2((odd ? d1[3] : d1[2]) + 1e-6f));
}

// decayed scores and the factors of a chunk; the solving group hands over decays and key norms
__device__ __forceinline__ void score(u32 load, u32 own, u32 to, u32 fac, u32 known, int phase, int tid, float lscale) {
  const int w = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  float qk[32];
  products(qk, load + OFF_Q, load + OFF_K);
  float2 nq = make_float2(0.f, 0.f);
  if (USE_L2) nq = log_norms(load + OFF_Q, w, lane);
  const int i0 = w * 16 + g, i1 = i0 + 8;
  if (t == g >> 1) {
    sts1(own + (LOGQ + i0) * 4, lscale - nq.x);
    sts1(own + (LOGQ + i1) * 4, lscale - nq.y);
  }
  mbar_wait(known, phase);
  bar_sync(4, 128);
  const float C0 = lds1(fac + (SUMS + i0) * 4) + lds1(own + (LOGQ + i0) * 4);
  const float C1 = lds1(fac + (SUMS + i1) * 4) + lds1(own + (LOGQ + i1) * 4);
  {
    const int row = tid & 63;
    const float G = lds1(fac + (SUMS + row) * 4), total = lds1(fac + (SUMS + 63) * 4);
    if (tid < 64) {
      const float n = lds1(fac + (KEYS + row) * 4) - G;
      sts1(fac + (BY_KEY + row) * 4, ex2(G - n));
      sts1(fac + (TO_END + row) * 4, ex2(total - G - n));
      if (tid == 0) sts1(fac + TOTAL * 4, ex2(total));
    } else {
      sts1(fac + (BY_QUERY + row) * 4, ex2(G + lds1(own + (LOGQ + row) * 4)));
    }
  }
  wg_wait<0>();
  hold(qk);
  const u32 at = to + strip(w, lane);
#pragma unroll
  for (int m = 0; m < 4; m++) {  // blocks of 16 columns
    float* s = qk + 8 * m;
    if (m <= w) {
      const float2 x = lds2(fac + (KEYS + m * 16 + t * 2) * 4), y = lds2(fac + (KEYS + m * 16 + 8 + t * 2) * 4);
      s[0] *= ex2(C0 - x.x); s[1] *= ex2(C0 - x.y); s[2] *= ex2(C1 - x.x); s[3] *= ex2(C1 - x.y);
      s[4] *= ex2(C0 - y.x); s[5] *= ex2(C0 - y.y); s[6] *= ex2(C1 - y.x); s[7] *= ex2(C1 - y.y);
      if (m == w) {
        const int j = t * 2;
        s[0] = j <= g ? s[0] : 0.f; s[1] = j + 1 <= g ? s[1] : 0.f;
        s[4] = s[5] = 0.f;
        s[6] = j <= g ? s[6] : 0.f; s[7] = j + 1 <= g ? s[7] : 0.f;
      }
      stsm4(at ^ (32 * m), pack_f16(s[0], s[1]), pack_f16(s[2], s[3]), pack_f16(s[4], s[5]), pack_f16(s[6], s[7]));
    }
  }
}

__device__ __forceinline__ void zero(float (&d)[2][4]) {
#pragma unroll
  for (int i = 0; i < 8; i++) d[i >> 2][i & 3] = 0.f;
}
// (I + L)^-1 * beta, f16, for products with it on the right; a warp has 16 rows of L as products leave them
__device__ __forceinline__ void solve(float (&kk)[32], u32 own, u32 scratch, u32 tile, int bar, int tid) {
  const int w = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const u32 mine = scratch + w * 1024, at = tile + strip(w, lane);
  u32 L[3][4], low = 0;
#pragma unroll
  for (int m = 0; m < 4; m++) {
    float* l = kk + 8 * m;
    if (m <= w) {
      if (m == w) {  // two triangles of 8 on the diagonal, a block between them
        sts2(mine + g * 32 + t * 8, 2 * t < g ? l[0] : 0.f, 2 * t + 1 < g ? l[1] : 0.f);
        sts2(mine + 256 + g * 32 + t * 8, 2 * t < g ? l[6] : 0.f, 2 * t + 1 < g ? l[7] : 0.f);
        low = pack_f16(l[2], l[3]);
      }
    }
    if (m < 3) { L[m][0] = pack_f16(l[0], l[1]); L[m][1] = pack_f16(l[2], l[3]); L[m][2] = pack_f16(l[4], l[5]); L[m][3] = pack_f16(l[6], l[7]); }
  }
  __syncwarp();
  u32 T[4];
  {
    const u32 from = mine + ((lane >> 3) & 1) * 256;
    const int j = lane & 7;
    float4 l[10];
#pragma unroll
    for (int i = 1; i < 8; i++) {
      l[i - 1] = lds4(from + i * 32);
      if (i > 4) l[i + 2] = lds4(from + i * 32 + 16);
    }
    float x[8];
    x[0] = j == 0 ? 1.f : 0.f;
#pragma unroll
    for (int i = 1; i < 8; i++) {
      const float4 p = l[i - 1];
      float s0 = i == j ? 1.f : 0.f, s1 = 0.f;
      s0 = fmaf(-p.x, x[0], s0);
      if (i > 1) s1 = fmaf(-p.y, x[1], s1);
      if (i > 2) s0 = fmaf(-p.z, x[2], s0);
      if (i > 3) s1 = fmaf(-p.w, x[3], s1);
      if (i > 4) {
        const float4 q = l[i + 2];
        s0 = fmaf(-q.x, x[4], s0);
        if (i > 5) s1 = fmaf(-q.y, x[5], s1);
        if (i > 6) s0 = fmaf(-q.z, x[6], s0);
      }
      x[i] = s0 + s1;
    }
    __syncwarp();
    // column j of a block of 8: rows of 16 bytes within the warp's 16x16
    const int second = (lane >> 3) & 1;
    if (lane < 16) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        sts_h(mine + (second * 8 + i) * 48 + second * 16 + j * 2, to_f16(x[i]));
        sts_h(mine + (second * 8 + i) * 48 + (1 - second) * 16 + j * 2, 0);
      }
    }
    __syncwarp();
    ldsm4(T, block_at(mine, lane));
    // the block between: -T22 (L21 T11)
    float P[4] = {0.f, 0.f, 0.f, 0.f}, R[4] = {0.f, 0.f, 0.f, 0.f};
    const u32 A[4] = {0, low, 0, 0};
    mma16(P, A, transpose8(T[0]), 0);
    mma16(R, T, 0, transpose8(pack_f16(P[2], P[3])));
    T[1] = pack_f16(-R[2], -R[3]);
    __syncwarp();
    sts_u(mine + (g + 8) * 48 + t * 4, T[1]);
  }
  bar_sync(bar, 128);
  const u32 m10 = scratch + 4096, p22 = m10 + 768;  // p22: two blocks
  float M0[2][4], M1[2][4], M2[2][4];
  zero(M0); zero(M1); zero(M2);
  if (w & 1) {  // the lower left of two blocks of 32
    float P[2][4];
    zero(P);
    u32 A[4];
#pragma unroll
    for (int i = 0; i < 4; i++) A[i] = w == 1 ? L[0][i] : L[2][i];
    mul_stored(P, A, block_at(scratch + (w - 1) * 1024, lane));
    mul_held(M2, T, P);
    neg(M2);
    if (w == 1) store_block(m10, M2, g, t);
  }
  bar_sync(bar, 128);
  if (w >= 2) {
    float P0[2][4], P1[2][4];
    zero(P0); zero(P1);
    mul_stored(P0, L[0], block_at(scratch, lane));
    mul_stored(P0, L[1], block_at(m10, lane));
    mul_stored(P1, L[1], block_at(scratch + 1024, lane));
    mul_held(M0, T, P0);
    mul_held(M1, T, P1);
    if (w == 2) {
      store_block(p22, P0, g, t);
      store_block(p22 + 768, P1, g, t);
      neg(M0); neg(M1);
    }
  }
  bar_sync(bar, 128);
  if (w == 3) {
    u32 A[4] = {pack_f16(M2[0][0], M2[0][1]), pack_f16(M2[0][2], M2[0][3]), pack_f16(M2[1][0], M2[1][1]), pack_f16(M2[1][2], M2[1][3])};
    mul_stored(M0, A, block_at(p22, lane));
    mul_stored(M1, A, block_at(p22 + 768, lane));
    neg(M0); neg(M1);
  }
#pragma unroll
  for (int m = 0; m < 4; m++) {
    if (m <= w) {
      u32 r[4];
#pragma unroll
      for (int n = 0; n < 2; n++) {
        float2 beta = lds2(own + (BETAS + m * 16 + n * 8 + t * 2) * 4);
        float c0, c1, c2, c3;
        if (m == w) { unpack_f16(T[2 * n], c0, c1); unpack_f16(T[2 * n + 1], c2, c3); }
        else {
          const bool two = m + 1 == w && (w & 1);  // a block of 32's lower left
          c0 = two ? M2[n][0] : m == 0 ? M0[n][0] : M1[n][0]; c1 = two ? M2[n][1] : m == 0 ? M0[n][1] : M1[n][1];
          c2 = two ? M2[n][2] : m == 0 ? M0[n][2] : M1[n][2]; c3 = two ? M2[n][3] : m == 0 ? M0[n][3] : M1[n][3];
        }
        r[2 * n] = pack_f16(c0 * beta.x, c1 * beta.y);
        r[2 * n + 1] = pack_f16(c2 * beta.x, c3 * beta.y);
      }
      stsm4(at ^ (32 * m), r[0], r[1], r[2], r[3]);
    }
  }
}
// `solve` of a chunk whose decays are one number a token
__device__ __forceinline__ void invert(u32 load, u32 own, u32 scratch, u32 tile, u32 fac, u32 known, int bar, int tid, float g_in, float beta_in) {
  const int w = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  float kk[32];
  products(kk, load + OFF_K, load + OFF_K);
  if (tid < 64) {
    sts1(own + (GSUM + tid) * 4, scan32(g_in, lane));
    sts1(own + (BETAS + tid) * 4, beta_in);
  }
  bar_sync(bar, 128);
  const int i0 = w * 16 + g, i1 = i0 + 8;
  const float shift = w >= 2 ? lds1(own + (GSUM + 31) * 4) : 0.f;
  float G0 = lds1(own + (GSUM + i0) * 4) + shift, G1 = lds1(own + (GSUM + i1) * 4) + shift;
  const float lb0 = lg2(lds1(own + (BETAS + i0) * 4)), lb1 = lg2(lds1(own + (BETAS + i1) * 4));
  wg_wait<0>();
  hold(kk);
  float n0 = 0.f, n1 = 0.f;
  if (USE_L2) {  // the diagonal holds the squared norms, in the lane with t == g / 2
#pragma unroll
    for (int m = 0; m < 4; m++)
      if (m == w) {
        n0 = (g & 1) ? kk[8 * m + 1] : kk[8 * m];
        n1 = (g & 1) ? kk[8 * m + 7] : kk[8 * m + 6];
      }
    n0 = 0.5f * lg2(__shfl_sync(~0u, n0, g * 4 + (g >> 1)) + 1e-6f);
    n1 = 0.5f * lg2(__shfl_sync(~0u, n1, g * 4 + (g >> 1)) + 1e-6f);
  }
  if (t == 0) {
    sts1(fac + (KEYS + i0) * 4, G0 + n0);
    sts1(fac + (KEYS + i1) * 4, G1 + n1);
    sts1(fac + (SUMS + i0) * 4, G0);
    sts1(fac + (SUMS + i1) * 4, G1);
  }
  const float B0 = G0 - n0 + lb0, B1 = G1 - n1 + lb1;
  bar_sync(bar, 128);
  if (tid == 0) mbar_arrive(known);
#pragma unroll
  for (int m = 0; m < 4; m++) {
    float* l = kk + 8 * m;
    if (m <= w) {
      const float2 x = lds2(fac + (KEYS + m * 16 + t * 2) * 4), y = lds2(fac + (KEYS + m * 16 + 8 + t * 2) * 4);
      l[0] *= ex2(B0 - x.x); l[1] *= ex2(B0 - x.y); l[2] *= ex2(B1 - x.x); l[3] *= ex2(B1 - x.y);
      l[4] *= ex2(B0 - y.x); l[5] *= ex2(B0 - y.y); l[6] *= ex2(B1 - y.x); l[7] *= ex2(B1 - y.y);
    }
  }
  solve(kk, own, scratch, tile, bar, tid);
}

// a chunk of a value head: what it is kept as, and its tokens
struct Item {
  int record, head, token, live;
  __device__ Item(const Args& p, int at);
};
// the row of a record: rows begin at records query_start_loc[row] / BT + row, which leaves room for each row's chunks
__device__ __forceinline__ int row_of(const Args& p, int record) {
  int low = 0, high = p.rows;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (p.query_start_loc[middle] / BT + middle <= record) low = middle; else high = middle;
  }
  return low;
}

__device__ __forceinline__ Item::Item(const Args& p, int at) : record(at / p.HV), head(at % p.HV) {
  const int row = row_of(p, record), begin = p.query_start_loc[row];
  token = begin + (record - begin / BT - row) * BT;
  live = min(BT, p.query_start_loc[row + 1] - token);
}
// the next chunk that there is, of those from `at` on that are the block's
__device__ __forceinline__ Item next_item(const Args& p, int& at, int items) {
  Item item(p, min(at, items - 1));
  for (; at < items && item.live <= 0; item = Item(p, min(at, items - 1))) at += gridDim.x;
  return item;
}

// Gated delta rule prefill for sm_90a, K = V = 128, bf16 activations, f32 state [slot, HV, V, K].
//
// Warpgroups by role: NCONS walk the chunks with 64 value rows of the state each in registers; one
// inverts each chunk's system ahead of them, one prepares its scores and factors and starts loads.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef long long i64;

constexpr int BT = 64;
constexpr int TILE = 8192;  // 64 rows of 128 bytes
constexpr int LOADS = 3, READY = NSOLVE + 1;
constexpr int OFF_K = 0, OFF_Q = 2 * TILE, OFF_V = 4 * TILE, LOAD = (4 + NCONS) * TILE;
constexpr int OFF_SOLVE = 0, OFF_SCORE = TILE, PREP = 2 * TILE;
constexpr int OFF_PREP = LOADS * LOAD, OFF_S = OFF_PREP + READY * PREP, OFF_FAC = OFF_S + NCONS * 2 * TILE;
constexpr int FAC = 1536, OFF_OWN = OFF_FAC + READY * FAC, OFF_SOLVER = OFF_OWN + (NSOLVE + 1) * 1024;
constexpr int SOLVER = 4096 + 2304, OFF_BAR = OFF_SOLVER + NSOLVE * SOLVER;
// floats of a chunk's factors; of the preparing groups' own: sum of log decays and log norm of each key, and more
constexpr int BY_KEY = 0, BY_QUERY = 64, TO_END = 128, TOTAL = 192, KEYS = 256, SUMS = 320;
constexpr int LOGQ = 0, GSUM = 0, BETAS = 64;
constexpr float LOG2E = 1.4426950408889634f;

struct alignas(64) Map { char bytes[128]; };
struct Args {
  Map q, k, v;  // [64 dims, tokens, halves, heads]
  const void *a, *b;
  const float *A_log, *dt_bias;
  const int *query_start_loc, *src, *dst, *track;
  float *state;
  u16 *out;
  i64 out_t, out_h, s_slot, s_h;
  int a_t, b_t, rows, tokens, HV, R, points;
  float scale, beta_scale;
};

static_assert(sizeof(Args) == 576, "arguments.py lays it out");

// what the host has to grant: all of it, the barriers, and what aligning to 1024 may cost
extern "C" __device__ int gdn_prefill_shared = OFF_BAR + 128 + 1024;

static_assert(8 * (LOADS + 4 * READY) <= 128 && OFF_BAR + 128 + 1024 <= 232448, "shared memory of a block");

#include "ptx.cuh"

__device__ __forceinline__ float raw_of(const void* p, i64 i, bool wide) {
  if (wide) return ((const float*)p)[i];
  return __uint_as_float((u32)((const u16*)p)[i] << 16);
}
__device__ __forceinline__ float softplus(float x) {
  float e = __expf(fminf(x, 20.f));
  float small = e * (1.f - e * (0.5f - e * (1.f / 3.f)));
  return x > 20.f ? x : (e < 0.01f ? small : __logf(1.f + e));
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

struct Gates {
  float rate, bias;
  __device__ Gates(const Args& p, int head) {
    rate = GATE_READY ? 0.f : -__expf(p.A_log[head]) * LOG2E;
    bias = GATE_READY ? 0.f : p.dt_bias[head];
  }
  __device__ float decay(float a) const { return GATE_READY ? a * LOG2E : rate * softplus(a + bias); }
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
// (I + L)^-1 * beta of a chunk, f16, for products with it on the right
__device__ __forceinline__ void invert(u32 load, u32 own, u32 scratch, u32 tile, u32 fac, u32 known, int bar, int tid, float g_in, float beta_in) {
  const int w = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const u32 mine = scratch + w * 1024, at = tile + strip(w, lane);
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
  u32 L[3][4], low = 0;
#pragma unroll
  for (int m = 0; m < 4; m++) {
    float* l = kk + 8 * m;
    if (m <= w) {
      const float2 x = lds2(fac + (KEYS + m * 16 + t * 2) * 4), y = lds2(fac + (KEYS + m * 16 + 8 + t * 2) * 4);
      l[0] *= ex2(B0 - x.x); l[1] *= ex2(B0 - x.y); l[2] *= ex2(B1 - x.x); l[3] *= ex2(B1 - x.y);
      l[4] *= ex2(B0 - y.x); l[5] *= ex2(B0 - y.y); l[6] *= ex2(B1 - y.x); l[7] *= ex2(B1 - y.y);
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

extern "C" __global__ void __launch_bounds__(128 * (NCONS + NSOLVE + 1), 1) gdn_prefill(const __grid_constant__ Args p) {
  extern __shared__ char raw_smem[];
  const u32 smem = (smem_of(raw_smem) + 1023) & ~1023u;
  const int tid = threadIdx.x & 127, wg = threadIdx.x >> 7;
  constexpr int SPLIT = 2 / NCONS;
  int pid = blockIdx.x;
  const int half = SPLIT == 1 ? 0 : pid % SPLIT;
  pid /= SPLIT;
  const int head = pid % p.HV, row = pid / p.HV;
  const int begin = p.query_start_loc[row];
  const int end = row < p.rows ? p.query_start_loc[row + 1] : p.tokens;
  const int length = end - begin;
  if (length <= 0) return;
  const int v0 = half * 64;
  if (row == p.rows) {  // pads
    for (int i = threadIdx.x; i < length * (NCONS * 8); i += blockDim.x) {
      int token = i / (NCONS * 8), c = i % (NCONS * 8);
      *(uint4*)(p.out + (begin + token) * p.out_t + head * p.out_h + v0 + c * 8) = make_uint4(0, 0, 0, 0);
    }
    return;
  }
  const int chunks = (length + BT - 1) / BT;
  const u32 loaded = smem + OFF_BAR, full = loaded + 8 * LOADS, empty = full + 8 * READY, known = empty + 8 * READY;
  if (threadIdx.x == 0) {
    for (int i = 0; i < LOADS; i++) mbar_init(loaded + 8 * i, 1);
    for (int i = 0; i < READY; i++) { mbar_init(full + 8 * i, 2); mbar_init(empty + 8 * i, 4 * NCONS); mbar_init(known + 8 * i, 1); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  for (int i = threadIdx.x; i < READY * PREP / 16; i += blockDim.x)
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(smem + OFF_PREP + i * 16), "r"(0) : "memory");
  proxy_fence();
  __syncthreads();

  if (wg >= NCONS) {
    if (wg < NCONS + NSOLVE) {  // solves
      const int me = wg - NCONS, bar = 1 + me;
#if CONS_REGS
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(SOLVE_REGS));
#endif
      const Gates gates(p, head);
      float raw_a = 0.f, raw_b = 0.f;
      auto read = [&](int n) {
        int at = n * BT + tid;
        raw_a = raw_b = 0.f;
        if (tid < BT && at < length) {
          raw_a = raw_of(p.a, (i64)(begin + at) * p.a_t + head, A_F32);
          raw_b = raw_of(p.b, (i64)(begin + at) * p.b_t + head, B_F32);
        }
      };
      if (me < chunks) read(me);
      for (int n = me; n < chunks; n += NSOLVE) {
        const int r = n % READY, live = min(BT, length - n * BT);
        const u32 from = smem + (n % LOADS) * LOAD;
        float g = 0.f, beta = 0.f;
        if (tid < live) {
          g = gates.decay(raw_a);
          beta = GATE_READY ? raw_b : __fdividef(p.beta_scale, 1.f + __expf(-raw_b));
        }
        if (n >= READY) mbar_wait(empty + 8 * r, (n / READY - 1) & 1);
        if (n + NSOLVE < chunks) read(n + NSOLVE);
        mbar_wait(loaded + 8 * (n % LOADS), (n / LOADS) & 1);
        if (live < BT) {
          clear_rows(from + OFF_K, live, 2, tid);
          proxy_fence();
          bar_sync(bar, 128);
        }
        invert(from, smem + OFF_OWN + me * 1024, smem + OFF_SOLVER + me * SOLVER, smem + OFF_PREP + r * PREP + OFF_SOLVE, smem + OFF_FAC + r * FAC, known + 8 * r, bar, tid, g, beta);
        proxy_fence();
        bar_sync(bar, 128);
        if (tid == 0) mbar_arrive(full + 8 * r);
      }
    } else {  // loads and scores
#if CONS_REGS
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PREP_REGS));
#endif
      auto load = [&](int n) {
        u32 to = smem + (n % LOADS) * LOAD, at = loaded + 8 * (n % LOADS);
        int token = begin + n * BT;
        mbar_expect(at, LOAD);
        tma4(to + OFF_K, p.k, token, 0, head / p.R, at);
        tma4(to + OFF_Q, p.q, token, 0, head / p.R, at);
        tma4(to + OFF_V, p.v, token, half, head, at);
      };
      if (tid == 96) load(0);
      const float lscale = lg2(p.scale);
      for (int n = 0; n < chunks; n++) {
        const int r = n % READY, live = min(BT, length - n * BT);
        const u32 from = smem + (n % LOADS) * LOAD;
        if (n >= READY) mbar_wait(empty + 8 * r, (n / READY - 1) & 1);
        if (n + 1 < chunks && tid == 96) {
          if (READY > 2 && n + 1 >= LOADS) mbar_wait(empty + 8 * ((n + 1) % READY), ((n + 1) / READY - 1) & 1);
          load(n + 1);
        }
        mbar_wait(loaded + 8 * (n % LOADS), (n / LOADS) & 1);
        if (live < BT) clear_rows(from + OFF_V, live, NCONS, tid);
        score(from, smem + OFF_OWN + NSOLVE * 1024, smem + OFF_PREP + r * PREP + OFF_SCORE, smem + OFF_FAC + r * FAC, known + 8 * r, (n / READY) & 1, tid, lscale);
        proxy_fence();
        bar_sync(4, 128);
        if (tid == 0) mbar_arrive(full + 8 * r);
      }
    }
  } else {
#if CONS_REGS
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONS_REGS));
#endif
    const int w = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
    float S[64];
    {
      const int slot = p.src[row];
      const float* from = p.state + (i64)slot * p.s_slot + head * p.s_h + (v0 + wg * 64 + w * 16 + g) * 128 + t * 2;
#pragma unroll
      for (int n = 0; n < 16; n++) {
        float2 x = make_float2(0.f, 0.f), y = x;
        if (slot >= 0) {
          x = *(const float2*)(from + n * 8);
          y = *(const float2*)(from + 8 * 128 + n * 8);
        }
        S[n * 4] = x.x; S[n * 4 + 1] = x.y; S[n * 4 + 2] = y.x; S[n * 4 + 3] = y.y;
      }
    }
    // where the lane's entries of a slot are; worked out anew, since registers are short in between
    auto keep = [&](int slot) {
      int pid, lane, warp;
      asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(pid));
      asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
      asm volatile("mov.u32 %0, %%tid.x;" : "=r"(warp));
      warp >>= 5;
      const int half = pid % SPLIT, head = pid / SPLIT % p.HV;
      float* to = p.state + (i64)slot * p.s_slot + head * p.s_h + (half * 64 + warp * 16 + (lane >> 2)) * 128 + (lane & 3) * 2;
#pragma unroll
      for (int m = 0; m < 16; m++) {
        *(float2*)(to + m * 8) = make_float2(S[m * 4], S[m * 4 + 1]);
        *(float2*)(to + 8 * 128 + m * 8) = make_float2(S[m * 4 + 2], S[m * 4 + 3]);
      }
    };
    u16* out = p.out + (i64)begin * p.out_t + head * p.out_h + v0 + wg * 64 + (tid >> 3) * p.out_t + (tid & 7) * 8;
    const u32 held = smem + OFF_S + wg * 2 * TILE;
    const u32 narrow = held + strip(w, lane);
    const u32 turned = OFF_V + wg * TILE + ((lane & 7) + (lane >> 4) * 8) * 128 + (((w * 2 + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
    const u32 flat = OFF_V + wg * TILE + (tid >> 3) * 128 + (((tid & 7) ^ ((tid >> 3) & 7)) << 4);
    for (int n = 0; n < chunks; n++) {
      const u32 from = smem + (n % LOADS) * LOAD, ready = smem + OFF_PREP + (n % READY) * PREP;
      const u32 fac = smem + OFF_FAC + (n % READY) * FAC;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float* x = S + 8 * i;
        stsm4((narrow ^ ((i & 3) * 32)) + (i >> 2) * TILE, pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
              pack_bf16(x[6], x[7]));
      }
      proxy_fence();
      bar_sync(6 + wg, 128);
      mbar_wait(full + 8 * (n % READY), (n / READY) & 1);
      float known[32], o[32];
      products(known, held, from + OFF_K);
      float top0 = 0.f, top1 = 0.f;
      wg_wait<0>();
      hold(known);
#pragma unroll
      for (int i = 0; i < 4; i++) {  // tokens 16 i .. 16 i + 15, value rows of the warp
        u32 r[4];
        ldsm4t(r, from + turned + i * 2048);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float2 by = lds2(fac + (BY_KEY + i * 16 + h * 8 + t * 2) * 4);
          float* x = known + 8 * i + 4 * h;
          x[0] = bf_lo(r[2 * h]) - x[0] * by.x;
          x[1] = bf_hi(r[2 * h]) - x[1] * by.y;
          x[2] = bf_lo(r[2 * h + 1]) - x[2] * by.x;
          x[3] = bf_hi(r[2 * h + 1]) - x[3] * by.y;
          top0 = fmaxf(top0, fmaxf(fabsf(x[0]), fabsf(x[1])));
          top1 = fmaxf(top1, fmaxf(fabsf(x[2]), fabsf(x[3])));
        }
      }
#pragma unroll
      for (int d = 1; d < 4; d <<= 1) {
        top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, d));
        top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, d));
      }
      if (!(top0 > 0.f)) top0 = 1.f;
      if (!(top1 > 0.f)) top1 = 1.f;
      const float down0 = __fdividef(1.f, top0), down1 = __fdividef(1.f, top1);
      u32 a[16];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        a[2 * i] = pack_f16(known[4 * i] * down0, known[4 * i + 1] * down0);
        a[2 * i + 1] = pack_f16(known[4 * i + 2] * down1, known[4 * i + 3] * down1);
      }
      {
        u64 sd = desc_of(ready + OFF_SOLVE);
        wg_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) wg_rs_h(known, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3], sd + i * 2, i);
        wg_commit();
      }
      products(o, held, from + OFF_Q);
      const float total = lds1(fac + TOTAL * 4);
#pragma unroll
      for (int i = 0; i < 64; i++) S[i] *= total;
      wg_wait<1>();
      hold(known);
      u32 b[16];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        float2 by = lds2(fac + (TO_END + i * 8 + t * 2) * 4);
        a[2 * i] = pack_f16(known[4 * i], known[4 * i + 1]);
        a[2 * i + 1] = pack_f16(known[4 * i + 2], known[4 * i + 3]);
        b[2 * i] = pack_bf16(known[4 * i] * by.x * top0, known[4 * i + 1] * by.y * top0);
        b[2 * i + 1] = pack_bf16(known[4 * i + 2] * by.x * top1, known[4 * i + 3] * by.y * top1);
      }
      {
        u64 kd = desc_mn(from + OFF_K);
        wg_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) wg_rs_state(S, b[4 * i], b[4 * i + 1], b[4 * i + 2], b[4 * i + 3], kd + i * (2048 >> 4));
        wg_commit();
      }
      wg_wait<1>();
      hold(o);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        float2 by = lds2(fac + (BY_QUERY + i * 8 + t * 2) * 4);
        o[4 * i] *= by.x * down0; o[4 * i + 1] *= by.y * down0;
        o[4 * i + 2] *= by.x * down1; o[4 * i + 3] *= by.y * down1;
      }
      {
        u64 sd = desc_of(ready + OFF_SCORE);
        wg_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) wg_rs_h(o, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3], sd + i * 2, 1);
        wg_commit();
      }
      wg_wait<0>();
      hold(S); hold(o);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* x = o + 8 * i;
        stsm4t(from + turned + i * 2048, pack_bf16(x[0] * top0, x[1] * top0), pack_bf16(x[2] * top1, x[3] * top1),
               pack_bf16(x[4] * top0, x[5] * top0), pack_bf16(x[6] * top1, x[7] * top1));
      }
      bar_sync(6 + wg, 128);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        uint4 x = lds4u(from + flat + i * 2048);
        if (n * BT + (tid >> 3) + i * 16 < length) *(uint4*)(out + (i64)(i * 16) * p.out_t) = x;
      }
      out += BT * p.out_t;
      if (n + 1 < chunks) proxy_fence();  // loads will overwrite what was read and written here
      __syncwarp();
      if (lane == 0) mbar_arrive(empty + 8 * (n % READY));
#if TRACK
      const int count = min((n + 1) * BT, length);
      for (int i = 0; i < p.points; i++)
        if (p.track[3 * i] == row && p.track[3 * i + 1] == count && p.track[3 * i + 2] >= 0) keep(p.track[3 * i + 2]);
#endif
    }
    const int last = p.dst[row];
    if (last >= 0) keep(last);
  }
}

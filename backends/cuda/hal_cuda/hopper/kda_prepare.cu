// What a walk needs of a chunk whose channels decay by themselves: a block takes a chunk of a value head after the other,
// and loads the next one once it has no use for the last; a warp takes 16 tokens and half of the channels. No exponent that is taken is above 0: a pair of tokens is decayed in two factors that meet at a token between
// them. Blocks of 16 meet at the start of the later one; within a block pairs meet at the middle of 16, 8, 4 or 2 tokens.
#include "chunk.cuh"

constexpr int ROW = 544;  // bytes of a token's sums of log decays; the pad spares bank conflicts
constexpr int K_DOWN = OFF_KEYS, Q_DOWN = OFF_KEYS + OFF_Q, K_END = OFF_ENDS, SOLVE = OFF_SOLVE, SCORES = OFF_SCORE, ENDS = OFF_TOTALS;
constexpr int OFF_G = CHANNEL_RECORD, OFF_OWN = OFF_G + 64 * ROW, OFF_SOLVER = OFF_OWN + 2048, OFF_BAR = OFF_SOLVER + SOLVER;
constexpr int RK = 128, RQ = 192, SQUARES = 256;  // of a block's own: what brings keys and queries to length 1, with the scale
constexpr bool AHEAD = !A_F32;     // read the next chunk's gates early; wide ones would take too many registers
constexpr float LEAST = -160.f;    // less than that leaves nothing of a float either

extern "C" __device__ int kda_prepare_shared = OFF_BAR + 64 + 1024;

struct Gate {
  float rate, bx, by, lower;
  __device__ Gate(const Args& p, int head, int c) : rate(0.f), bx(0.f), by(0.f), lower(p.lower_bound * LOG2E) {
    if (GATE_READY) return;
    rate = -__expf(p.A_log[head]);
    if (GATE == SAFE_GATE) rate = fminf(rate, -1e-30f) * LOG2E;  // however slow, where there is no token there is no decay
    const float unit = GATE == SAFE_GATE ? rate : LOG2E;
    bx = p.dt_bias[head * 128 + c] * unit;
    by = p.dt_bias[head * 128 + c + 1] * unit;
  }
  __device__ float decay(float x, float bias) const {
    float g;
    if (GATE_READY) g = x * LOG2E;
    else if (GATE == SAFE_GATE) g = __fdividef(lower, 1.f + ex2(fmaf(x, rate, bias)));
    else g = rate * softplus2(fmaf(x, LOG2E, bias));
    return fmaxf(g, LEAST);
  }
};

// raw gates of two channels and 16 tokens, as they are read
// where there is no token they leave no decay
#if A_F32
typedef float2 Two;
__device__ Two no_decay() { return GATE_READY ? make_float2(0.f, 0.f) : make_float2(-3e38f, -3e38f); }
__device__ __forceinline__ float2 both(Two x) { return x; }
#else
typedef u32 Two;
__device__ Two no_decay() { return GATE_READY ? 0 : 0xff60ff60; }
__device__ __forceinline__ float2 both(Two x) { return make_float2(bf_lo(x), bf_hi(x)); }
#endif
__device__ __forceinline__ void read_gates(const Args& p, Two (&x)[16], const Item& item) {
  const int c = (threadIdx.x & 63) * 2, t0 = (threadIdx.x >> 6) * 16;
  const i64 first = (i64)(item.token + t0) * p.a_t + (i64)item.head * p.a_h + c;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    x[i] = no_decay();
    if (t0 + i < item.live) x[i] = *(const Two*)((const char*)p.a + (first + (i64)i * p.a_t) * (int)(sizeof(Two) / 2));
  }
}
// sums of log decays over a chunk's tokens: a thread takes two channels of a quarter of the tokens
__device__ __forceinline__ void sum_decays(const Args& p, const Two (&x)[16], u32 to, u32 totals, int head) {
  const int c = (threadIdx.x & 63) * 2, quarter = threadIdx.x >> 6, t0 = quarter * 16;
  const Gate gate(p, head, c);
  float2 sums[16], sum = make_float2(0.f, 0.f);
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const float2 raw = both(x[i]);
    sum.x += gate.decay(raw.x, gate.bx);
    sum.y += gate.decay(raw.y, gate.by);
    sums[i] = sum;
  }
  sts2(totals + (quarter * 128 + c) * 4, sum.x, sum.y);
  __syncthreads();
  float2 before = make_float2(0.f, 0.f);
  for (int i = 0; i < quarter; i++) {
    const float2 more = lds2(totals + (i * 128 + c) * 4);
    before.x += more.x;
    before.y += more.y;
  }
#pragma unroll
  for (int i = 0; i < 16; i++) sts2(to + (t0 + i) * ROW + c * 4, before.x + sums[i].x, before.y + sums[i].y);
}

// of the four pairs of a fragment of 16 channels: rows g and g + 8, channels 2 t and 2 t + 8
__device__ __forceinline__ void pairs(float2 (&to)[4], u32 first, u32 second) {
  to[0] = lds2(first);
  to[1] = lds2(second);
  to[2] = lds2(first + 32);
  to[3] = lds2(second + 32);
}
__device__ __forceinline__ void decayed(u32 (&to)[4], const u32 (&x)[4], const float2 (&f)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) to[i] = pack_bf16(bf_lo(x[i]) * f[i].x, bf_hi(x[i]) * f[i].y);
}
// the same by factors that are rounded first, which is what products of pairs of tokens need
__device__ __forceinline__ void near(u32 (&a)[4], u32 (&b)[4], const u32 (&k)[4], const u32 (&q)[4], const float2 (&f)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 by = pack_bf16(f[i].x, f[i].y);
    a[i] = times_bf16(k[i], by);
    b[i] = times_bf16(q[i], by);
  }
}
__device__ __forceinline__ void apart(float2 (&f)[4], const float2 (&later)[4], const float2 (&sooner)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) f[i] = make_float2(ex2(later[i].x - sooner[i].x), ex2(later[i].y - sooner[i].y));
}
// products with 8 rows of x by themselves: x's own in d[0], d[1], those of y's rows with them in d[2], d[3]
__device__ __forceinline__ void upper(float (&d)[4], const u32 (&x)[4], const u32 (&y)[4]) {
  const u32 rows[4] = {x[0], y[0], x[2], y[2]};
  mma16b(d, rows, x[0], x[2]);
}
__device__ __forceinline__ void lower(float (&d)[4], const u32 (&x)[4], const u32 (&y)[4]) {
  const u32 rows[4] = {x[1], y[1], x[3], y[3]};
  mma16b(d, rows, x[1], x[3]);
}

#include "kda_pairs.cuh"

extern "C" __global__ void __launch_bounds__(256, 2) kda_prepare(const __grid_constant__ Args p) {
  extern __shared__ char raw_smem[];
  const u32 smem = (smem_of(raw_smem) + 1023) & ~1023u;
  const int tid = threadIdx.x & 127, w = tid >> 5, lane = tid & 31, group = threadIdx.x >> 7, items = (p.tokens / BT + p.rows) * p.HV;
  const u32 loaded = smem + OFF_BAR, own = smem + OFF_OWN, sums = smem + OFF_G;
  chain();
  if (threadIdx.x == 128) {
    mbar_init(loaded, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    proxy_fence();
  }
  auto load = [&](const Item& item) {
    mbar_expect(loaded, 4 * TILE);
    tma4(smem + K_DOWN, p.k, item.token, 0, item.head / p.R, loaded);
    tma4(smem + Q_DOWN, p.q, item.token, 0, item.head / p.R, loaded);
  };
  int at = blockIdx.x;
  Item item = next_item(p, at, items);
  Two raw[16];
  if (at < items) {
    if (threadIdx.x == 128) load(item);
    if (AHEAD) read_gates(p, raw, item);
  }
  for (int phase = 0; at < items; phase ^= 1) {
    if (!AHEAD) read_gates(p, raw, item);
    float beta = 0.f;
    if (threadIdx.x < min(item.live, 64)) beta = raw_of(p.b, (i64)(item.token + tid) * p.b_t + item.head, B_F32);
    sum_decays(p, raw, sums, smem + OFF_SOLVER, item.head);
    if (threadIdx.x < 64) {
      if (!GATE_READY) beta = tid < item.live ? __fdividef(p.beta_scale, 1.f + __expf(-beta)) : 0.f;
      sts1(own + (BETAS + tid) * 4, beta);
    }
    mbar_wait(loaded, phase);
    if (item.live < BT && !group) clear_rows(smem + K_DOWN, item.live, 4, tid);
    if (threadIdx.x == 0) bulk_read();
    __syncthreads();

    const Pairs of(smem, sums, w, lane, group * 4);
    float mine[32];  // of the keys' products the first group's, of the queries' ones the second's
    {
      float kk[32], qk[32];
      float2 square_k, square_q;
      of.within(kk, qk, square_k, square_q);
      of.tell(own + (SQUARES + group * 128) * 4, square_k, square_q);
      of.before(kk, qk);
      if (group) of.give(kk, smem + SOLVE); else of.give(qk, smem + K_END);
#pragma unroll
      for (int j = 0; j < 32; j++) mine[j] = group ? qk[j] : kk[j];
    }
    __syncthreads();
    of.take(mine, smem + (group ? K_END : SOLVE));
    if (!group) {
      const float square = lds1(own + (SQUARES + tid) * 4) + lds1(own + (SQUARES + 128 + tid) * 4);
      sts1(own + (RK + tid) * 4, (USE_L2 ? rsqrtf(square + 1e-6f) : 1.f) * (tid < 64 ? 1.f : p.scale));
    } else {
      sts1(smem + ENDS + tid * 4, ex2(lds1(sums + 63 * ROW + tid * 4)));
    }
    char* to = p.records + (i64)at * CHANNEL_RECORD;
    at += gridDim.x;
    item = next_item(p, at, items);
    if (at < items && AHEAD) read_gates(p, raw, item);
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * TILE / 16; i += 256)
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(smem + SOLVE + i * 16), "r"(0) : "memory");
    const float2 rk = of.of_rows(own + RK * 4), rq = of.of_rows(own + RQ * 4);
    of.panels(rk, rq);
    proxy_fence();
    __syncthreads();
    if (group) {
      if (tid == 0) bulk_out(to + PREP, smem + PREP, OFF_TOTALS - PREP);
      of.scale(mine, rq, own + RK * 4);
      of.keep(mine, smem + SCORES);
      if (tid == 0) {
        bulk_read();
        if (at < items) load(item);
      }
    } else {
      const float2 beta = of.of_rows(own + BETAS * 4);
      of.scale(mine, make_float2(rk.x * beta.x, rk.y * beta.y), own + RK * 4);
      solve(mine, own, smem + OFF_SOLVER, smem + SOLVE, 1, tid);
    }
    proxy_fence();
    __syncthreads();
    if (threadIdx.x == 0) {
      bulk_out(to, smem, PREP);
      bulk_out(to + OFF_TOTALS, smem + OFF_TOTALS, CHANNEL_RECORD - OFF_TOTALS);
    }
  }
  if (threadIdx.x == 0) bulk_wait();
}

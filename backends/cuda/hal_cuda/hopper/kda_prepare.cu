// What a walk needs of every chunk of a delta rule where each channel decays by itself: a block is a chunk and a head.
//
// exp(G_i - G_j) differs by channel, so it is taken into keys and queries, split at a token between the two, so that no
// exponent is above zero: for pairs of different blocks of 16 tokens at the end of the block before i's; within a block by
// levels, where a pair lies across the middle of one block of 2, 4, 8 or 16.
#include "chunk.cuh"

constexpr int ROW = 136 * 4;  // bytes of a token's sums, so that eight tokens have banks of their own
constexpr int OFF_G = CHANNEL_RECORD, OFF_SCRATCH = OFF_G + BT * ROW, OFF_OWN = OFF_SCRATCH + SOLVER, OFF_BAR = OFF_OWN + 1024;
constexpr int NORM_K = 128, NORM_Q = 192;  // floats of a block's own, behind GSUM and BETAS

extern "C" __device__ int kda_prepare_shared = OFF_BAR + 16 + 1024;

// the log decays of a channel, summed over the chunk's tokens; a thread is a channel
__device__ __forceinline__ void sum_decays(const Args& p, const Item& item, u32 sums, u32 totals, int c) {
  const float bias = GATE == READY_GATE ? 0.f : p.dt_bias[item.head * 128 + c];
  const float rate = GATE == READY_GATE ? 0.f : __expf(p.A_log[item.head]);
  const i64 first = (i64)item.token * p.a_t + (i64)item.head * p.a_h + c;
  float sum = 0.f;
#pragma unroll 1
  for (int n = 0; n < BT; n += 32) {
    float raw[32];
#pragma unroll
    for (int i = 0; i < 32; i++) raw[i] = n + i < item.live ? raw_of(p.a, first + (i64)(n + i) * p.a_t, A_F32) : 0.f;
#pragma unroll
    for (int i = 0; i < 32; i++) {
      float g = raw[i] * LOG2E;
      if (GATE == CHANNEL_GATE) g = -rate * LOG2E * softplus(raw[i] + bias);
      if (GATE == SAFE_GATE) g = __fdividef(p.lower_bound * LOG2E, 1.f + __expf(-rate * (raw[i] + bias)));
      if (n + i < item.live) sum += g;
      sts1(sums + (n + i) * ROW + c * 4, sum);
    }
  }
  sts1(totals + c * 4, ex2(sum));
}

// two decays over what lies between two sums, the later first or last
__device__ __forceinline__ u32 decays(float2 x, float2 y) { return pack_f16(ex2(-fabsf(x.x - y.x)), ex2(-fabsf(x.y - y.y))); }

// rows of keys or queries at length 1, in float16, in their place; 16 bytes a thread and turn
__device__ __forceinline__ void norm_rows(u32 tile, u32 norms, int tid) {
#pragma unroll 4
  for (int n = 0; n < 8; n++) {
    const int token = n * 8 + (tid >> 4), part = tid & 15;
    const u32 at = tile + (part >> 3) * TILE + token * 128 + (((part & 7) ^ (token & 7)) << 4);
    const float by = ex2(-lds1(norms + token * 4));
    const uint4 x = lds4u(at);
    const u32 y[4] = {pack_f16(bf_lo(x.x) * by, bf_hi(x.x) * by), pack_f16(bf_lo(x.y) * by, bf_hi(x.y) * by),
                      pack_f16(bf_lo(x.z) * by, bf_hi(x.z) * by), pack_f16(bf_lo(x.w) * by, bf_hi(x.w) * by)};
    sts4(at, y);
  }
}

extern "C" __global__ void __launch_bounds__(128, 2) kda_prepare(const __grid_constant__ Args p) {
  extern __shared__ char raw_smem[];
  const u32 smem = (smem_of(raw_smem) + 1023) & ~1023u, sums = smem + OFF_G, own = smem + OFF_OWN, loaded = smem + OFF_BAR;
  const u32 keys = smem + OFF_KEYS, queries = keys + OFF_Q;
  const int tid = (threadIdx.x + blockIdx.x % 4 * 32) % 128, w = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  chain();
  const Item item(p, blockIdx.x);
  const int live = item.live;
  if (live <= 0) return;
  if (tid == 0) {
    mbar_init(loaded, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    mbar_expect(loaded, 4 * TILE);
    tma4(keys, p.k, item.token, 0, item.head / p.R, loaded);
    tma4(queries, p.q, item.token, 0, item.head / p.R, loaded);
  }
  for (int i = tid; i < PREP / 16; i += 128)
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(smem + i * 16), "r"(0) : "memory");
  if (tid < BT) {
    float beta = 0.f;
    if (tid < live) {
      beta = raw_of(p.b, (i64)(item.token + tid) * p.b_t + item.head, B_F32);
      if (GATE != READY_GATE) beta = __fdividef(p.beta_scale, 1.f + __expf(-beta));
    }
    sts1(own + (BETAS + tid) * 4, beta);
  }
  sum_decays(p, item, sums, smem + OFF_TOTALS, tid);
  __syncthreads();
  mbar_wait(loaded, 0);
  if (live < BT) {
    clear_rows(keys, live, 2, tid);
    __syncthreads();
  }
  const int r0 = w * 16 + g, r1 = r0 + 8;
  {
    const float2 nk = log_norms(keys, w, lane), nq = log_norms(queries, w, lane);
    if (t == g >> 1) {
      sts1(own + (NORM_K + r0) * 4, nk.x); sts1(own + (NORM_K + r1) * 4, nk.y);
      sts1(own + (NORM_Q + r0) * 4, nq.x); sts1(own + (NORM_Q + r1) * 4, nq.y);
    }
  }
  __syncthreads();
  norm_rows(keys, own + NORM_K * 4, tid);
  norm_rows(queries, own + NORM_Q * 4, tid);
  __syncthreads();
  float kk[32], qk[32], near_k[4][8], near_q[5][8];  // the last of these: queries with keys of their own token
#pragma unroll
  for (int i = 0; i < 32; i++) kk[i] = qk[i] = near_k[i >> 3][i & 7] = near_q[i >> 3][i & 7] = near_q[4][i & 7] = 0.f;
#pragma unroll 1
  for (int s = 0; s < 8; s++) {  // 16 channels a step
    const u32 swizzled = (s & 3) * 32, beside = (s >> 2) * TILE;
    u32 k[4], q[4], ak[4], aq[4], b[4];
    ldsm4(k, keys + (strip(w, lane) ^ swizzled) + beside);
    ldsm4(q, queries + (strip(w, lane) ^ swizzled) + beside);
    const u32 column = sums + (s * 16 + t * 2) * 4;
    float2 G[4];  // of row and channels as the fragments have them
    G[0] = lds2(column + r0 * ROW); G[1] = lds2(column + r1 * ROW); G[2] = lds2(column + r0 * ROW + 32); G[3] = lds2(column + r1 * ROW + 32);
    mma16(*(float(*)[4])(near_q[4]), q, k[0], k[2]);
    mma16(*(float(*)[4])(near_q[4] + 4), q, k[1], k[3]);
    if (w > 0) {
      const float2 R[2] = {lds2(column + (w * 16 - 1) * ROW), lds2(column + (w * 16 - 1) * ROW + 32)};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u32 by = decays(G[i], R[i >> 1]);
        ak[i] = times(k[i], by);
        aq[i] = times(q[i], by);
      }
#pragma unroll
      for (int m = 0; m < 3; m++) {
        if (m >= w) continue;
        ldsm4(b, keys + (strip(m, lane) ^ swizzled) + beside);
#pragma unroll
        for (int i = 0; i < 4; i++) b[i] = times(b[i], decays(R[i >> 1], lds2(column + (m * 16 + g + (i & 1) * 8) * ROW + (i >> 1) * 32)));
        mma16(*(float(*)[4])(kk + 8 * m), ak, b[0], b[2]);
        mma16(*(float(*)[4])(kk + 8 * m + 4), ak, b[1], b[3]);
        mma16(*(float(*)[4])(qk + 8 * m), aq, b[0], b[2]);
        mma16(*(float(*)[4])(qk + 8 * m + 4), aq, b[1], b[3]);
      }
    }
#pragma unroll
    for (int level = 0; level < 4; level++) {
      const int W = 1 << level;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = g + (i & 1) * 8, middle = (row & ~(2 * W - 1)) + W - 1;
        const u32 by = decays(G[i], lds2(column + (w * 16 + middle) * ROW + (i >> 1) * 32));
        ak[i] = times(k[i], by);
        aq[i] = times(q[i], by);
      }
      mma16(*(float(*)[4])(near_k[level]), ak, ak[0], ak[2]);
      mma16(*(float(*)[4])(near_k[level] + 4), ak, ak[1], ak[3]);
      mma16(*(float(*)[4])(near_q[level]), aq, ak[0], ak[2]);
      mma16(*(float(*)[4])(near_q[level] + 4), aq, ak[1], ak[3]);
    }
  }
  const float b0 = lds1(own + (BETAS + r0) * 4), b1 = lds1(own + (BETAS + r1) * 4);
#pragma unroll
  for (int m = 0; m < 4; m++) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int column = (i >> 2) * 8 + t * 2 + (i & 1), row = g + (i & 2) * 4, apart = row ^ column;
      float x = kk[8 * m + i], y = qk[8 * m + i];
      if (m == w) {
        x = apart >= 8 ? near_k[3][i] : apart >= 4 ? near_k[2][i] : apart >= 2 ? near_k[1][i] : near_k[0][i];
        y = apart >= 8 ? near_q[3][i] : apart >= 4 ? near_q[2][i] : apart >= 2 ? near_q[1][i] : apart ? near_q[0][i] : near_q[4][i];
        x = column < row ? x : 0.f;
        y = column <= row ? y : 0.f;
      }
      if (!USE_L2) {
        const float n = lds1(own + (NORM_K + m * 16 + column) * 4);
        x *= ex2(n + lds1(own + (NORM_K + w * 16 + row) * 4));
        y *= ex2(n + lds1(own + (NORM_Q + w * 16 + row) * 4));
      }
      kk[8 * m + i] = m <= w ? x * (i & 2 ? b1 : b0) : 0.f;
      qk[8 * m + i] = m <= w ? y * p.scale : 0.f;
    }
    if (m <= w) {
      const float* s = qk + 8 * m;
      stsm4((smem + OFF_SCORE + strip(w, lane)) ^ (32 * m), pack_f16(s[0], s[1]), pack_f16(s[2], s[3]), pack_f16(s[4], s[5]), pack_f16(s[6], s[7]));
    }
  }
  solve(kk, own, smem + OFF_SCRATCH, smem + OFF_SOLVE, 1, tid);  // its barriers are behind every read of keys and queries
#pragma unroll 2
  for (int n = 0; n < 8; n++) {  // eight channels of a token
    const int token = n * 8 + (tid >> 4), part = tid & 15;
    const u32 at = (part >> 3) * TILE + token * 128 + (((part & 7) ^ (token & 7)) << 4), from = sums + token * ROW + part * 32;
    const u32 end = sums + (BT - 1) * ROW + part * 32;
    const float dk = USE_L2 ? 1.f : ex2(lds1(own + (NORM_K + token) * 4));
    const float dq = (USE_L2 ? 1.f : ex2(lds1(own + (NORM_Q + token) * 4))) * p.scale;
    const uint4 k = lds4u(keys + at), q = lds4u(queries + at);
    const u32 ks[4] = {k.x, k.y, k.z, k.w}, qs[4] = {q.x, q.y, q.z, q.w};
    const float4 G4[2] = {lds4(from), lds4(from + 16)}, E4[2] = {lds4(end), lds4(end + 16)};
    u32 down[4], asked[4], until[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float G_lo = i & 1 ? G4[i >> 1].z : G4[i >> 1].x, G_hi = i & 1 ? G4[i >> 1].w : G4[i >> 1].y;
      const float E_lo = i & 1 ? E4[i >> 1].z : E4[i >> 1].x, E_hi = i & 1 ? E4[i >> 1].w : E4[i >> 1].y;
      const float lo = ex2(G_lo), hi = ex2(G_hi), end_lo = ex2(E_lo - G_lo), end_hi = ex2(E_hi - G_hi);
      float k_lo, k_hi, q_lo, q_hi;
      unpack_f16(ks[i], k_lo, k_hi);
      unpack_f16(qs[i], q_lo, q_hi);
      k_lo *= dk; k_hi *= dk;
      down[i] = pack_bf16(k_lo * lo, k_hi * hi);
      asked[i] = pack_bf16(q_lo * (lo * dq), q_hi * (hi * dq));
      until[i] = pack_bf16(k_lo * end_lo, k_hi * end_hi);
    }
    sts4(keys + at, down);
    sts4(queries + at, asked);
    sts4(smem + OFF_ENDS + at, until);
  }
  proxy_fence();
  __syncthreads();
  if (tid == 0) {
    bulk_out(p.records + ((i64)item.record * p.HV + item.head) * CHANNEL_RECORD, smem, CHANNEL_RECORD);
    bulk_read();
  }
}

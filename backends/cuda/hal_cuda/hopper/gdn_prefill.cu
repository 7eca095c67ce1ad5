// Gated delta rule prefill for sm_90a, K = V = 128, bf16 activations, f32 state [slot, HV, V, K].
//
// Warpgroups by role: NCONS walk the chunks with 64 value rows of the state each in registers; one
// inverts each chunk's system ahead of them, one prepares its scores and factors and starts loads.
// PREPARED, a warp loads what gdn_prepare.cu left of each chunk, and a row may be cut into parts: phase 0 walks the first
// part and finds what each part between adds to a state and does to one, gdn_join.cu makes the states at the borders of
// them, phase 1 walks the other parts from there.
#include "chunk.cuh"

#if PREPARED
constexpr int LOADS = CHANNEL ? 2 : 3, READY = LOADS, OWN = 0, SOLVERS = 0, THREADS = 128 * (NCONS + 1);
#else
constexpr int LOADS = 3, READY = NSOLVE + 1, OWN = NSOLVE + 1, SOLVERS = NSOLVE, THREADS = 128 * (NCONS + NSOLVE + 1);
#endif
// where every channel decays by itself, keys and queries are prepared as well, and lie with their chunk
constexpr int BEFORE_K = CHANNEL ? 4 * TILE : 0, LOAD = BEFORE_K + (4 + NCONS) * TILE;
constexpr int SQUARES = CHANNEL ? 0 : PREP, OFF_PREP = LOADS * LOAD, OFF_S = OFF_PREP + READY * SQUARES, OFF_FAC = OFF_S + NCONS * 2 * TILE;
constexpr int OFF_OWN = OFF_FAC + READY * FAC, OFF_SOLVER = OFF_OWN + OWN * 1024;
constexpr int OFF_BAR = OFF_SOLVER + SOLVERS * SOLVER;

// what the host has to grant: all of it, the barriers, and what aligning to 1024 may cost
extern "C" __device__ int gdn_prefill_shared = OFF_BAR + 128 + 1024;

static_assert(8 * (LOADS + 4 * READY) <= 128 && OFF_BAR + 128 + 1024 <= 232448, "shared memory of a block");

// the head of a block; worked out anew, since registers are short in between
__device__ __forceinline__ int head_of(const Args& p) {
  int pid;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(pid));
  return pid / (2 / NCONS) % p.HV;
}

// Scores are float16, but where channels decay by themselves: there keys bring their lengths along, which may be small.
__device__ __forceinline__ u32 packed16(float lo, float hi) { return CHANNEL ? pack_bf16(lo, hi) : pack_f16(lo, hi); }
__device__ __forceinline__ void by_scores(float (&d)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
#if CHANNEL
  wg_rs_bf(d, a0, a1, a2, a3, b, 1);
#else
  wg_rs_h(d, a0, a1, a2, a3, b, 1);
#endif
}

#if PREPARED
// what a block does: a part of a row, walked from its state, or from zero, or (carries) from one with no values
struct Part {
  int row, index;
  bool carries;
  __device__ Part(const Args& p, int unit) {
    const int place = unit / p.rows;
    row = unit % p.rows;
    if (p.phase && unit == p.rows * max(p.parts - 1, 1)) row = p.rows;  // pads
    index = p.phase ? place + (p.parts > 1) : (place + 1) / 2;
    carries = !p.phase && place && !(place & 1);
    phase = p.phase;
  }
  int phase;
  __device__ bool is_between() const { return !phase && index; }
  // states at the borders of a row's parts; from the `parts`-th on, what each part does to a state
  __device__ float* border(const Args& p, int head, int i) const { return p.sums + (((i64)row * 2 * p.parts + i) * p.HV + head) * (128 * 128); }
};
#define VALUES (part.carries ? 0u : ~0u)
#define SHOWN (!part.is_between())
#define BEFORE (before * BT)
#else
#define VALUES ~0u
#define SHOWN true
#define BEFORE 0
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) gdn_prefill(const __grid_constant__ Args p) {
  extern __shared__ char raw_smem[];
  const u32 smem = (smem_of(raw_smem) + 1023) & ~1023u;
  const int tid = threadIdx.x & 127, wg = threadIdx.x >> 7;
  constexpr int SPLIT = 2 / NCONS;
  int pid = blockIdx.x;
  const int half = SPLIT == 1 ? 0 : pid % SPLIT;
  pid /= SPLIT;
  const int head = pid % p.HV;
  int row = pid / p.HV;
#if PREPARED
  chain();
  const Part part(p, row);
  row = part.row;
#endif
  int begin = p.query_start_loc[row];
  const int end = row < p.rows ? p.query_start_loc[row + 1] : p.tokens;
  int length = end - begin;
  if (length <= 0) return;
  const int v0 = half * 64;
  if (row == p.rows) {  // pads
    for (int i = threadIdx.x; i < length * (NCONS * 8); i += blockDim.x) {
      int token = i / (NCONS * 8), c = i % (NCONS * 8);
      *(uint4*)(p.out + (begin + token) * p.out_t + head * p.out_h + v0 + c * 8) = make_uint4(0, 0, 0, 0);
    }
    return;
  }
  int chunks = (length + BT - 1) / BT;
#if PREPARED
  const Parts parts(p, row);
  const int before = parts.first(part.index);
  const bool last = part.index == parts.last();
  if (before >= chunks || (last && part.is_between())) return;
  const int first_record = begin / BT + row + before;
  begin += before * BT;
  length -= before * BT;
  chunks = parts.past(part.index) - before;
#endif
  const u32 loaded = smem + OFF_BAR, full = loaded + 8 * LOADS, empty = full + 8 * READY, known = empty + 8 * READY;
  if (threadIdx.x == 0) {
    for (int i = 0; i < LOADS; i++) mbar_init(loaded + 8 * i, 1);
    for (int i = 0; i < READY; i++) { mbar_init(full + 8 * i, PREPARED ? 1 : 2); mbar_init(empty + 8 * i, 4 * NCONS); mbar_init(known + 8 * i, 1); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  for (int i = threadIdx.x; !PREPARED && i < READY * SQUARES / 16; i += blockDim.x)
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(smem + OFF_PREP + i * 16), "r"(0) : "memory");
  proxy_fence();
  __syncthreads();

  if (wg >= NCONS) {
#if PREPARED
#if CONS_REGS
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOAD_REGS));
#endif
    const char* record = p.records + ((i64)first_record * p.HV + head) * KEPT;
    for (int n = 0; tid == 0 && n < chunks; n++) {
      const int r = n % LOADS, token = begin + n * BT;
      const u32 to = smem + r * LOAD, at = full + 8 * r;
      if (n >= LOADS) mbar_wait(empty + 8 * r, (n / LOADS - 1) & 1);
      mbar_expect(at, KEPT + (LOAD - KEPT_TILES));
#if CHANNEL
      bulk_in(to, record, KEPT_TILES, at);
#else
      tma4(to + OFF_K, p.k, token, 0, head / p.R, at);
      tma4(to + OFF_Q, p.q, token, 0, head / p.R, at);
      bulk_in(smem + OFF_PREP + r * PREP, record, PREP, at);
#endif
      tma4(to + BEFORE_K + OFF_V, p.v, token, half, head, at);
      bulk_in(smem + OFF_FAC + r * FAC, record + KEPT_SQUARES, KEPT - KEPT_SQUARES, at);
      record += (i64)p.HV * KEPT;
    }
#else
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
#endif
  } else {
#if CONS_REGS
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONS_REGS));
#endif
    const int w = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
    float S[64];
    {
      const int slot = p.src[row], first = v0 + wg * 64 + w * 16 + g;
      const float* from = p.state + (i64)slot * p.s_slot + head * p.s_h;
      bool there = slot >= 0;
#if PREPARED
      if (part.index > 0) {
        from = part.border(p, head, part.index);
        there = p.phase > 0;
      }
#endif
      from += first * 128 + t * 2;
#pragma unroll
      for (int n = 0; n < 16; n++) {
        float2 x = make_float2(0.f, 0.f), y = x;
        if (there) {
          x = *(const float2*)(from + n * 8);
          y = *(const float2*)(from + 8 * 128 + n * 8);
        }
        S[n * 4] = x.x; S[n * 4 + 1] = x.y; S[n * 4 + 2] = y.x; S[n * 4 + 3] = y.y;
      }
#if PREPARED
      if (part.carries) {
#pragma unroll
        for (int n = 0; n < 64; n++) S[n] = first + (n & 2) * 4 == (n >> 2) * 8 + t * 2 + (n & 1) ? 1.f : 0.f;
      }
#endif
    }
    // where the lane's entries of a slot are; worked out anew, since registers are short in between
    auto keep = [&](float* to) {
      int pid, lane, warp;
      asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(pid));
      asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
      asm volatile("mov.u32 %0, %%tid.x;" : "=r"(warp));
      warp >>= 5;
      to += (pid % SPLIT * 64 + warp * 16 + (lane >> 2)) * 128 + (lane & 3) * 2;
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
    // write a chunk's result through its tile of values, and give the chunk back
    auto emit = [&](int n, const u32 (&result)[16]) {
      const u32 from = smem + (n % LOADS) * LOAD + BEFORE_K;
      if (SHOWN) {
#pragma unroll
        for (int i = 0; i < 4; i++) stsm4t(from + turned + i * 2048, result[4 * i], result[4 * i + 1], result[4 * i + 2], result[4 * i + 3]);
        bar_sync(6 + wg, 128);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          uint4 x = lds4u(from + flat + i * 2048);
          if (n * BT + (tid >> 3) + i * 16 < length) *(uint4*)(out + (i64)(i * 16) * p.out_t) = x;
        }
      }
      out += BT * p.out_t;
      if (n + 1 < chunks) proxy_fence();  // loads will overwrite what was read and written here
      __syncwarp();
      if (lane == 0) mbar_arrive(empty + 8 * (n % READY));
    };
#if PREPARED
    u32 result[16];  // of the last chunk: it is written while the next one's first products run
#endif
    for (int n = 0; n < chunks; n++) {
      const u32 from = smem + (n % LOADS) * LOAD + BEFORE_K, ready = CHANNEL ? from - BEFORE_K : smem + OFF_PREP + (n % READY) * PREP;
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
#if PREPARED
      if (length - n * BT < BT) {  // what lies behind a row's end is another row's
        clear_rows(from + OFF_K, length - n * BT, 2, tid);
        clear_rows(from + OFF_V + wg * TILE, length - n * BT, 1, tid);
        proxy_fence();
        bar_sync(1, 128 * NCONS);
      }
#endif
      float known[32], o[32];
      products(known, held, from + OFF_K);
#if PREPARED
      if (n > 0) emit(n - 1, result);
#endif
      float top0 = 0.f, top1 = 0.f;
      wg_wait<0>();
      hold(known);
#pragma unroll
      for (int i = 0; i < 4; i++) {  // tokens 16 i .. 16 i + 15, value rows of the warp
        u32 r[4];
        ldsm4t(r, from + turned + i * 2048);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float2 by = CHANNEL ? make_float2(1.f, 1.f) : lds2(fac + (BY_KEY + i * 16 + h * 8 + t * 2) * 4);
          float* x = known + 8 * i + 4 * h;
          x[0] = bf_lo(r[2 * h] & VALUES) - x[0] * by.x;
          x[1] = bf_hi(r[2 * h] & VALUES) - x[1] * by.y;
          x[2] = bf_lo(r[2 * h + 1] & VALUES) - x[2] * by.x;
          x[3] = bf_hi(r[2 * h + 1] & VALUES) - x[3] * by.y;
          top0 = fmaxf(top0, fmaxf(fabsf(x[0]), fabsf(x[1])));
          top1 = fmaxf(top1, fmaxf(fabsf(x[2]), fabsf(x[3])));
        }
      }
#pragma unroll
      for (int d = 1; d < 4; d <<= 1) {
        top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, d));
        top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, d));
      }
      if (!(top0 > TINY)) top0 = 1.f;
      if (!(top1 > TINY)) top1 = 1.f;
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
#if CHANNEL
#pragma unroll
      for (int i = 0; i < 16; i++) {
        const float2 total = lds2(fac + (i * 8 + t * 2) * 4);
        S[4 * i] *= total.x; S[4 * i + 1] *= total.y; S[4 * i + 2] *= total.x; S[4 * i + 3] *= total.y;
      }
#else
      const float total = lds1(fac + TOTAL * 4);
#pragma unroll
      for (int i = 0; i < 64; i++) S[i] *= total;
#endif
      wg_wait<1>();
      hold(known);
      u32 b[16];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float2 by = CHANNEL ? make_float2(1.f, 1.f) : lds2(fac + (TO_END + i * 8 + t * 2) * 4);
        a[2 * i] = packed16(known[4 * i], known[4 * i + 1]);
        a[2 * i + 1] = packed16(known[4 * i + 2], known[4 * i + 3]);
        b[2 * i] = pack_bf16(known[4 * i] * by.x * top0, known[4 * i + 1] * by.y * top0);
        b[2 * i + 1] = pack_bf16(known[4 * i + 2] * by.x * top1, known[4 * i + 3] * by.y * top1);
      }
      {
        u64 kd = desc_mn(CHANNEL ? ready + OFF_ENDS : from + OFF_K);
        wg_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) wg_rs_state(S, b[4 * i], b[4 * i + 1], b[4 * i + 2], b[4 * i + 3], kd + i * (2048 >> 4));
        wg_commit();
      }
      wg_wait<1>();
      hold(o);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float2 by = CHANNEL ? make_float2(1.f, 1.f) : lds2(fac + (BY_QUERY + i * 8 + t * 2) * 4);
        o[4 * i] *= by.x * down0; o[4 * i + 1] *= by.y * down0;
        o[4 * i + 2] *= by.x * down1; o[4 * i + 3] *= by.y * down1;
      }
      {
        u64 sd = desc_of(ready + OFF_SCORE);
        wg_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) by_scores(o, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3], sd + i * 2);
        wg_commit();
      }
      wg_wait<0>();
      hold(S); hold(o);
      u32 packed[16];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        packed[2 * i] = pack_bf16(o[4 * i] * top0, o[4 * i + 1] * top0);
        packed[2 * i + 1] = pack_bf16(o[4 * i + 2] * top1, o[4 * i + 3] * top1);
      }
#if PREPARED
#pragma unroll
      for (int i = 0; i < 16; i++) result[i] = packed[i];
#else
      emit(n, packed);
#endif
#if TRACK
      const int count = min((n + 1) * BT, length) + BEFORE;
      for (int i = 0; i < p.points; i++)
        if (p.track[3 * i] == row && p.track[3 * i + 1] == count && p.track[3 * i + 2] >= 0) keep(p.state + (i64)p.track[3 * i + 2] * p.s_slot + head_of(p) * p.s_h);
#endif
    }
#if PREPARED
    emit(chunks - 1, result);
    if (!last) {
      if (!p.phase) keep(part.carries ? part.border(p, head, p.parts + part.index) : part.border(p, head, part.index + 1));
      return;
    }
#endif
    const int slot = p.dst[row];
    if (slot >= 0) keep(p.state + (i64)slot * p.s_slot + head_of(p) * p.s_h);
  }
}

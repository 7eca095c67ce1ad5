// What a walk needs of every chunk of a gated delta rule, all chunks at once: a block takes a chunk of a value head after
// the other, and loads the next one once no product needs the last. One group of four warps inverts the chunk's system,
// the other makes its scores and factors; both as in gdn_prefill.cu.
#include "chunk.cuh"

constexpr int OFF_PREP = 4 * TILE, OFF_FAC = OFF_PREP + PREP, OFF_OWN = OFF_FAC + FAC, OFF_SOLVER = OFF_OWN + 2 * 1024;
constexpr int OFF_BAR = OFF_SOLVER + SOLVER;

extern "C" __device__ int gdn_prepare_shared = OFF_BAR + 64 + 1024;

extern "C" __global__ void __launch_bounds__(256, 3) gdn_prepare(const __grid_constant__ Args p) {
  extern __shared__ char raw_smem[];
  const u32 smem = (smem_of(raw_smem) + 1023) & ~1023u;
  const int tid = threadIdx.x & 127, items = (p.tokens / BT + p.rows) * p.HV;
  const bool solves = threadIdx.x < 128;
  const u32 loaded = smem + OFF_BAR, known = loaded + 8;
  chain();
  if (threadIdx.x == 0) {
    mbar_init(loaded, 1);
    mbar_init(known, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  for (int i = threadIdx.x; i < PREP / 16; i += blockDim.x)
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(smem + OFF_PREP + i * 16), "r"(0) : "memory");
  __syncthreads();
  auto load = [&](const Item& item) {
    mbar_expect(loaded, 4 * TILE);
    tma4(smem + OFF_K, p.k, item.token, 0, item.head / p.R, loaded);
    tma4(smem + OFF_Q, p.q, item.token, 0, item.head / p.R, loaded);
  };
  float raw_a = 0.f, raw_b = 0.f;
  auto read = [&](const Item& item) {
    if (!solves || tid >= item.live) return;
    raw_a = raw_of(p.a, (i64)(item.token + tid) * p.a_t + item.head, A_F32);
    raw_b = raw_of(p.b, (i64)(item.token + tid) * p.b_t + item.head, B_F32);
  };
  int at = blockIdx.x;
  Item item = next_item(p, at, items);
  if (at < items) {
    if (threadIdx.x == 128) load(item);
    read(item);
  }
  for (int phase = 0; at < items; phase ^= 1) {
    const Item now = item;
    float g = 0.f, beta = 0.f;
    if (solves && tid < now.live) {
      g = Gates(p, now.head).decay(raw_a);
      beta = GATE_READY ? raw_b : __fdividef(p.beta_scale, 1.f + __expf(-raw_b));
    }
    at += gridDim.x;
    item = next_item(p, at, items);
    if (at < items) read(item);
    mbar_wait(loaded, phase);
    if (now.live < BT) {
      if (solves) clear_rows(smem + OFF_K, now.live, 2, tid);
      proxy_fence();
      __syncthreads();
    }
    if (solves) {
      if (tid == 0) bulk_read();
      invert(smem, smem + OFF_OWN, smem + OFF_SOLVER, smem + OFF_PREP + OFF_SOLVE, smem + OFF_FAC, known, 1, tid, g, beta);
    } else {
      score(smem, smem + OFF_OWN + 1024, smem + OFF_PREP + OFF_SCORE, smem + OFF_FAC, known, phase, tid, lg2(p.scale));
      bar_sync(4, 128);
      if (tid == 0 && at < items) load(item);  // the other group's products are done, or `known` would not be
    }
    proxy_fence();
    __syncthreads();
    if (threadIdx.x == 0) bulk_out(p.records + ((i64)now.record * p.HV + now.head) * RECORD, smem + OFF_PREP, RECORD);
  }
  if (threadIdx.x == 0) bulk_wait();
}

// The states at the borders of a row's parts: S[i + 1] = S[i] F[i] + B[i], where part i adds B[i], which lies where S[i + 1]
// will, and does F[i] to the state before it. A block is sixteen value rows of a head; float32 throughout. Two F are in
// shared memory: the one that is used and the next.
#include "chunk.cuh"

constexpr int ROWS = 16, THREADS = ROWS * 32;

constexpr int SQUARE = 128 * 128, BYTES = SQUARE * 4;

extern "C" __device__ int gdn_join_shared = 2 * BYTES + ROWS * 128 * 4 + 16;

extern "C" __global__ void __launch_bounds__(THREADS) gdn_join(const __grid_constant__ Args p) {
  extern __shared__ __align__(128) char raw_smem[];
  const float* by = (const float*)raw_smem;
  float4* held = (float4*)(raw_smem + 2 * BYTES);
  const u32 smem = smem_of(raw_smem), full = smem + 2 * BYTES + ROWS * 128 * 4;
  const int slice = blockIdx.x % (128 / ROWS), head = blockIdx.x / (128 / ROWS) % p.HV, row = blockIdx.x / (128 / ROWS) / p.HV;
  chain();
  const Parts parts(p, row);
  const i64 step = (i64)p.HV * SQUARE;
  float* state = p.sums + ((i64)row * 2 * p.parts * p.HV + head) * SQUARE;  // of border 0, which is a slot's
  const int column = threadIdx.x & 127, first = (threadIdx.x >> 7) * 4, count = parts.last() - 1;
  if (count < 1) return;
  auto load = [&](int i) {
    mbar_expect(full + 8 * (i & 1), BYTES);
    bulk_in(smem + (i & 1) * BYTES, state + (p.parts + i) * step, BYTES, full + 8 * (i & 1));
  };
  if (threadIdx.x == 0) {
    mbar_init(full, 1);
    mbar_init(full + 8, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    load(1);
    if (count > 1) load(2);
  }
  held[threadIdx.x] = ((const float4*)(state + step + slice * ROWS * 128))[threadIdx.x];
  __syncthreads();
  for (int i = 1; i <= count; i++) {
    const float* f = by + (i & 1) * SQUARE + column;
    float* next = state + (i + 1) * step + (slice * ROWS + first) * 128 + column;
    float sum[4];
#pragma unroll
    for (int r = 0; r < 4; r++) sum[r] = next[r * 128];
    mbar_wait(full + 8 * (i & 1), (i - 1) >> 1 & 1);
#pragma unroll 8
    for (int k = 0; k < 32; k++) {
#pragma unroll
      for (int r = 0; r < 4; r++) {
        const float4 s = held[(first + r) * 32 + k];
        sum[r] = fmaf(s.x, f[k * 512], fmaf(s.y, f[k * 512 + 128], fmaf(s.z, f[k * 512 + 256], fmaf(s.w, f[k * 512 + 384], sum[r]))));
      }
    }
    __syncthreads();
    if (threadIdx.x == 0 && i + 2 <= count) load(i + 2);
#pragma unroll
    for (int r = 0; r < 4; r++) {
      ((float*)held)[(first + r) * 128 + column] = sum[r];
      next[r * 128] = sum[r];
    }
    __syncthreads();
  }
}

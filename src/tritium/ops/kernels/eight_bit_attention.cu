// Attention in 8 bits on Hopper: int8 scores, float8 weights and values, as `rounded_attention` in Python defines it.
//
// `prepare` and `store_keys_and_values` store q, k and v in 8 bits; `attend` computes. Heads are 128 wide. Tiles are
// 128 tokens of 128 bytes in the order in which tensor cores read shared memory: a tile then needs one bulk copy and no
// tensor map. The 16-byte chunk c of row r is at place c ^ (r % 8) of its row.
//
// Values are stored transposed, [width, keys], since float8 operands are read along the sum. The keys of a group of 32
// are in the order in which a thread holds their scores after the first product: weights go to the second product in
// registers.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define WIDTH 128
#define TILE 128
#define TILE_BYTES (TILE * WIDTH)
// Each of two groups of 128 threads computes 64 queries; a third group copies.
#define GROUPS 2
#define QUERIES (GROUPS * 64)
#define STAGES 4
// Below the values of a stage lie 8 rows of ones: the product with them is the total of the rounded weights.
#define VALUE_BYTES (TILE_BYTES + 8 * TILE)
#define SPLITS 16
#define STORING_WARPS 16
// The largest score of a row counts until one exceeds it by LAZY: few tiles then scale the sums, which saves 3 %.
#define LAZY 2.0f
// Weights are raised by 2^RAISED, so by LAZY more at most: float8 holds 2^-9 to 448 = 2^8.8.
#define RAISED (8.8f - LAZY)
// Of 16 words of four weights, those whose exponentials are computed without the unit for them, which limits the
// kernel. 8 save 5 % of its time, 5 save 3 %.
#ifndef POLY
#define POLY 8
#endif
// 1.5 * 2^23: adding it rounds a number below 2^22 to an integer, which is then in the lowest bits.
#define OFFSET 12582912.0f
// Tensor cores keep about 14 bits of float8 sums. After this many tiles they are added in float32, in shared memory.
#define FLUSH 8
// Less than any score: 127 * 127 * 128 is below 2^21.
#define HIDDEN (-(1 << 30))
#define INFINITY __int_as_float(0x7F800000)

#ifdef FLOAT16
__device__ __forceinline__ void unpack(u32 pair, float& low, float& high) {
  asm("{.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
      : "=f"(low), "=f"(high)
      : "r"(pair));
}
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
#else
__device__ __forceinline__ void unpack(u32 pair, float& low, float& high) {
  low = __int_as_float(pair << 16);
  high = __int_as_float(pair & 0xFFFF0000);
}
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
#endif

// Four numbers as float8, the first in the lowest byte.
__device__ __forceinline__ u32 float8(float a, float b, float c, float d) {
  u32 word;
  asm("{.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(word)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

// Four numbers up to +-127 as int8, the first in the lowest byte: adding OFFSET rounds to integers.
__device__ __forceinline__ u32 int8(float a, float b, float c, float d, float inverse) {
  u32 low = __byte_perm(__float_as_int(fmaf(a, inverse, OFFSET)), __float_as_int(fmaf(b, inverse, OFFSET)), 0x0040);
  u32 high = __byte_perm(__float_as_int(fmaf(c, inverse, OFFSET)), __float_as_int(fmaf(d, inverse, OFFSET)), 0x0040);
  return __byte_perm(low, high, 0x5410);
}

// The larger number; NaN if one is NaN.
__device__ __forceinline__ float larger(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

__device__ __forceinline__ float exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ float largest_of_warp(float x) {
  for (int lane = 16; lane; lane /= 2) x = larger(x, __shfl_xor_sync(~0u, x, lane));
  return x;
}

__device__ __forceinline__ u32 shared_address(const void* x) { return (u32)__cvta_generic_to_shared(x); }

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait(u32 barrier, u32 phase) {
  u32 done;
  do {
    asm volatile(
        "{.reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(phase)
        : "memory");
  } while (!done);
}

// Copy bytes to shared memory; the barrier opens when they have arrived.
__device__ __forceinline__ void copy(u32 target, const u8* source, u32 bytes, u32 barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Describe a tile to tensor cores: rows of 128 bytes, groups of 8 rows 1,024 bytes apart, chunks placed by c ^ (r % 8).
__device__ __forceinline__ u64 described(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void add_scores(int (&score)[64], u64 queries, u64 keys, int keep) {
  asm volatile(
      "{\n.reg .pred keep;\nsetp.ne.b32 keep, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
      "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "
      "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
      "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, keep;\n}\n"
      :
          "+r"(score[0]), "+r"(score[1]), "+r"(score[2]), "+r"(score[3]), "+r"(score[4]), "+r"(score[5]),
          "+r"(score[6]), "+r"(score[7]), "+r"(score[8]), "+r"(score[9]), "+r"(score[10]), "+r"(score[11]),
          "+r"(score[12]), "+r"(score[13]), "+r"(score[14]), "+r"(score[15]), "+r"(score[16]), "+r"(score[17]),
          "+r"(score[18]), "+r"(score[19]), "+r"(score[20]), "+r"(score[21]), "+r"(score[22]), "+r"(score[23]),
          "+r"(score[24]), "+r"(score[25]), "+r"(score[26]), "+r"(score[27]), "+r"(score[28]), "+r"(score[29]),
          "+r"(score[30]), "+r"(score[31]), "+r"(score[32]), "+r"(score[33]), "+r"(score[34]), "+r"(score[35]),
          "+r"(score[36]), "+r"(score[37]), "+r"(score[38]), "+r"(score[39]), "+r"(score[40]), "+r"(score[41]),
          "+r"(score[42]), "+r"(score[43]), "+r"(score[44]), "+r"(score[45]), "+r"(score[46]), "+r"(score[47]),
          "+r"(score[48]), "+r"(score[49]), "+r"(score[50]), "+r"(score[51]), "+r"(score[52]), "+r"(score[53]),
          "+r"(score[54]), "+r"(score[55]), "+r"(score[56]), "+r"(score[57]), "+r"(score[58]), "+r"(score[59]),
          "+r"(score[60]), "+r"(score[61]), "+r"(score[62]), "+r"(score[63])
      : "l"(queries), "l"(keys), "r"(keep));
}

__device__ __forceinline__ void add_values(float (&sum)[68], const u32 (&weights)[4], u64 values) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
      "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "
      "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
      "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67}, "
      "{%68, %69, %70, %71}, %72, 1, 1, 1;\n"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]),
        "+f"(sum[6]), "+f"(sum[7]), "+f"(sum[8]), "+f"(sum[9]), "+f"(sum[10]), "+f"(sum[11]),
        "+f"(sum[12]), "+f"(sum[13]), "+f"(sum[14]), "+f"(sum[15]), "+f"(sum[16]), "+f"(sum[17]),
        "+f"(sum[18]), "+f"(sum[19]), "+f"(sum[20]), "+f"(sum[21]), "+f"(sum[22]), "+f"(sum[23]),
        "+f"(sum[24]), "+f"(sum[25]), "+f"(sum[26]), "+f"(sum[27]), "+f"(sum[28]), "+f"(sum[29]),
        "+f"(sum[30]), "+f"(sum[31]), "+f"(sum[32]), "+f"(sum[33]), "+f"(sum[34]), "+f"(sum[35]),
        "+f"(sum[36]), "+f"(sum[37]), "+f"(sum[38]), "+f"(sum[39]), "+f"(sum[40]), "+f"(sum[41]),
        "+f"(sum[42]), "+f"(sum[43]), "+f"(sum[44]), "+f"(sum[45]), "+f"(sum[46]), "+f"(sum[47]),
        "+f"(sum[48]), "+f"(sum[49]), "+f"(sum[50]), "+f"(sum[51]), "+f"(sum[52]), "+f"(sum[53]),
        "+f"(sum[54]), "+f"(sum[55]), "+f"(sum[56]), "+f"(sum[57]), "+f"(sum[58]), "+f"(sum[59]),
        "+f"(sum[60]), "+f"(sum[61]), "+f"(sum[62]), "+f"(sum[63]), "+f"(sum[64]), "+f"(sum[65]),
        "+f"(sum[66]), "+f"(sum[67])
      : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "l"(values));
}

// Summarize one of SPLITS parts of a head: the sum of keys, and the largest magnitude of each channel of values.
__device__ __forceinline__ void summarize_part(
    const u16* keys, const u16* values, float* sums, float* largest, int part, int head, int tokens, int heads,
    long keys_of_batch, long keys_of_head, long keys_of_token, long values_of_batch, long values_of_head,
    long values_of_token) {
  __shared__ float4 shared[2][STORING_WARPS][32];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u16* key = keys + (head / heads) * keys_of_batch + (head % heads) * keys_of_head + 4 * lane;
  const u16* value = values + (head / heads) * values_of_batch + (head % heads) * values_of_head + 4 * lane;
  float4 sum = {0, 0, 0, 0}, most = sum;
#pragma unroll 4
  for (int token = STORING_WARPS * part + warp; token < tokens; token += STORING_WARPS * SPLITS) {
    uint2 of_key = *(const uint2*)(key + token * keys_of_token);
    uint2 of_value = *(const uint2*)(value + token * values_of_token);
    float a, b, c, d;
    unpack(of_key.x, a, b), unpack(of_key.y, c, d);
    sum.x += a, sum.y += b, sum.z += c, sum.w += d;
    unpack(of_value.x, a, b), unpack(of_value.y, c, d);
    most.x = larger(most.x, fabsf(a)), most.y = larger(most.y, fabsf(b));
    most.z = larger(most.z, fabsf(c)), most.w = larger(most.w, fabsf(d));
  }
  shared[0][warp][lane] = sum;
  shared[1][warp][lane] = most;
  __syncthreads();
  if (warp > 1) return;
  float4 result = shared[warp][0][lane];
  for (int other = 1; other < STORING_WARPS; other++) {
    float4 more = shared[warp][other][lane];
    if (warp == 0) {
      result.x += more.x, result.y += more.y, result.z += more.z, result.w += more.w;
    } else {
      result.x = larger(result.x, more.x), result.y = larger(result.y, more.y);
      result.z = larger(result.z, more.z), result.w = larger(result.w, more.w);
    }
  }
  ((float4*)(warp == 0 ? sums : largest))[(head * SPLITS + part) * 32 + lane] = result;
}

// Multiply each half of a row by the regular Hadamard matrix of size 64; lane l holds 16 columns from 16 (l % 8) on.
__device__ __forceinline__ void rotate(float (&x)[16]) {
#pragma unroll
  for (int i = 0; i < 16; i += 4) {
    float half = 0.5f * (x[i] + x[i + 1] + x[i + 2] + x[i + 3]);
#pragma unroll
    for (int j = i; j < i + 4; j++) x[j] = half - x[j];
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float half = 0.5f * (x[i] + x[i + 4] + x[i + 8] + x[i + 12]);
#pragma unroll
    for (int j = i; j < 16; j += 4) x[j] = half - x[j];
  }
#pragma unroll
  for (int i = 0; i < 16; i++) {
    float pair = x[i] + __shfl_xor_sync(~0u, x[i], 1);
    x[i] = 0.5f * (pair + __shfl_xor_sync(~0u, pair, 2)) - x[i];
  }
}

// The scale with which a number is 127, and its reciprocal.
__device__ __forceinline__ float int8_scale(float largest, float& inverse) {
  float scale = larger(largest * (1.0f / 127.0f), 1.17549435e-38f);
  inverse = __frcp_rn(scale);
  return scale;
}

// Store 16 columns of a row as the chunk that lane l has.
__device__ __forceinline__ void store_chunk(u8* rows, int row, int chunk, const float (&x)[16], float inverse) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    words[i] = int8(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3], inverse);
  }
  *(uint4*)(rows + row * WIDTH + (chunk ^ (row & 7)) * 16) = make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ float largest_of(const float (&x)[16]) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < 16; i++) largest = larger(largest, fabsf(x[i]));
  return largest;
}

__device__ __forceinline__ float largest_of_block(float x) {
  __shared__ float of_warps[16];
  x = largest_of_warp(x);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();
  for (int other = 0; other < 16; other++) x = larger(x, of_warps[other]);
  return x;
}

// The tokens of a tile: from one edge to the next, at most TILE; without edges, TILE, fewer in the last tile.
__device__ __forceinline__ int begin_of(int tile, const int* edges) { return edges ? edges[tile] : tile * TILE; }
__device__ __forceinline__ int end_of(int tile, const int* edges, int tokens) {
  return edges ? edges[tile + 1] : min(tokens, (tile + 1) * TILE);
}

// Store a tile of queries, with a scale for each row, or of keys minus their mean, with one scale.
__device__ __forceinline__ void store_rotated(
    const u16* from, const float* sums, u8* stored, float* scales, int tile, const int* edges, int tokens,
    long of_token) {
  int begin = begin_of(tile, edges), end = end_of(tile, edges, tokens);
  // A warp has 8 rows, four at a time.
  int first = 8 * (threadIdx.x / 32) + threadIdx.x % 32 / 8, chunk = threadIdx.x % 8;
  float x[2][16], inverse;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int token = begin + first + 4 * i;
    uint4 low = {0, 0, 0, 0}, high = low;
    if (token < end) {
      const uint4* line = (const uint4*)(from + token * of_token + 16 * chunk);
      low = line[0], high = line[1];
    }
    unpack(low.x, x[i][0], x[i][1]), unpack(low.y, x[i][2], x[i][3]);
    unpack(low.z, x[i][4], x[i][5]), unpack(low.w, x[i][6], x[i][7]);
    unpack(high.x, x[i][8], x[i][9]), unpack(high.y, x[i][10], x[i][11]);
    unpack(high.z, x[i][12], x[i][13]), unpack(high.w, x[i][14], x[i][15]);
  }
  if (sums) {
    __shared__ float mean[WIDTH];
    if (threadIdx.x < WIDTH) {
      float sum = 0;
#pragma unroll
      for (int part = 0; part < SPLITS; part++) sum += sums[part * WIDTH + threadIdx.x];
      mean[threadIdx.x] = sum / tokens;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (begin + first + 4 * i >= end) continue;
#pragma unroll
      for (int j = 0; j < 16; j++) x[i][j] -= mean[16 * chunk + j];
    }
  }
  rotate(x[0]);
  rotate(x[1]);
  if (sums) {
    float scale = int8_scale(largest_of_block(larger(largest_of(x[0]), largest_of(x[1]))), inverse);
    if (threadIdx.x == 0) scales[tile] = scale;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int row = first + 4 * i;
    if (!sums) {
      float largest = largest_of(x[i]);
      for (int step = 1; step < 8; step *= 2) largest = larger(largest, __shfl_xor_sync(~0u, largest, step));
      float scale = int8_scale(largest, inverse);
      if (chunk == 0) scales[tile * TILE + row] = scale;
    }
    store_chunk(stored + (long)tile * TILE_BYTES, row, chunk, x[i], inverse);
  }
}

// The smallest power of two with which a channel fits into +-448 = 1.75 * 2^8, at least 2^-40, and its reciprocal.
__device__ __forceinline__ float float8_scale(float largest, float& inverse) {
  int bits = min(max(__float_as_int(largest), (127 - 32) << 23), 0x7F800000);
  bits = ((bits + (1 << 21) - 1) & 0x7F800000) - (8 << 23);
  inverse = __int_as_float((254 << 23) - bits);
  return __int_as_float(bits);
}

// 16 tokens of a channel in the order of weights.
__device__ __forceinline__ uint4 float8_chunk(const float (&x)[16], float inverse) {
  u32 words[4];
#pragma unroll
  for (int c = 0; c < 4; c++) {
    words[c] = float8(x[2 * c] * inverse, x[2 * c + 1] * inverse, x[2 * c + 8] * inverse, x[2 * c + 9] * inverse);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Store a tile of values in float8, transposed, with a scale for each channel of a head.
__device__ __forceinline__ void store_values(
    const u16* from, const float* largest, u8* stored, float* scales, int tile, const int* edges, int tokens,
    long of_token) {
  int end = end_of(tile, edges, tokens);
  __shared__ float inverses[WIDTH];
  // A thread has 16 tokens of two columns.
  int chunk = threadIdx.x / 64, column = 2 * (threadIdx.x % 64), first = begin_of(tile, edges) + 16 * chunk;
  u32 pairs[16];
#pragma unroll
  for (int i = 0; i < 16; i++) {
    pairs[i] = first + i < end ? *(const u32*)(from + (first + i) * of_token + column) : 0;
  }
  if (threadIdx.x < WIDTH) {
    float most = 0;
#pragma unroll
    for (int part = 0; part < SPLITS; part++) most = larger(most, largest[part * WIDTH + threadIdx.x]);
    float scale = float8_scale(most, inverses[threadIdx.x]);
    if (tile == 0) scales[threadIdx.x] = scale;
  }
  __syncthreads();
  float x[2][16];
#pragma unroll
  for (int i = 0; i < 16; i++) unpack(pairs[i], x[0][i], x[1][i]);
#pragma unroll
  for (int j = 0; j < 2; j++) {
    *(uint4*)(stored + (long)tile * TILE_BYTES + (column + j) * TILE + (chunk ^ ((column + j) & 7)) * 16) =
        float8_chunk(x[j], inverses[column + j]);
  }
}

// Summarize parts of a head, and store its queries in the blocks after those.
extern "C" __global__ void __launch_bounds__(512, 2) prepare(
    const u16* queries, const u16* keys, const u16* values, float* sums, float* largest, u8* stored_queries,
    float* query_scales, const int* query_edges, int query_count, int key_count, int heads,
    long queries_of_batch, long queries_of_head, long queries_of_token, long keys_of_batch, long keys_of_head,
    long keys_of_token, long values_of_batch, long values_of_head, long values_of_token) {
  int head = blockIdx.y, batch = head / heads, of_batch = head % heads, tile = (int)blockIdx.x - SPLITS;
  if (tile < 0) {
    summarize_part(keys, values, sums, largest, blockIdx.x, head, key_count, heads, keys_of_batch, keys_of_head,
                       keys_of_token, values_of_batch, values_of_head, values_of_token);
  } else {
    long first = (long)head * (gridDim.x - SPLITS) * TILE;
    store_rotated(queries + batch * queries_of_batch + of_batch * queries_of_head, 0, stored_queries + first * WIDTH,
                  query_scales + first, tile, query_edges, query_count, queries_of_token);
  }
}

// Store a tile of k or v (blockIdx.z) in 8 bits, the last heads first: `prepare` read these last.
extern "C" __global__ void __launch_bounds__(512, 2) store_keys_and_values(
    const u16* keys, const u16* values, const float* sums, const float* largest, u8* stored_keys, u8* stored_values,
    float* key_scales, float* value_scales, const int* key_edges, int key_count, int heads, long keys_of_batch,
    long keys_of_head, long keys_of_token, long values_of_batch, long values_of_head, long values_of_token) {
  int tile = blockIdx.x, head = gridDim.y - 1 - blockIdx.y, batch = head / heads, of_batch = head % heads;
  int tiles = gridDim.x;
  long first = (long)head * tiles;
  if (blockIdx.z == 0) {
    store_rotated(keys + batch * keys_of_batch + of_batch * keys_of_head, sums + head * SPLITS * WIDTH,
                  stored_keys + first * TILE_BYTES, key_scales + first, tile, key_edges, key_count, keys_of_token);
  } else {
    store_values(values + batch * values_of_batch + of_batch * values_of_head, largest + head * SPLITS * WIDTH,
                 stored_values + first * TILE_BYTES, value_scales + head * WIDTH, tile, key_edges, key_count,
                 values_of_token);
  }
}

// Where a block keeps its barriers: one for the queries, and for each stage those of keys and values that have arrived
// (`here`) or were read.
struct Barriers {
  u32 queries, keys_here, values_here, keys_read, values_read;
};

// The tiles of keys that a block visits, in order.
struct Visits {
  // The tiles, and the tokens where each begins; with lists only.
  const int *listed, *edges;
  const float* scales;
  int key_count;
  __device__ __forceinline__ int tile(int visit) const {
#ifdef LISTED
    return listed[visit];
#else
    return visit;
#endif
  }
  // The keys that are left from the tile's first on; more than TILE if others follow.
  __device__ __forceinline__ int left(int visit) const {
#ifdef LISTED
    int tile = listed[visit];
    return edges[tile + 1] - edges[tile];
#else
    return key_count - visit * TILE;
#endif
  }
};

// What a thread holds of its queries, row r and row r + 8 of 16, of which it has columns 8 g + 2 c and the next ones:
// the largest score so far, the factors of a tile, and sums with weights, the last of which are totals of weights.
struct Queries {
  float scale[2], top[2], shrink[2], factor[2], shift[2], flushed[2], sum[68];
  int column;
};

// Find the largest scores of a tile, and from them what exponentials and earlier sums are scaled by.
template <bool SOME>
__device__ __forceinline__ void find_largest(Queries& own, const int (&score)[64], float of_key, int left) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int most = HIDDEN;
#pragma unroll
    for (int i = 0; i < 64; i += 4) {
      int first = score[i + 2 * half], second = score[i + 2 * half + 1];
      if (SOME && 2 * i + own.column >= left) first = HIDDEN;
      if (SOME && 2 * i + own.column + 1 >= left) second = HIDDEN;
      most = max(max(most, first), second);
    }
    most = max(most, __shfl_xor_sync(~0u, most, 1));
    most = max(most, __shfl_xor_sync(~0u, most, 2));
    own.factor[half] = own.scale[half] * of_key;
    float largest = most * own.factor[half];
    float now = largest > own.top[half] + LAZY ? largest : own.top[half];
    own.shrink[half] = exp2(own.top[half] - now);
    own.shift[half] = now - RAISED;
    own.top[half] = now;
  }
}

// Four weights 2^(score * factor - shift) as float8 without the unit for exponentials, each pair of a line of its own.
// The bits of a half, as an integer, are 2^10 times its logarithm + 15, except that the mantissa is linear. The product
// of two halves with half the logarithm, half a unit apart, has an error of 1.5 %; float8 rounds by up to 6 %.
__device__ __forceinline__ u32 float8_of_lines(
    int a, int b, int c, int d, float factor, float shift) {
  // 2^-11 and less become 0.
  const float least = OFFSET + 9417.0f;
  float ya = larger(fmaf(__int2float_rn(a), factor, shift), least);
  float yb = larger(fmaf(__int2float_rn(b), factor, shift), least);
  float yc = larger(fmaf(__int2float_rn(c), factor, shift), least);
  float yd = larger(fmaf(__int2float_rn(d), factor, shift), least);
  u32 low = __byte_perm(__float_as_int(ya), __float_as_int(yb), 0x5410);
  u32 high = __byte_perm(__float_as_int(yc), __float_as_int(yd), 0x5410);
  u32 word;
  asm("{.reg .b16 low, high;\n.reg .b32 x, y;\n"
      "mul.rn.f16x2 x, %1, %2;\n"
      "mul.rn.f16x2 y, %3, %4;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 low, x;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 high, y;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(word)
      : "r"(low), "r"(low + 0x02000200), "r"(high), "r"(high + 0x02000200));
  return word;
}

// Compute the weights of a tile as operands of tensor cores. Keys from `left` on are hidden.
template <bool SOME>
__device__ __forceinline__ void find_weights(
    const Queries& own, const int (&score)[64], u32 (&weights)[4][4], int left) {
  float lines[2], lifted[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    lines[half] = 512.0f * own.factor[half];
    lifted[half] = OFFSET + 15049.0f - 512.0f * own.shift[half];
  }
#pragma unroll
  for (int part = 0; part < 4; part++) {
#pragma unroll
    for (int word = 0; word < 4; word++) {
      int half = word & 1, first = 4 * (4 * part + (word & 2)) + 2 * half;
      if ((8 * half + 2 * part + word / 2) * POLY % 16 < POLY) {
        weights[part][word] = float8_of_lines(score[first], score[first + 1], score[first + 4], score[first + 5],
                                              lines[half], lifted[half]);
      } else {
        float w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          w[i] = exp2(fmaf(__int2float_rn(score[first + 4 * (i / 2) + (i & 1)]), own.factor[half], -own.shift[half]));
        }
        weights[part][word] = float8(w[0], w[1], w[2], w[3]);
      }
#pragma unroll
      for (int i = 0; SOME && i < 4; i++) {
        int key = 8 * (4 * part + (word & 2) + i / 2) + own.column + (i & 1);
        if (key >= left) weights[part][word] &= ~(255u << (8 * i));
      }
    }
  }
}

// Add the sums to those in shared memory, and start with zeros again.
__device__ __forceinline__ void flush(Queries& own, u32 earlier, bool is_first) {
  float growth[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    growth[half] = exp2(own.flushed[half] - own.top[half]);
    own.flushed[half] = own.top[half];
  }
#pragma unroll
  for (int i = 0; i < 66; i++) {
    float& sum = own.sum[i < 64 ? i : 2 * i - 64];
    int half = i < 64 ? i >> 1 & 1 : i - 64;
    u32 address = earlier + i * (4 * 128 * GROUPS);
    float before = 0;
    if (!is_first) asm volatile("ld.shared.f32 %0, [%1];" : "=f"(before) : "r"(address) : "memory");
    sum = fmaf(before, growth[half], sum);
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(sum) : "memory");
    sum = 0;
  }
}

// Keep the compiler from moving definitions of these registers past here.
__device__ __forceinline__ void pin(float (&x)[68]) {
#pragma unroll
  for (int i = 0; i < 68; i++) asm volatile("" : "+f"(x[i])::"memory");
}
__device__ __forceinline__ void pin(int (&x)[64]) {
#pragma unroll
  for (int i = 0; i < 64; i++) asm volatile("" : "+r"(x[i])::"memory");
}
__device__ __forceinline__ void pin(u32 (&x)[4][4]) {
#pragma unroll
  for (int i = 0; i < 16; i++) asm volatile("" : "+r"(x[i / 4][i % 4])::"memory");
}

// Copy the weights, after the products that read the earlier ones: otherwise the compiler would use the same registers.
__device__ __forceinline__ void move(u32 (&to)[4][4], const u32 (&from)[4][4]) {
#pragma unroll
  for (int i = 0; i < 16; i++) {
    asm volatile("mov.b32 %0, %1;" : "=r"(to[i / 4][i % 4]) : "r"(from[i / 4][i % 4]) : "memory");
  }
}

__device__ __forceinline__ void shrink_sums(Queries& own) {
  if (__all_sync(~0u, own.shrink[0] == 1 && own.shrink[1] == 1)) return;
#pragma unroll
  for (int i = 0; i < 68; i++) own.sum[i] *= own.shrink[i >> 1 & 1];
}

__device__ __forceinline__ void start_scores(int (&score)[64], u64 queries, u32 shared_keys, int stage) {
  u64 keys = described(shared_keys + stage * TILE_BYTES);
  products_begin();
#pragma unroll
  for (int part = 0; part < 4; part++) add_scores(score, queries + 2 * part, keys + 2 * part, part);
  products_end();
}

__device__ __forceinline__ void start_values(Queries& own, const u32 (&weights)[4][4], u32 shared_values, int stage) {
  u64 values = described(shared_values + stage * VALUE_BYTES);
  products_begin();
#pragma unroll
  for (int part = 0; part < 4; part++) add_values(own.sum, weights[part], values + 2 * part);
  products_end();
}

__device__ __forceinline__ void find_largest_of(Queries& own, const int (&score)[64], float of_key, int left) {
  if (left < TILE) {
    find_largest<true>(own, score, of_key, left);
  } else {
    find_largest<false>(own, score, of_key, 0);
  }
}

#ifdef LISTED
// Start the products of a tile's weights with values and those with the next keys, and compute the weights of the next
// tile while they run. `SOME`: a part of its keys is hidden.
template <bool SOME>
__device__ __forceinline__ void step(
    Queries& own, int (&score)[64], u32 (&weights)[4][4], int tile, const Visits& visits, u64 queries, u32 shared_keys,
    u32 shared_values, u32 earlier, const Barriers& barriers) {
  int after = tile + 1, left = visits.left(after);
  bool is_reader = threadIdx.x % 32 == 0;
  float of_key = visits.scales[visits.tile(after)];
  wait(barriers.keys_here + 8 * (after % STAGES), after / STAGES & 1);
  wait(barriers.values_here + 8 * (tile % STAGES), tile / STAGES & 1);
  pin(weights), pin(own.sum), pin(score);
  start_scores(score, queries, shared_keys, after % STAGES);
  start_values(own, weights, shared_values, tile % STAGES);
  products_wait<1>();
  if (is_reader) arrive(barriers.keys_read + 8 * (after % STAGES));
  find_largest<SOME>(own, score, of_key, left);
  u32 next[4][4];
  find_weights<SOME>(own, score, next, left);
  pin(next);
  products_wait<0>();
  pin(own.sum);
  if (is_reader) arrive(barriers.values_read + 8 * (tile % STAGES));
  move(weights, next);
  shrink_sums(own);
  if (after % FLUSH == 0) flush(own, earlier, after == FLUSH);
}
#else
// Compute the weights of a tile and start their products with values; before that, start the products with the next
// keys, and after it, find their largest scores. Tensor cores work while exponentials are computed.
template <bool LAST>
__device__ __forceinline__ void step(
    Queries& own, int (&score)[64], int (&next)[64], int tile, const Visits& visits, u64 queries, u32 shared_keys,
    u32 shared_values, u32 earlier, const Barriers& barriers) {
  int stage = tile % STAGES, after = (tile + 1) % STAGES;
  bool is_reader = threadIdx.x % 32 == 0;
  float of_key = LAST ? 0 : visits.scales[visits.tile(tile + 1)];
  int left_next = LAST ? 0 : visits.left(tile + 1);
  if (!LAST) {
    wait(barriers.keys_here + 8 * after, (tile + 1) / STAGES & 1);
    start_scores(next, queries, shared_keys, after);
  }
  u32 weights[4][4];
  find_weights<LAST>(own, score, weights, visits.left(tile));
  // The products with the values of the tile before.
  products_wait<LAST ? 0 : 1>();
  if (tile && is_reader) arrive(barriers.values_read + 8 * ((tile - 1) % STAGES));
  shrink_sums(own);
  if (tile % FLUSH == 0 && tile) flush(own, earlier, tile == FLUSH);
  wait(barriers.values_here + 8 * stage, tile / STAGES & 1);
  start_values(own, weights, shared_values, stage);
  if (LAST) return;
  products_wait<1>();
  if (is_reader) arrive(barriers.keys_read + 8 * after);
  find_largest_of(own, next, of_key, left_next);
}
#endif

// Compute attention of a tile of queries; a head has `query_tiles` of them.
extern "C" __global__ void __launch_bounds__(128 * GROUPS + 128, 1) attend(
    const u8* queries, const float* query_scales, const u8* keys, const float* key_scales, const u8* values,
    const float* value_scales, u16* out, int query_count, int key_count, int heads, int query_tiles, float scale,
    long out_of_batch, long out_of_head, long out_of_token
#ifdef LISTED
    ,
    const int* counts, const int* indices, const int* query_edges, const int* key_edges, int columns
#endif
) {
  extern __shared__ u8 memory[];
  u32 base = (shared_address(memory) + 1023) & ~1023u;
  u32 shared_keys = base + QUERIES * WIDTH, shared_values = shared_keys + STAGES * TILE_BYTES;
  u32 earlier = shared_values + STAGES * VALUE_BYTES + 4 * threadIdx.x;
  Barriers barriers;
  barriers.queries = shared_values + STAGES * VALUE_BYTES + 66 * 4 * 128 * GROUPS;
  barriers.keys_here = barriers.queries + 8;
  barriers.values_here = barriers.keys_here + 8 * STAGES;
  barriers.keys_read = barriers.values_here + 8 * STAGES;
  barriers.values_read = barriers.keys_read + 8 * STAGES;
  int tiles = (key_count + TILE - 1) / TILE, all_tiles = tiles, place = blockIdx.x;
  int head = place / query_tiles, block = place % query_tiles;
  Visits visits;
#ifdef LISTED
  visits.listed = indices + (long)place * columns;
  visits.edges = key_edges;
  all_tiles = columns;
  int whole_tiles = counts[2 * place];
  tiles = counts[2 * place + 1];
  int first_query = query_edges[block], end_query = query_edges[block + 1];
#else
  int first_query = block * QUERIES, end_query = query_count;
#endif
  visits.key_count = key_count;
  visits.scales = key_scales + (long)head * all_tiles;
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0);

  if (threadIdx.x == 0) {
    barrier_init(barriers.queries, 1);
    for (int stage = 0; stage < STAGES; stage++) {
      barrier_init(barriers.keys_here + 8 * stage, 1);
      barrier_init(barriers.values_here + 8 * stage, 1);
      barrier_init(barriers.keys_read + 8 * stage, 4 * GROUPS);
      barrier_init(barriers.values_read + 8 * stage, 4 * GROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // 0x38 is 1 in float8.
  for (int place = threadIdx.x; place < STAGES * 256; place += blockDim.x) {
    u32 address = shared_values + (place / 256) * VALUE_BYTES + TILE_BYTES + (place % 256) * 4;
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(0x38383838) : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();

#ifdef LISTED
  if (tiles == 0) {
    // Queries that see nothing.
    u16* to = out + (head / heads) * out_of_batch + (head % heads) * out_of_head;
    for (int i = threadIdx.x; i < (end_query - first_query) * (WIDTH / 2); i += blockDim.x) {
      *(u32*)(to + (first_query + i / (WIDTH / 2)) * out_of_token + i % (WIDTH / 2) * 2) = 0;
    }
    return;
  }
#endif

  if (group == GROUPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 128 * GROUPS) {
      copy(base, queries + (long)place * (QUERIES * WIDTH), QUERIES * WIDTH, barriers.queries);
      const u8* from_keys = keys + (long)head * all_tiles * TILE_BYTES;
      const u8* from_values = values + (long)head * all_tiles * TILE_BYTES;
      for (int tile = 0; tile < tiles; tile++) {
        int stage = tile % STAGES, phase = (tile / STAGES) & 1;
        wait(barriers.keys_read + 8 * stage, phase ^ 1);
        copy(shared_keys + stage * TILE_BYTES, from_keys + (long)visits.tile(tile) * TILE_BYTES, TILE_BYTES,
             barriers.keys_here + 8 * stage);
        wait(barriers.values_read + 8 * stage, phase ^ 1);
        copy(shared_values + stage * VALUE_BYTES, from_values + (long)visits.tile(tile) * TILE_BYTES, TILE_BYTES,
             barriers.values_here + 8 * stage);
      }
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  int lane = threadIdx.x % 32, row = group * 64 + (threadIdx.x % 128) / 32 * 16 + lane / 4;
  const float* scales = query_scales + (long)place * QUERIES + row;
  Queries own;
  own.column = 2 * (lane & 3);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    own.scale[half] = scales[8 * half] * scale;
    own.top[half] = own.flushed[half] = -INFINITY;
  }
#pragma unroll
  for (int i = 0; i < 68; i++) own.sum[i] = 0;
  u64 described_queries = described(base + group * 64 * WIDTH);

  wait(barriers.queries, 0);
  wait(barriers.keys_here, 0);
#ifdef LISTED
  // The products of one group run during the exponentials of the other. Any listed tile may be a part of one; in this
  // order masks cost no branch.
  int score[64];
  u32 weights[4][4];
  start_scores(score, described_queries, shared_keys, 0);
  products_wait<0>();
  if (lane == 0) arrive(barriers.keys_read);
  find_largest_of(own, score, visits.scales[visits.tile(0)], visits.left(0));
  find_weights<true>(own, score, weights, visits.left(0));
  int tile = 0;
#pragma unroll 1
  for (; tile < whole_tiles - 1; tile++) {
    step<false>(own, score, weights, tile, visits, described_queries, shared_keys, shared_values, earlier, barriers);
  }
#pragma unroll 1
  for (; tile + 1 < tiles; tile++) {
    step<true>(own, score, weights, tile, visits, described_queries, shared_keys, shared_values, earlier, barriers);
  }
  wait(barriers.values_here + 8 * (tile % STAGES), tile / STAGES & 1);
  pin(weights), pin(own.sum);
  start_values(own, weights, shared_values, tile % STAGES);
#else
  int even[64], odd[64];
  start_scores(even, described_queries, shared_keys, 0);
  products_wait<0>();
  if (lane == 0) arrive(barriers.keys_read);
  find_largest_of(own, even, visits.scales[visits.tile(0)], visits.left(0));

#define STEP(LAST, NOW, NEXT, TILE_INDEX) \
  step<LAST>(own, NOW, NEXT, TILE_INDEX, visits, described_queries, shared_keys, shared_values, earlier, barriers)
  int tile = 0;
  for (; tile + 2 < tiles; tile += 2) {
    STEP(false, even, odd, tile);
    STEP(false, odd, even, tile + 1);
  }
  if (tile + 1 < tiles) {
    STEP(false, even, odd, tile);
    STEP(true, odd, even, tile + 1);
  } else {
    STEP(true, even, odd, tile);
  }
#endif
  products_wait<0>();
  if (tiles > FLUSH) {
    flush(own, earlier, false);
#pragma unroll
    for (int i = 0; i < 66; i++) {
      float& sum = own.sum[i < 64 ? i : 2 * i - 64];
      asm volatile("ld.shared.f32 %0, [%1];" : "=f"(sum) : "r"(earlier + i * (4 * 128 * GROUPS)) : "memory");
    }
  }

  u16* to = out + (head / heads) * out_of_batch + (head % heads) * out_of_head + own.column;
  const float* of_values = value_scales + head * WIDTH + own.column;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (first_query + row + 8 * half >= end_query) continue;
    float share = 1 / own.sum[64 + 2 * half];
    u16* line = to + (first_query + row + 8 * half) * out_of_token;
#pragma unroll
    for (int g = 0; g < 8; g++) {
      int place = 4 * g + 2 * half;
      float2 first = *(const float2*)(of_values + 8 * g), second = *(const float2*)(of_values + 64 + 8 * g);
      *(u32*)(line + 8 * g) = pack(own.sum[place] * share * first.x, own.sum[place + 1] * share * first.y);
      *(u32*)(line + 64 + 8 * g) = pack(own.sum[32 + place] * share * second.x, own.sum[33 + place] * share * second.y);
    }
  }
}

// Numbers in float32 and bfloat16, one at a time and as many as one instruction takes. For g++ and clang alike.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

struct bfloat16 {
  uint16_t bits;
};

inline float wide(float x) { return x; }
inline float wide(bfloat16 x) { return __builtin_bit_cast(float, uint32_t(x.bits) << 16); }

inline void put(float x, float& out) { out = x; }
inline void put(float x, bfloat16& out) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  // Rounding would carry a NaN with a full mantissa into zero.
  out.bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint64_t pairs __attribute__((vector_size(4 * LANES)));
typedef float quads __attribute__((vector_size(16)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

// Which lanes hold numbers of a row: all of them, or only so many of the first.
struct All {};
struct First {
  int64_t count;
};

// Calls work(i, lanes) for i = 0, LANES, 2 * LANES, ... below `width`.
template <class Work>
inline void each(int64_t width, Work work) {
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) work(i, All());
  if (i < width) work(i, First{width - i});
}

// g++ up to 12 makes five instructions of these conversions.
#if defined(__AVX512F__)
inline words widened(halves x) { return (words)_mm512_cvtepu16_epi32((__m256i)x); }
inline halves upper(words x) { return (halves)_mm512_cvtepi32_epi16((__m512i)(x >> 16)); }
#else
inline words widened(halves x) { return __builtin_convertvector(x, words); }
inline halves upper(words x) { return __builtin_convertvector(x >> 16, halves); }
#endif

inline floats load(const float* x, All) {
  floats value;
  memcpy(&value, x, sizeof value);
  return value;
}
inline floats load(const bfloat16* x, All) {
  halves bits;
  memcpy(&bits, x, sizeof bits);
  return (floats)(widened(bits) << 16);
}
// Zero in the other lanes.
template <class T>
inline floats load(const T* x, First lanes) {
  T some[LANES] = {};
  memcpy(some, x, lanes.count * sizeof(T));
  return load(some, All());
}

// In the upper half of each word a bfloat16, the nearest one, or the even one of the two.
inline words nearest(floats value) {
  const words bits = (words)value;
  const words nan = (words)(value != value);
  return ((bits + 0x7fff + ((bits >> 16) & 1)) & ~nan) | (0x7fc00000 & nan);
}

// Stores, and gives what loading would give.
inline floats keep(floats value, float* out, All) {
  memcpy(out, &value, sizeof value);
  return value;
}
inline floats keep(floats value, bfloat16* out, All) {
  const words rounded = nearest(value);
  const halves made = upper(rounded);
  memcpy(out, &made, sizeof made);
  return (floats)(rounded & 0xffff0000);
}

inline void store(floats value, float* out, All) { memcpy(out, &value, sizeof value); }
inline void store(floats value, bfloat16* out, All) {
  const halves made = upper(nearest(value));
  memcpy(out, &made, sizeof made);
}
template <class T>
inline void store(floats value, T* out, First lanes) {
  T some[LANES];
  store(value, some, All());
  memcpy(out, some, lanes.count * sizeof(T));
}
template <class T>
inline floats keep(floats value, T* out, First lanes) {
  store(value, out, lanes);
  return load(out, lanes);
}

// Zero in lanes that hold no number of the row.
inline floats only(floats value, All) { return value; }
inline floats only(floats value, First lanes) {
  float some[LANES];
  store(value, some, All());
  return load(some, lanes);
}

// Of pairs in lanes 2i and 2i + 1: both the first, both the second, and (-second, first).
inline floats firsts(floats x) {
  const pairs first = (pairs)x & 0xffffffff;
  return (floats)(first | first << 32);
}
inline floats seconds(floats x) {
  const pairs second = (pairs)x >> 32;
  return (floats)(second | second << 32);
}
inline floats crossed(floats x) {
  const pairs both = (pairs)x;
  return (floats)((both << 32 | both >> 32) ^ 0x80000000);
}

inline float sum(floats x) {
  quads parts[LANES / 4];
  memcpy(parts, &x, sizeof x);
  for (int half = LANES / 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
  const quads whole = parts[0];
  return (whole[0] + whole[2]) + (whole[1] + whole[3]);
}

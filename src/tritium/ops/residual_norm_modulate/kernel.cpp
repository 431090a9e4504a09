// residual = x + gate * y, out = norm(residual) * slope + offset, a row at a time: it is still in the cache when it is
// needed again.

#include <cmath>
#include <cstdint>
#include <vector>

#include "vector.h"

namespace {

// What is broadcast over [batch, token, column]. Without data there is no such part.
struct Part {
  const void* data;
  int64_t is_narrow, batch, token, column;

  // The columns of one token in float32.
  void read(int64_t sample, int64_t place, int64_t width, float* out) const {
    const int64_t first = sample * batch + place * token;
    is_narrow ? read((const bfloat16*)data + first, width, out) : read((const float*)data + first, width, out);
  }
  template <class T>
  void read(const T* from, int64_t width, float* out) const {
    if (column == 1)
      each(width, [&](int64_t i, auto lanes) { store(load(from + i, lanes), out + i, lanes); });
    else
      for (int64_t i = 0; i < width; ++i) out[i] = wide(from[i * column]);
  }
};

// As cpu.py packs it.
struct Given {
  const void* x;
  int64_t x_batch, x_token;
  const void* y;
  int64_t y_batch, y_token;
  void *residual, *out;
  Part gate, weight, bias, scale, shift;
  int64_t batches, tokens, width, is_layer, x_is_narrow, residual_is_narrow, out_is_narrow, threads;
  double eps;
};

// What a token's row is multiplied with and what is added to it, in float32.
struct Modulation {
  std::vector<float> gate, slope, offset, scale;

  explicit Modulation(int64_t width) : gate(width, 1.0f), slope(width), offset(width), scale(width) {}

  void read(const Given& given, int64_t sample, int64_t token) {
    const int64_t width = given.width;
    if (given.gate.data) given.gate.read(sample, token, width, gate.data());
    given.weight.data ? given.weight.read(sample, token, width, slope.data()) : slope.assign(width, 1.0f);
    given.bias.data ? given.bias.read(sample, token, width, offset.data()) : offset.assign(width, 0.0f);
    if (given.scale.data) {
      given.scale.read(sample, token, width, scale.data());
      for (int64_t i = 0; i < width; ++i) slope[i] *= 1 + scale[i], offset[i] *= 1 + scale[i];
    }
    if (given.shift.data) {
      given.shift.read(sample, token, width, scale.data());
      for (int64_t i = 0; i < width; ++i) offset[i] += scale[i];
    }
  }
};

template <bool LAYER, class In, class Residual, class Out>
struct Rows {
  const Given& given;

  // `row` is where the residual is kept in float32: the residual itself, if it is that.
  void compute(const In* x, const In* y, const Modulation& modulation, Residual* residual, Out* out, float* row) const {
    const float *gate = modulation.gate.data(), *slope = modulation.slope.data(), *offset = modulation.offset.data();
    floats total = {}, squares = {};
    each(given.width, [&](int64_t i, auto lanes) {
      const floats added = load(gate + i, lanes) * load(y + i, lanes);
      const floats value = keep(load(x + i, lanes) + added, residual + i, lanes);
      if constexpr (sizeof(Residual) != sizeof(float)) store(value, row + i, lanes);
      if constexpr (LAYER) total += value;
      squares += value * value;
    });
    float mean = 0;
    double distance = LAYER ? sum(total) / double(given.width) : 0.0, square = sum(squares) / double(given.width);
    // So far from zero the variance would be a small difference of large numbers.
    if (LAYER && distance * distance > square / 2) {
      mean = float(distance);
      total = squares = floats{};
      each(given.width, [&](int64_t i, auto lanes) {
        const floats apart = only(load(row + i, lanes) - mean, lanes);
        total += apart;
        squares += apart * apart;
      });
      // What is left is what rounding took from the mean.
      distance = sum(total) / double(given.width), square = sum(squares) / double(given.width);
    }
    const double factor = 1 / std::sqrt(square - distance * distance + given.eps);
    const float steep = float(factor), aside = float(-distance * factor);
    each(given.width, [&](int64_t i, auto lanes) {
      __builtin_prefetch(x + given.x_token + i);
      __builtin_prefetch(y + given.y_token + i);
      const floats normed = (load(row + i, lanes) - mean) * steep + aside;
      store(normed * load(slope + i, lanes) + load(offset + i, lanes), out + i, lanes);
    });
  }

  void run() const {
    const bool by_token = given.gate.token || given.scale.token || given.shift.token;
#pragma omp parallel num_threads(given.threads)
    {
      Modulation modulation(given.width);
      std::vector<float> storage(given.width);
      int64_t known = -1;
#pragma omp for schedule(static)
      for (int64_t i = 0; i < given.batches * given.tokens; ++i) {
        const int64_t sample = i / given.tokens, token = i % given.tokens;
        if (by_token || sample != known) modulation.read(given, known = sample, token);
        const In* x = (const In*)given.x + sample * given.x_batch + token * given.x_token;
        const In* y = (const In*)given.y + sample * given.y_batch + token * given.y_token;
        Residual* residual = (Residual*)given.residual + i * given.width;
        Out* out = (Out*)given.out + i * given.width;
        float* row = storage.data();
        if constexpr (sizeof(Residual) == sizeof(float)) row = residual;
        compute(x, y, modulation, residual, out, row);
      }
    }
  }
};

template <bool LAYER, class In, class Residual>
void run(const Given& given) {
  given.out_is_narrow ? Rows<LAYER, In, Residual, bfloat16>{given}.run() : Rows<LAYER, In, Residual, float>{given}.run();
}

template <bool LAYER, class In>
void run(const Given& given) {
  given.residual_is_narrow ? run<LAYER, In, bfloat16>(given) : run<LAYER, In, float>(given);
}

template <bool LAYER>
void run(const Given& given) {
  given.x_is_narrow ? run<LAYER, bfloat16>(given) : run<LAYER, float>(given);
}

}  // namespace

extern "C" void residual_norm_modulate(const void* packed) {
  const Given& given = *(const Given*)packed;
  given.is_layer ? run<true>(given) : run<false>(given);
}

// silu(group_norm(x)) for tensors that lie in memory as [N, C, P] or as [N, P, C], P the pixels of one channel.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "vector.h"

namespace {

// Within 1e-7 of exp(x), and infinite from 88.4 on. A NaN becomes infinite: the caller still has the NaN.
inline float exponential(float x) {
  const float largest = 89.0f, smallest = -87.0f;
  const float inside = x < largest ? (x > smallest ? x : smallest) : largest;
  // Added to a small number, this leaves the nearest integer in the low bits.
  const float magic = 12582912.0f;
  const float shifted = inside * 1.44269504f + magic;
  const float n = shifted - magic;
  // log(2) in two parts, the first short enough that n times it is exact.
  const float r = (inside - n * 0.693145751953125f) - n * 1.428606765330187e-06f;
  // Fitted for the least relative error on [-log(2)/2, log(2)/2].
  float p = 0.0013814539415761828f;
  p = p * r + 0.00836874544620514f;
  p = p * r + 0.04166838899254799f;
  p = p * r + 0.1666652113199234f;
  p = p * r + 0.4999999403953552f;
  p = p * (r * r) + r + 1.0f;
  const int32_t power = __builtin_bit_cast(int32_t, shifted) - __builtin_bit_cast(int32_t, magic) + 127;
  return p * __builtin_bit_cast(float, power << 23);
}

inline float silu(float x) { return x / (1.0f + exponential(-x)); }

struct Moments {
  double count = 0, mean = 0, squares = 0;

  void add(double other_count, double other_mean, double other_squares) {
    if (other_count == 0) return;
    const double total = count + other_count, apart = other_mean - mean;
    squares += other_squares + apart * apart * count * other_count / total;
    mean += apart * other_count / total;
    count = total;
  }
  void add(const Moments& other) { add(other.count, other.mean, other.squares); }
};

// y = (x - mean) * scale + shift
struct Line {
  float mean, scale, shift;

  Line(const Moments& moments, double eps, const float* weight, const float* bias, int64_t channel) {
    const double slope = (weight ? weight[channel] : 1.0) / std::sqrt(moments.squares / moments.count + eps);
    mean = float(moments.mean);
    scale = float(slope);
    // What rounding took from the mean.
    shift = float((bias ? bias[channel] : 0.0) - (moments.mean - mean) * slope);
  }
};

template <class In, class Out>
struct Problem {
  const In* x;
  Out* out;
  const float *weight, *bias;
  int64_t images, channels, pixels, groups;
  double eps;
};

// Sums are of distances from the mean so far. Where that is far from a block's own mean, the blocks' distance outweighs
// what the sum of squares loses.
constexpr int64_t BLOCK = 4096;

// Rows are groups, which lie in memory as one run.
template <class In, class Out>
struct ChannelsFirst : Problem<In, Out> {
  int64_t rows() const { return this->images * this->groups; }
  int64_t length() const { return this->channels / this->groups * this->pixels; }
  int64_t groups_in_row() const { return 1; }

  void measure(int64_t row, int64_t start, int64_t stop, Moments* moments) const {
    const In* x = this->x + row * length();
    float center = 0;
    const int64_t first = std::min(stop - start, BLOCK);
#pragma omp simd reduction(+ : center)
    for (int64_t i = start; i < start + first; ++i) center += wide(x[i]);
    center /= float(std::max<int64_t>(first, 1));
    for (int64_t at = start; at < stop; at += BLOCK) {
      const int64_t end = std::min(at + BLOCK, stop);
      float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum, squares)
      for (int64_t i = at; i < end; ++i) {
        const float apart = wide(x[i]) - center;
        sum += apart;
        squares += apart * apart;
      }
      const double count = double(end - at), distance = sum / count;
      moments->add(count, center + distance, squares - sum * distance);
      center = float(moments->mean);
    }
  }

  void apply(int64_t row, int64_t start, int64_t stop, const Moments* moments) const {
    const int64_t first = row % this->groups * (this->channels / this->groups);
    for (int64_t at = start; at < stop;) {
      const int64_t channel = at / this->pixels, end = std::min((channel + 1) * this->pixels, stop);
      const Line line(*moments, this->eps, this->weight, this->bias, first + channel);
      const float mean = line.mean, scale = line.scale, shift = line.shift;
      const In* x = this->x + row * length();
      Out* out = this->out + row * length();
#pragma omp simd
      for (int64_t i = at; i < end; ++i) put(silu((wide(x[i]) - mean) * scale + shift), out[i]);
      at = end;
    }
  }
};

// Rows are images; a pixel's channels lie together.
template <class In, class Out>
struct ChannelsLast : Problem<In, Out> {
  int64_t rows() const { return this->images; }
  int64_t length() const { return this->pixels; }
  int64_t groups_in_row() const { return this->groups; }

  void measure(int64_t row, int64_t start, int64_t stop, Moments* moments) const {
    const int64_t channels = this->channels;
    const In* image = this->x + row * this->pixels * channels;
    std::vector<float> storage(3 * channels);
    std::vector<double> running(2 * channels);
    float *center = storage.data(), *sum = center + channels, *squares = sum + channels;
    double *mean = running.data(), *deviation = mean + channels;
    const int64_t block = std::clamp<int64_t>(4 * BLOCK / channels, 16, 256);
    const int64_t first = std::min(stop - start, block);
    for (int64_t pixel = start; pixel < start + first; ++pixel) {
      const In* x = image + pixel * channels;
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) center[c] += wide(x[c]) / float(first);
    }
    for (int64_t at = start; at < stop; at += block) {
      const int64_t end = std::min(at + block, stop);
      std::fill(sum, squares + channels, 0.0f);
      for (int64_t pixel = at; pixel < end; ++pixel) {
        const In* x = image + pixel * channels;
#pragma omp simd
        for (int64_t c = 0; c < channels; ++c) {
          const float apart = wide(x[c]) - center[c];
          sum[c] += apart;
          squares[c] += apart * apart;
        }
      }
      const double before = double(at - start), count = double(end - at);
      const double share = count / (before + count);
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) {
        const double distance = sum[c] / count, apart = center[c] + distance - mean[c];
        deviation[c] += squares[c] - sum[c] * distance + apart * apart * before * share;
        mean[c] += apart * share;
        center[c] = float(mean[c]);
      }
    }
    for (int64_t c = 0; c < channels; ++c)
      moments[c / (channels / this->groups)].add(double(stop - start), mean[c], deviation[c]);
  }

  void apply(int64_t row, int64_t start, int64_t stop, const Moments* moments) const {
    const int64_t channels = this->channels;
    std::vector<float> storage(3 * channels);
    float *mean = storage.data(), *scale = mean + channels, *shift = scale + channels;
    for (int64_t c = 0; c < channels; ++c) {
      const Line line(moments[c / (channels / this->groups)], this->eps, this->weight, this->bias, c);
      mean[c] = line.mean, scale[c] = line.scale, shift[c] = line.shift;
    }
    for (int64_t pixel = start; pixel < stop; ++pixel) {
      const In* x = this->x + (row * this->pixels + pixel) * channels;
      Out* out = this->out + (row * this->pixels + pixel) * channels;
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) put(silu((wide(x[c]) - mean[c]) * scale[c] + shift[c]), out[c]);
    }
  }
};

template <class Layout>
void run(const Layout& layout, int64_t threads) {
  const int64_t rows = layout.rows(), length = layout.length(), groups = layout.groups_in_row();
  // A thread keeps whole rows, which are then still in its cache when they are normalised, unless some would get less.
  const int64_t pieces = rows % threads == 0 || rows >= 8 * threads ? 1 : threads;
  std::vector<Moments> moments(rows * pieces * groups);
#pragma omp parallel num_threads(threads)
  if (pieces == 1) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      layout.measure(row, 0, length, &moments[row * groups]);
      layout.apply(row, 0, length, &moments[row * groups]);
    }
  } else {
#pragma omp for schedule(static)
    for (int64_t task = 0; task < rows * pieces; ++task) {
      const int64_t piece = task % pieces;
      layout.measure(task / pieces, piece * length / pieces, (piece + 1) * length / pieces, &moments[task * groups]);
    }
#pragma omp for schedule(static)
    for (int64_t task = 0; task < rows * pieces; ++task) {
      const int64_t row = task / pieces, piece = task % pieces;
      std::vector<Moments> merged(groups);
      for (int64_t i = 0; i < pieces * groups; ++i) merged[i % groups].add(moments[row * pieces * groups + i]);
      layout.apply(row, piece * length / pieces, (piece + 1) * length / pieces, merged.data());
    }
  }
}

template <class In, class Out>
void run(const void* x, void* out, const float* weight, const float* bias, int64_t images, int64_t channels,
         int64_t pixels, int64_t groups, double eps, bool channels_last, int64_t threads) {
  const Problem<In, Out> problem{(const In*)x, (Out*)out, weight, bias, images, channels, pixels, groups, eps};
  if (channels_last)
    run(ChannelsLast<In, Out>{problem}, threads);
  else
    run(ChannelsFirst<In, Out>{problem}, threads);
}

}  // namespace

extern "C" void group_norm_silu(const void* x, void* out, const float* weight, const float* bias, int64_t images,
                                int64_t channels, int64_t pixels, int64_t groups, double eps, int64_t channels_last,
                                int64_t x_is_narrow, int64_t out_is_narrow, int64_t threads) {
  const auto chosen = x_is_narrow ? (out_is_narrow ? run<bfloat16, bfloat16> : run<bfloat16, float>)
                                  : (out_is_narrow ? run<float, bfloat16> : run<float, float>);
  chosen(x, out, weight, bias, images, channels, pixels, groups, eps, channels_last, threads);
}

// Query and key, a token at a time: what turns its heads is read once and stays in the cache.

#include <cmath>
#include <cstdint>
#include <vector>

#include "vector.h"

namespace {

// The numbers by which cpu.py calls them.
enum Norm { NO_NORM, HEAD, ROW };
enum Pairs { ALONE, NEIGHBOURS, HALVES };
// A table has a number for each element, for each pair, or cosine and sine of each pair side by side.
enum Table { ELEMENT, PAIR, COMPLEX };

// As cpu.py packs it.
struct Part {
  const void* x;
  int64_t batch, token, head;
  const void* weight;
};
struct Side {
  Part parts[2];
  void* out;
  int64_t heads;
};
struct Angles {
  const void* cosines;
  int64_t cosine_batch, cosine_token;
  const void* sines;
  int64_t sine_batch, sine_token;
};
struct Given {
  Side sides[2];
  Angles angles[2];
  int64_t batches, tokens, first_tokens, width, norm, pairs, table, tables;
  int64_t heads_first, is_narrow, weights_are_narrow, tables_are_narrow, threads;
  double eps;
};

// Cosines and sines of one token in float32, for each element.
struct Rotation {
  std::vector<float> storage;
  const float *cosine, *sine;

  template <class T>
  void read(const Given& given, const Angles& angles, int64_t sample, int64_t place) {
    const T* cosines = (const T*)angles.cosines + sample * angles.cosine_batch + place * angles.cosine_token;
    const T* sines = (const T*)angles.sines + sample * angles.sine_batch + place * angles.sine_token;
    const int64_t width = given.width, half = width / 2;
    if constexpr (sizeof(T) == sizeof(float)) {
      if (given.table == ELEMENT) {
        cosine = cosines, sine = sines;
        return;
      }
    }
    storage.resize(2 * width);
    float *c = storage.data(), *s = c + width;
    cosine = c, sine = s;
    if (given.table == ELEMENT) {
      each(width, [&](int64_t i, auto lanes) {
        store(load(cosines + i, lanes), c + i, lanes);
        store(load(sines + i, lanes), s + i, lanes);
      });
    } else if (given.table == COMPLEX) {
      each(width, [&](int64_t i, auto lanes) {
        const floats both = load(cosines + i, lanes);
        store(firsts(both), c + i, lanes);
        store(seconds(both), s + i, lanes);
      });
    } else if (given.pairs == HALVES) {
      for (int64_t i = 0; i < half; ++i) {
        c[i] = c[i + half] = wide(cosines[i]);
        s[i] = s[i + half] = wide(sines[i]);
      }
    } else {
      for (int64_t i = 0; i < half; ++i) {
        c[2 * i] = c[2 * i + 1] = wide(cosines[i]);
        s[2 * i] = s[2 * i + 1] = wide(sines[i]);
      }
    }
  }
};

template <class T>
floats squares(const T* x, int64_t width) {
  floats total = {};
  each(width, [&](int64_t i, auto lanes) {
    const floats value = load(x + i, lanes);
    total += value * value;
  });
  return total;
}

// One head, multiplied and turned.
template <Pairs PAIRS, bool WEIGHTED, class T>
void turn(const T* x, const float* weight, float scale, const Rotation& rotation, int64_t width, T* out) {
  const float *cosine = rotation.cosine, *sine = rotation.sine;
  const auto scaled = [&](int64_t i, auto lanes) {
    const floats value = load(x + i, lanes) * scale;
    return WEIGHTED ? value * load(weight + i, lanes) : value;
  };
  if constexpr (PAIRS == HALVES) {
    const int64_t half = width / 2;
    each(half, [&](int64_t i, auto lanes) {
      const int64_t j = i + half;
      const floats a = scaled(i, lanes), b = scaled(j, lanes);
      store(a * load(cosine + i, lanes) - b * load(sine + i, lanes), out + i, lanes);
      store(b * load(cosine + j, lanes) + a * load(sine + j, lanes), out + j, lanes);
    });
  } else {
    each(width, [&](int64_t i, auto lanes) {
      const floats value = scaled(i, lanes);
      if constexpr (PAIRS == NEIGHBOURS)
        store(value * load(cosine + i, lanes) + crossed(value) * load(sine + i, lanes), out + i, lanes);
      else
        store(value, out + i, lanes);
    });
  }
}

template <class T>
struct Job {
  const Given& given;
  // Norm weights in float32, where they are not that already.
  std::vector<float> storage[2][2];
  const float* weights[2][2];

  explicit Job(const Given& given) : given(given) {
    for (int side = 0; side < 2; ++side) {
      const int64_t count = given.norm == ROW ? given.sides[side].heads * given.width : given.width;
      for (int part = 0; part < 2; ++part) {
        const void* weight = given.sides[side].parts[part].weight;
        weights[side][part] = (const float*)weight;
        if (!weight || !given.weights_are_narrow) continue;
        storage[side][part].resize(count);
        for (int64_t i = 0; i < count; ++i) storage[side][part][i] = wide(((const bfloat16*)weight)[i]);
        weights[side][part] = storage[side][part].data();
      }
    }
  }

  template <Pairs PAIRS, bool WEIGHTED>
  void heads(int side, int part, int64_t sample, int64_t token, int64_t place, const Rotation& rotation) const {
    const Side& all = given.sides[side];
    const Part& from = all.parts[part];
    const int64_t width = given.width;
    const T* x = (const T*)from.x + sample * from.batch + token * from.token;
    T* out = (T*)all.out + sample * all.heads * given.tokens * width;
    out += place * width * (given.heads_first ? 1 : all.heads);
    const int64_t out_head = width * (given.heads_first ? given.tokens : 1);
    const auto factor = [&](floats total, int64_t count) {
      return float(1 / std::sqrt(sum(total) / double(count) + given.eps));
    };
    float scale = 1;
    if (given.norm == ROW) {
      floats total = {};
      for (int64_t head = 0; head < all.heads; ++head) total += squares(x + head * from.head, width);
      scale = factor(total, all.heads * width);
    }
    for (int64_t head = 0; head < all.heads; ++head) {
      const T* row = x + head * from.head;
      if (given.norm == HEAD) scale = factor(squares(row, width), width);
      const float* weight = WEIGHTED ? weights[side][part] + (given.norm == ROW ? head * width : 0) : nullptr;
      turn<PAIRS, WEIGHTED>(row, weight, scale, rotation, width, out + head * out_head);
    }
  }

  template <Pairs PAIRS>
  void run() const {
#pragma omp parallel num_threads(given.threads)
    {
      Rotation rotation;
#pragma omp for schedule(static)
      for (int64_t i = 0; i < given.batches * given.tokens; ++i) {
        const int64_t sample = i / given.tokens, place = i % given.tokens;
        const int part = place >= given.first_tokens;
        const int64_t token = part ? place - given.first_tokens : place;
        const Angles& angles = given.angles[given.tables == 1 ? 0 : part];
        const bool turns = PAIRS != ALONE && angles.cosines;
        if (turns) {
          const int64_t at = given.tables == 1 ? place : token;
          given.tables_are_narrow ? rotation.read<bfloat16>(given, angles, sample, at)
                                  : rotation.read<float>(given, angles, sample, at);
        }
        for (int side = 0; side < 2; ++side) {
          if (weights[side][part])
            turns ? heads<PAIRS, true>(side, part, sample, token, place, rotation)
                  : heads<ALONE, true>(side, part, sample, token, place, rotation);
          else
            turns ? heads<PAIRS, false>(side, part, sample, token, place, rotation)
                  : heads<ALONE, false>(side, part, sample, token, place, rotation);
        }
      }
    }
  }

  void run() const {
    if (given.pairs == NEIGHBOURS)
      run<NEIGHBOURS>();
    else if (given.pairs == HALVES)
      run<HALVES>();
    else
      run<ALONE>();
  }
};

}  // namespace

extern "C" void qk_norm_rope(const void* packed) {
  const Given& given = *(const Given*)packed;
  given.is_narrow ? Job<bfloat16>(given).run() : Job<float>(given).run();
}

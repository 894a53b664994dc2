// One pass of AdamW or SGD over a parameter as it is stored: what `_pass` in passes.py computes, on a CPU.
//
// Defined before: WEIGHT, GRADIENT as float, bf16 or fp16, MOMENT as float or bf16; WAY as one of the ways below; ADAM, COUPLES, MOMENTUM,
// NESTEROV as 0 or 1.

#include <cmath>
#include <cstdint>
#include <cstring>

enum { PLAIN, NEAREST, MASTER, REMAINDER, STOCHASTIC, KAHAN };
struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

static inline uint32_t bits_of(float x) { uint32_t b; std::memcpy(&b, &x, 4); return b; }
static inline float of_bits(uint32_t b) { float x; std::memcpy(&x, &b, 4); return x; }
static inline uint32_t one_nan(float x) { return x == x ? bits_of(x) : 0x7FC00000u; }
static inline float wide(float x) { return x; }
static inline float wide(bf16 x) { return of_bits(uint32_t(x.bits) << 16); }
static inline uint32_t chosen(bool if_, uint32_t a, uint32_t b) { return (a & -uint32_t(if_)) | (b & ~-uint32_t(if_)); }
static inline float wide(fp16 x) {  // without a branch, and without subnormal numbers of fp32, which may be flushed
  const uint32_t high = (x.bits & 0x7FFFu) << 13, exponent = high & 0x0F800000u, normal = high + 0x38000000u;
  const uint32_t small = bits_of(of_bits(normal + 0x00800000u) - 0x1p-14f);
  const uint32_t any = chosen(exponent == 0x0F800000u, normal + 0x38000000u, chosen(exponent == 0, small, normal));
  return of_bits(any | (uint32_t(x.bits & 0x8000u) << 16));
}
static inline void high_half(uint32_t b, float& to) { to = of_bits(b); }
static inline bf16 cut(uint32_t b) { return {uint16_t(b >> 16)}; }
static inline void high_half(uint32_t b, bf16& to) { to = cut(b); }
static inline void nearest(float x, float& to) { to = x; }
static inline void nearest(float x, bf16& to) { uint32_t b = one_nan(x); to = cut(b + 0x7FFF + ((b >> 16) & 1)); }
static inline void nearest(float x, fp16& to) {
  const uint32_t b = bits_of(x), size = b & 0x7FFFFFFFu;
  const uint32_t small = bits_of(of_bits(size) + 0.5f) - 0x3F000000u;
  const uint32_t normal = (size - 0x38000000u + 0xFFFu + ((size >> 13) & 1)) >> 13;
  const uint32_t large = chosen(size > 0x7F800000u, 0x7E00u, 0x7C00u);
  const uint32_t any = chosen(size >= 0x47800000u, large, chosen(size < 0x38800000u, small, normal));
  to = {uint16_t(any | ((b >> 16) & 0x8000u))};
}
static inline void high_half(uint32_t, fp16&) {}
static inline uint32_t raw(float) { return 0; }
static inline uint32_t raw(bf16 x) { return uint32_t(int32_t(int16_t(x.bits))); }
static inline uint32_t raw(fp16 x) { return uint32_t(int32_t(int16_t(x.bits))); }
static inline float most_left(float, float) { return 0; }
static inline float most_left(bf16, float w) { return __builtin_fabsf(w) * float(0x1p-8 * 1.01) + 0x1p-134f; }
static inline float most_left(fp16, float w) { return __builtin_fabsf(w) * float(0x1p-11 * 1.01) + 0x1p-25f; }
static inline uint32_t spread(uint32_t x, uint32_t by) { return (x ^ (x >> 15)) * by; }
static inline uint32_t hashed(WEIGHT w, uint32_t at) { return spread(raw(w) + at, 0x21F0AAADu); }
static inline uint32_t words(uint32_t keyed, int salt) {
  for (int number = 0; number < 2 + salt; ++number) keyed = spread(keyed, number % 2 ? 0xD35A2D97u : 0x21F0AAADu);
  return keyed >> 16;
}
static inline void at_random(float x, uint32_t, float& to) { to = x; }
static inline void at_random(float x, uint32_t word, bf16& to) { to = cut(one_nan(x) + word); }
static inline void at_random(float x, uint32_t, fp16& to) { nearest(x, to); }

struct Told { uint32_t moved, kept; };

// Steps elements from `start` to `end`. placed: the places of elements in their whole parameter follow no order.
template <bool placed>
static Told steps(int64_t start, int64_t end, WEIGHT* __restrict weight, void* __restrict beside,
                  const GRADIENT* __restrict gradient, MOMENT* __restrict first, MOMENT* __restrict second,
                  const int32_t* __restrict places, uint32_t key, const float* __restrict n) {
  const float n0 = n[0], n1 = n[1], n2 = n[2], n3 = n[3], n4 = n[4], n5 = n[5], n6 = n[6], n7 = n[7], n8 = n[8];
  uint32_t moved = 0, kept = 0;  // or sums of the weight's bits, before and after
  for (int32_t i = 0; i < int32_t(end - start); ++i) {
    float w = wide(weight[i]);
    const float before = w;
    if (WAY == MASTER) {
      const float master = static_cast<float*>(beside)[i];
      WEIGHT rounded;
      nearest(master, rounded);
      const uint32_t follows = -uint32_t(wide(rounded) == before);
      const uint32_t is_one = -uint32_t(before == before);
      moved += ~follows & is_one & 1;
      w = of_bits((bits_of(master) & follows) | (bits_of(before) & ~follows));
    }
    const uint32_t at = (uint32_t(start) + uint32_t(i)) * 0x9E3779B1u;
    if (WAY == REMAINDER || WAY == KAHAN) moved += hashed(weight[i], at);
    if (WAY == REMAINDER) {
      const float whole = of_bits(bits_of(w) + uint32_t(int32_t(static_cast<int16_t*>(beside)[i])));
      const uint32_t is_one = -uint32_t(whole == whole);
      w = of_bits((bits_of(whole) & is_one) | (bits_of(before) & ~is_one));
    }
    if (WAY == KAHAN) {
      const float left = wide(static_cast<WEIGHT*>(beside)[i]), whole = w + left;
      const uint32_t follows = -uint32_t(__builtin_fabsf(left) <= most_left(weight[i], w));
      w = of_bits((bits_of(whole) & follows) | (bits_of(before) & ~follows));
    }
    float g = wide(gradient[i]) * n0, m = 0, v = 0;
    if (COUPLES) g = g + n1 * w;
    if (ADAM) {
      m = wide(first[i]);
      m = m + n3 * (g - m);
      v = wide(second[i]) * n4 + n5 * g * g;
      w = w * n2 - n8 * (m / (__builtin_sqrtf(v) * n6 + n7));
    } else if (MOMENTUM) {
      m = wide(first[i]) * n3 + n4 * g;
      w = w - n2 * (NESTEROV ? g + n3 * m : m);
    } else {
      w = w - n2 * g;
    }
    const uint32_t place = placed ? uint32_t(places[i]) : uint32_t(start) + uint32_t(i);
    const uint32_t keyed = key + place * 0x9E3779B1u;
    if (WAY == REMAINDER) {
      const uint32_t b = one_nan(w), high = (b + 0x8000u) & 0xFFFF0000u;
      high_half(high, weight[i]);
      static_cast<int16_t*>(beside)[i] = int16_t(b - high);
    } else if (WAY == STOCHASTIC) {
      at_random(w, words(keyed, 0), weight[i]);
    } else {
      nearest(w, weight[i]);
    }
    if (WAY == MASTER) static_cast<float*>(beside)[i] = w;
    if (WAY == KAHAN) {
      const float left = w - wide(weight[i]);
      nearest(__builtin_fabsf(left) < INFINITY ? left : 0.0f, static_cast<WEIGHT*>(beside)[i]);
    }
    if (WAY == REMAINDER || WAY == KAHAN) kept += hashed(weight[i], at);
    if (WAY == NEAREST) {
      moved += w != before;
      kept += w != before && wide(weight[i]) == before;
    }
    if (ADAM || MOMENTUM) at_random(m, words(keyed, 1), first[i]);
    if (ADAM) at_random(v, words(keyed, 2), second[i]);
  }
  return {moved, kept};
}

extern "C" void step(int64_t count, WEIGHT* weight, void* beside, const GRADIENT* gradient, MOMENT* first,
                     MOMENT* second, const int32_t* places, int32_t key, const float* n, int64_t* told, int threads) {
  const int64_t part = 1 << 15;
  int64_t moved = 0, kept = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : moved, kept) if (count > part)
  for (int64_t start = 0; start < count; start += part) {
    const int64_t end = start + part < count ? start + part : count;
    char* rest = static_cast<char*>(beside) + start * (WAY == MASTER ? 4 : 2);
    const auto run = places ? steps<true> : steps<false>;
    const Told told = run(start, end, weight + start, rest, gradient + start, first + start, second + start,
                          places + start, uint32_t(key), n);
    moved += told.moved;
    kept += told.kept;
  }
  const bool counts = WAY == NEAREST || WAY == MASTER;
  if (told) told[0] = counts ? moved : uint32_t(moved), told[1] = counts ? kept : uint32_t(kept);
}

// Vectors of 256 bits for float32, and products with them.
#pragma once

#include <immintrin.h>

#include "panel_floats.h"

namespace tformer {
namespace {

struct Vector256 {
  using Type = __m256;
  static constexpr int WIDTH = 8;
  static INLINE Type load(const float* from) { return _mm256_loadu_ps(from); }
  static INLINE void store(float* into, Type value) { _mm256_storeu_ps(into, value); }
  static INLINE Type repeat(float x) { return _mm256_set1_ps(x); }
  static INLINE Type add_product(Type sum, Type a, Type b) { return _mm256_fmadd_ps(a, b, sum); }
  static INLINE Type add(Type a, Type b) { return _mm256_add_ps(a, b); }
  static INLINE Type subtract(Type a, Type b) { return _mm256_sub_ps(a, b); }
  static INLINE Type multiply(Type a, Type b) { return _mm256_mul_ps(a, b); }
  static INLINE Type divide(Type a, Type b) { return _mm256_div_ps(a, b); }
  static INLINE Type larger(Type a, Type b) { return _mm256_max_ps(a, b); }
  static INLINE Type smaller(Type a, Type b) { return _mm256_min_ps(a, b); }
  static INLINE Type round(Type x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static INLINE Type power_of_two(Type n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
  }
  static INLINE Type zero_where_below(Type x, Type limit, Type value) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ), value);
  }
};

inline void multiply_float_avx2(const FloatTile& tile) { PanelFloats<Vector256>::multiply(tile); }

}  // namespace
}  // namespace tformer

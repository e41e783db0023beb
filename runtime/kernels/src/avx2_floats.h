// Products of float32 with 256-bit vectors.
#pragma once

#include <immintrin.h>

#include "panel_floats.h"

namespace tformer {
namespace {

struct Vector256 {
  using Type = __m256;
  static constexpr int WIDTH = 8;
  static INLINE Type zero() { return _mm256_setzero_ps(); }
  static INLINE Type load(const float* from) { return _mm256_load_ps(from); }
  static INLINE Type repeat(const float* from) { return _mm256_broadcast_ss(from); }
  static INLINE Type add_product(Type sum, Type a, Type b) { return _mm256_fmadd_ps(a, b, sum); }
  static INLINE void store(float* into, Type value) { _mm256_store_ps(into, value); }
};

inline void multiply_float_avx2(const FloatTile& tile) { PanelFloats<Vector256>::multiply(tile); }

}  // namespace
}  // namespace tformer

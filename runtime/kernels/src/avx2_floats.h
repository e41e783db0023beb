// Products of float32 with 256-bit vectors. Each number of a result is one chain of fused multiply-additions, as in
// scalar.cpp.
#pragma once

#include <immintrin.h>

#include "blocks.h"
#include "reference.h"

namespace tformer {
namespace {

constexpr int FLOAT_ROWS = 6;  // 12 registers of sums, of 16

template <int ROWS, int>
struct FloatKernel {
  static void run(const FloatTile& tile, size_t row, size_t p, const float* weights) {
    const size_t inner = tile.matrix->inner;
    const float* x = tile.rows + row * inner;
    __m256 sums[ROWS][2];
    unroll<ROWS>(UNROLLED(r) { sums[r][0] = sums[r][1] = _mm256_setzero_ps(); });
    for (size_t k = 0; k < inner; k++, weights += PANEL) {
      const __m256 w = _mm256_load_ps(weights), v = _mm256_load_ps(weights + PANEL / 2);
      unroll<ROWS>(UNROLLED(r) {
        const __m256 a = _mm256_broadcast_ss(x + r * inner + k);
        sums[r][0] = _mm256_fmadd_ps(a, w, sums[r][0]);
        sums[r][1] = _mm256_fmadd_ps(a, v, sums[r][1]);
      });
    }
    alignas(ALIGNMENT) float buffer[ROWS][PANEL];
    unroll<ROWS>(UNROLLED(r) {
      _mm256_store_ps(buffer[r], sums[r][0]);
      _mm256_store_ps(buffer[r] + PANEL / 2, sums[r][1]);
    });
    for (size_t r = 0; r < ROWS; r++) store_float_sums(tile, row + r, p, buffer[r]);
  }
};

inline void multiply_float_avx2(const FloatTile& tile) {
  for (size_t p = tile.panel_begin; p < tile.panel_end; p++)
    for_rows<FloatKernel, 1, FLOAT_ROWS>(tile, p, tile.matrix->floats(p));
}

}  // namespace
}  // namespace tformer

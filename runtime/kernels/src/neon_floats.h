// Products of float32 with Arm's 128-bit vectors. Each number of a result is one chain of fused multiply-additions, as in
// scalar.cpp.
#pragma once

#include <arm_neon.h>

#include "blocks.h"
#include "reference.h"

namespace tformer {
namespace {

constexpr int FLOAT_ROWS = 6;  // 24 registers of sums, of 32

template <int ROWS, int>
struct FloatKernel {
  static void run(const FloatTile& tile, size_t row, size_t p, const float* weights) {
    const size_t inner = tile.matrix->inner;
    const float* x = tile.rows + row * inner;
    float32x4_t sums[ROWS][4];
    unroll<ROWS>(UNROLLED(r) { unroll<4>(UNROLLED(j) { sums[r][j] = vdupq_n_f32(0); }); });
    for (size_t k = 0; k < inner; k++, weights += PANEL) {
      float32x4_t w[4];
      unroll<4>(UNROLLED(j) { w[j] = vld1q_f32(weights + 4 * j); });
      unroll<ROWS>(UNROLLED(r) {
        const float32x4_t a = vld1q_dup_f32(x + r * inner + k);
        unroll<4>(UNROLLED(j) { sums[r][j] = vfmaq_f32(sums[r][j], a, w[j]); });
      });
    }
    float buffer[ROWS][PANEL];
    unroll<ROWS>(UNROLLED(r) { unroll<4>(UNROLLED(j) { vst1q_f32(buffer[r] + 4 * j, sums[r][j]); }); });
    for (size_t r = 0; r < ROWS; r++) store_float_sums(tile, row + r, p, buffer[r]);
  }
};

inline void multiply_float_neon(const FloatTile& tile) {
  for (size_t p = tile.panel_begin; p < tile.panel_end; p++)
    for_rows<FloatKernel, 1, FLOAT_ROWS>(tile, p, tile.matrix->floats(p));
}

}  // namespace
}  // namespace tformer

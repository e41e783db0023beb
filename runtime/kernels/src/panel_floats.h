// Products of float32 by tiles of some rows and one panel, for vectors that a panel has several of. Each number of a
// result is one chain of fused multiply-additions, as in scalar.cpp.
//
// Vector has the type Type of WIDTH numbers and the functions load, repeat, add_product and store.
#pragma once

#include "blocks.h"
#include "reference.h"

namespace tformer {
namespace {

constexpr int FLOAT_ROWS = 6;  // 12 registers of sums of the 16 of AVX2, or 24 of the 32 of NEON

template <class Vector>
struct PanelFloats {
  static constexpr int VECTORS = static_cast<int>(PANEL) / Vector::WIDTH;

  template <int ROWS, int>
  struct Kernel {
    static void run(const FloatTile& tile, size_t row, size_t p, const float* weights) {
      using Type = typename Vector::Type;
      const size_t inner = tile.matrix->inner;
      const float* x = tile.rows + row * inner;
      Type sums[ROWS][VECTORS];
      unroll<ROWS>(UNROLLED(r) { unroll<VECTORS>(UNROLLED(j) { sums[r][j] = Vector::repeat(0.0f); }); });
      for (size_t k = 0; k < inner; k++, weights += PANEL) {
        Type w[VECTORS];
        unroll<VECTORS>(UNROLLED(j) { w[j] = Vector::load(weights + Vector::WIDTH * j); });
        unroll<ROWS>(UNROLLED(r) {
          const Type a = Vector::repeat(x[r * inner + k]);
          unroll<VECTORS>(UNROLLED(j) { sums[r][j] = Vector::add_product(sums[r][j], a, w[j]); });
        });
      }
      alignas(ALIGNMENT) float buffer[ROWS][PANEL];
      unroll<ROWS>(UNROLLED(r) {
        unroll<VECTORS>(UNROLLED(j) { Vector::store(buffer[r] + Vector::WIDTH * j, sums[r][j]); });
      });
      for (size_t r = 0; r < ROWS; r++) store_float_sums(tile, row + r, p, buffer[r]);
    }
  };

  static void multiply(const FloatTile& tile) {
    for (size_t p = tile.panel_begin; p < tile.panel_end; p++)
      for_rows<Kernel, 1, FLOAT_ROWS>(tile, p, tile.matrix->floats(p));
  }
};

}  // namespace
}  // namespace tformer

// Portable C++: the reference of the other paths. It is slower than onnxruntime, so that only tests choose it.
#include <cmath>
#include <cstring>
#include <vector>

#include "paths.h"
#include "reference.h"

namespace tformer {
namespace {

void multiply_panel(const Tile& tile, size_t p, const int8_t* weights) {
  const Matrix& matrix = *tile.matrix;
  for (size_t r = tile.row_begin; r < tile.row_end; r++) {
    const uint8_t* q = tile.rows + r * matrix.padded_inner;
    int32_t sums[PANEL] = {};
    for (size_t k = 0; k < matrix.padded_inner; k++)
      for (size_t c = 0; c < PANEL; c++)
        sums[c] += q[k] * weights[k / GROUP * GROUP_BYTES + c * GROUP + k % GROUP];
    store_row(tile, r, p, sums);
  }
}

void multiply8(const Tile& tile) {
  for (size_t p = tile.panel_begin; p < tile.panel_end; p++)
    multiply_panel(tile, p, reinterpret_cast<const int8_t*>(tile.matrix->panel(p)));
}

void multiply4(const Tile& tile) {
  std::vector<int8_t> weights(tile.matrix->padded_inner * PANEL);
  for (size_t p = tile.panel_begin; p < tile.panel_end; p++) {
    expand_panel(*tile.matrix, p, weights.data());
    multiply_panel(tile, p, weights.data());
  }
}

void multiply_float(const FloatTile& tile) {
  const Matrix& matrix = *tile.matrix;
  for (size_t p = tile.panel_begin; p < tile.panel_end; p++)
    for (size_t r = tile.row_begin; r < tile.row_end; r++) {
      const float *weights = matrix.floats(p), *x = tile.rows + r * matrix.inner;
      float sums[PANEL] = {};
      for (size_t k = 0; k < matrix.inner; k++)
        for (size_t c = 0; c < PANEL; c++) sums[c] = std::fma(x[k], weights[k * PANEL + c], sums[c]);
      store_float_sums(tile, r, p, sums);
    }
}

bool supported() { return true; }

}  // namespace

constinit const Path SCALAR = {"scalar", supported, GROUP, 0, false, quantise_row, multiply8, multiply4, PANEL, multiply_float};

}  // namespace tformer

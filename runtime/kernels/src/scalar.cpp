// Portable C++: the reference of the other paths. It is slower than onnxruntime, so that only tests choose it.
#include <cmath>
#include <cstring>
#include <vector>

#include "attention_rows.h"
#include "elementwise_rows.h"
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

struct Number {
  using Type = float;
  static constexpr int WIDTH = 1;
  static Type load(const float* from) { return *from; }
  static void store(float* into, Type value) { *into = value; }
  static Type repeat(float x) { return x; }
  static Type add_product(Type sum, Type a, Type b) { return std::fma(a, b, sum); }
  static Type add(Type a, Type b) { return a + b; }
  static Type subtract(Type a, Type b) { return a - b; }
  static Type multiply(Type a, Type b) { return a * b; }
  static Type divide(Type a, Type b) { return a / b; }
  static Type larger(Type a, Type b) { return a > b ? a : b; }
  static Type smaller(Type a, Type b) { return a < b ? a : b; }
  static Type round(Type x) { return std::nearbyintf(x); }
  static Type power_of_two(Type n) { return n == n ? std::ldexp(1.0f, static_cast<int>(std::max(n, -200.0f))) : n; }
  static Type zero_where_below(Type x, Type limit, Type value) { return x < limit ? 0 : value; }
};

void attend_scalar(const AttentionTile& tile) { Attention<Number, 1>::run(tile); }

bool supported() { return true; }

}  // namespace

constinit const Elementwise ELEMENTWISE_SCALAR = ElementwiseRows<Number>::FUNCTIONS;

constinit const Path SCALAR = {"scalar", supported, GROUP, 0, false, quantise_row, multiply8, multiply4, PANEL, multiply_float,
                              attend_scalar, rotate_head, &ELEMENTWISE_SCALAR};

}  // namespace tformer

// One number at a time: quantising, scaling back and unpacking. Vector paths use these for what is left of a row.
#pragma once

#include <cfloat>
#include <climits>
#include <cmath>
#include <cstring>

#include "matrix.h"

namespace tformer {
namespace {

// The integer of x / scale as onnxruntime rounds it. QuantizeLinear in blocks converts to int32, which is the lowest
// number for what is out of range or not a number, and then clips; with one scale it clips before.
[[maybe_unused]] inline uint8_t quantise_number(float x, float scale, float inverse, const RowScaling& scaling) {
  if (scaling.reciprocal || scaling.fixed_scale > 0) {
    float ratio = scaling.reciprocal ? x * inverse : x / scale;
#if defined(__aarch64__)
    if (ratio != ratio) return static_cast<uint8_t>(scaling.zero);
#endif
    float lowest = static_cast<float>(-scaling.zero), highest = static_cast<float>(255 - scaling.zero);
    ratio = ratio > lowest ? ratio : lowest;
    ratio = ratio < highest ? ratio : highest;
    return static_cast<uint8_t>(static_cast<int>(std::nearbyintf(ratio)) + scaling.zero);
  }
  float rounded = std::nearbyintf(x / scale);
#if defined(__aarch64__)
  float capped = rounded < 1e6f ? rounded : 1e6f;  // Arm's conversion saturates, and gives 0 for no number
  int number = rounded != rounded ? 0 : capped > -1e6f ? static_cast<int>(capped) : -1000000;
#else
  int number = rounded > -2147483648.0f && rounded < 2147483648.0f ? static_cast<int>(rounded) : INT_MIN;
#endif
  if (number < -scaling.zero) return 0;
  return static_cast<uint8_t>(number > 255 - scaling.zero ? 255 : number + scaling.zero);
}

[[maybe_unused]] inline float larger(float maximum, float x, bool magnitude) {
  float value = magnitude ? std::fabs(x) : x;
  return value > maximum ? value : maximum;
}

// The scale of a row whose maximum is known.
[[maybe_unused]] inline float row_scale_of(float maximum, const RowScaling& scaling) {
  if (scaling.fixed_scale > 0) return scaling.fixed_scale;
  if (!scaling.magnitude && maximum < scaling.floor) maximum = scaling.floor;
  return maximum * scaling.step;
}

[[maybe_unused]] inline float lowest_maximum(const RowScaling& scaling) { return scaling.magnitude ? 0.0f : -FLT_MAX; }

[[maybe_unused]] inline float quantise_row(const float* x, size_t inner, size_t padded, const RowScaling& scaling,
                                           uint8_t* q) {
  float maximum = lowest_maximum(scaling);
  if (!(scaling.fixed_scale > 0))
    for (size_t i = 0; i < inner; i++) maximum = larger(maximum, x[i], scaling.magnitude);
  float scale = row_scale_of(maximum, scaling), inverse = 1.0f / scale;
  for (size_t i = 0; i < inner; i++) q[i] = quantise_number(x[i], scale, inverse, scaling);
  std::memset(q + inner, scaling.zero, padded - inner);
  return scale;
}

// Scales integer sums of a row and a panel back and stores them.
[[maybe_unused]] inline void store_row(const Tile& tile, size_t row, size_t p, const int32_t* sums) {
  const Matrix& matrix = *tile.matrix;
  const size_t first = p * PANEL, width = matrix.columns - first < PANEL ? matrix.columns - first : PANEL;
  float* out = tile.out + row * matrix.columns + first;
  for (size_t c = 0; c < width; c++) {
    uint32_t shift = static_cast<uint32_t>(tile.zero) * static_cast<uint32_t>(matrix.column_sum.get()[first + c]);
    float number = static_cast<float>(static_cast<int32_t>(static_cast<uint32_t>(sums[c]) - shift));
    float scale = matrix.scale.get()[first + c], row_scale = tile.row_scale[row];
    number = tile.column_first ? number * scale * row_scale : number * row_scale * scale;
    out[c] = matrix.bias.get() ? number + matrix.bias.get()[first + c] : number;
  }
}

// Adds the bias to the sums of a row and a panel of floats and stores them.
[[maybe_unused]] inline void store_float_sums(const FloatTile& tile, size_t row, size_t p, const float* sums) {
  const Matrix& matrix = *tile.matrix;
  const size_t first = p * PANEL;
  float* out = tile.out + row * matrix.columns + first;
  for (size_t c = 0; c < PANEL && first + c < matrix.columns; c++)
    out[c] = matrix.bias.get() ? sums[c] + matrix.bias.get()[first + c] : sums[c];
}

// The int8 weights of a panel of 4 bits, in the layout of 8 bits.
[[maybe_unused]] inline void expand_panel(const Matrix& matrix, size_t p, int8_t* out) {
  const uint8_t* data = matrix.panel(p);
  for (size_t row = 0; row < matrix.padded_inner; row += 2 * GROUP, data += GROUP_BYTES, out += 2 * GROUP_BYTES) {
    const uint8_t* codes = matrix.codes_of(p) + row / matrix.block * PANEL;
    for (size_t i = 0; i < GROUP_BYTES; i++) {
      const Step step(codes[i / GROUP]);
      out[i] = static_cast<int8_t>((data[i] & 15) * step.m - step.shift);
      out[GROUP_BYTES + i] = static_cast<int8_t>((data[i] >> 4) * step.m - step.shift);
    }
  }
}

}  // namespace
}  // namespace tformer

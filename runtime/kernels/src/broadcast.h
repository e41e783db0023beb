// Arrays of different shapes, number by number: axes of size 1 and missing axes in front are repeated.
#pragma once

#include <algorithm>

#include "operator.h"

namespace tformer {

inline bool is_same_shape(const Input& a, const Input& b) {
  return a.rank == b.rank && std::equal(a.sizes, a.sizes + a.rank, b.sizes);
}

// The shape of both arrays together.
inline Shape broadcast_shape(const ort::Api* api, const Input& a, const Input& b) {
  Shape shape;
  shape.rank = std::max(a.rank, b.rank);
  for (size_t i = 1; i <= shape.rank; i++) {
    const int64_t m = i <= a.rank ? a.sizes[a.rank - i] : 1, n = i <= b.rank ? b.sizes[b.rank - i] : 1;
    if (m != n && m != 1 && n != 1) fail(api, "tformer-kernels: the arrays of a sum or a product must have the same shape");
    shape.sizes[shape.rank - i] = m == 1 ? n : m;
  }
  return shape;
}

// Where a row of the shape begins in one of its arrays.
inline size_t place_of_row(const Input& input, const Shape& shape, size_t row) {
  size_t place = 0, stride = input.rank > 0 ? input.size(input.rank - 1) : 1;
  for (size_t axis = 2; axis <= input.rank; axis++) {
    const size_t own = input.size(input.rank - axis), size = shape.size(shape.rank - axis);
    place += (own == 1 ? 0 : row % size) * stride;
    row /= size, stride *= own;
  }
  return place;
}

// Computes function(a, b) row by row. shape: of one axis or more.
template <class Function>
void combine(const Input& a, const Input& b, const Shape& shape, float* out, const Function& function) {
  const size_t size = shape.size(shape.rank - 1), rows = rows_of(shape);
  auto is_row = [&](const Input& input) { return input.rank > 0 && input.size(input.rank - 1) == size; };
  const size_t step_a = is_row(a), step_b = is_row(b);  // 0: one number for a row
  for (size_t r = 0; r < rows; r++, out += size) {
    const float *x = a.floats() + place_of_row(a, shape, r), *y = b.floats() + place_of_row(b, shape, r);
    if (step_a == 1 && step_b == 1)  // in vectors
      for (size_t i = 0; i < size; i++) out[i] = function(x[i], y[i]);
    else
      for (size_t i = 0; i < size; i++) out[i] = function(x[i * step_a], y[i * step_b]);
  }
}

}  // namespace tformer

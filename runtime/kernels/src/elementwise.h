// What a layer computes between products: activations, gates and norms.
#pragma once

#include <cstddef>
#include <cstdint>

#include "matrix.h"
#include "product.h"

namespace tformer {

// Rows of D numbers, normalised: (x − mean) / √(variance + ε) · weight + bias (Ba et al. 2016), or
// x / √(mean of x² + ε) · weight + bias (Zhang and Sennrich 2019). With a residual, of x + residual.
struct NormTile {
  const float* x;         // (rows, D)
  const float* residual;  // (rows, D); nullptr for none
  const float *weight, *bias;  // (D); nullptr for none
  float* out;             // (rows, D)
  float* sum;             // (rows, D), x + residual; nullptr if it is not wanted
  size_t rows, size;      // size: D
  float epsilon;
  bool root_mean_square;
};

// Rows of 2 · M numbers become rows of M: one half, activated, times the other half.
struct GateTile {
  const float* x;  // (rows, 2 · M)
  float* out;      // (rows, M)
  size_t rows, size;  // size: M
  bool first;      // whether the first half is activated
  Activation activation;
};

// A row's result depends on the row alone. The time grows with the numbers.
void normalise(const Path& path, const NormTile& all, ParallelFor parallel_for, void* context);
void gate(const Path& path, const GateTile& all, ParallelFor parallel_for, void* context);

}  // namespace tformer

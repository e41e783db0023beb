// A product of float rows and a packed matrix: quantise the rows, multiply integers, scale back; or multiply floats.
#pragma once

#include <cstddef>

#include "matrix.h"

namespace tformer {

// Runs function(data, i) for each i below count, on any threads.
using ParallelFor = void (*)(void* context, void (*function)(void* data, size_t i), size_t count, void* data);

// Runs tasks on the calling thread.
inline void run_alone(void*, void (*task)(void*, size_t), size_t count, void* data) {
  for (size_t i = 0; i < count; i++) task(data, i);
}

// One task runs at once, without a way through the pool.
inline void run_tasks(ParallelFor parallel_for, void* context, void (*task)(void*, size_t), size_t count, void* data) {
  if (count == 1)
    task(data, 0);
  else
    parallel_for(context, task, count, data);
}

struct Call {
  const Matrix* matrix;
  RowScaling scaling;
  bool column_first;
  const float* x;  // (rows, K)
  float* out;      // (rows, N)
  size_t rows;
  Activation activation;  // of the result
};

// Throws std::bad_alloc. The result of a row depends on the row alone, not on the division of the work.
void multiply(const Call& call, ParallelFor parallel_for, void* context);

struct FloatCall {
  const Matrix* matrix;  // of float32
  const float* x;        // (rows, K)
  float* out;            // (rows, N)
  size_t rows;
  Activation activation;
};

void multiply(const FloatCall& call, ParallelFor parallel_for, void* context);

}  // namespace tformer

// Packing of weights. Threads share the panels of a matrix.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "matrix.h"

namespace tformer {

enum class Refusal : int64_t { SHAPE = -1, PAIRS = -2, MEMORY = -3, PATH = -4 };

struct Packed {
  std::shared_ptr<const Matrix> matrix;  // null if refused
  Refusal refusal = Refusal::SHAPE;
};

// int8 weights (K, N): weight (k, n) is the byte at k · row_stride + n · column_stride, XOR `flip` (0, or 0x80 for
// weights that are stored as uint8 around 128).
Packed pack_8_bits(const Path& path, const uint8_t* weights, ptrdiff_t row_stride, ptrdiff_t column_stride, uint8_t flip,
                   size_t inner, size_t columns, const float* scale, const float* bias, unsigned threads);

// 4-bit weights as MatMulNBits reads them, (N, ⌈K / block⌉, block / 2), the lower half first, and their
// codes (N, ⌈K / block⌉).
Packed pack_4_bits(const Path& path, const uint8_t* nibbles, const uint8_t* codes, size_t block, size_t inner,
                   size_t columns, const float* scale, const float* bias, unsigned threads);

// float32 weights (K, N): weight (k, n) is the number at k · row_stride + n · column_stride.
Packed pack_floats(const Path& path, const float* weights, ptrdiff_t row_stride, ptrdiff_t column_stride, size_t inner,
                   size_t columns, const float* bias, unsigned threads);

}  // namespace tformer

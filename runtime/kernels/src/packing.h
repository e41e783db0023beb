// Packing of weights: how the bytes of a file become a matrix. `Packer` does it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "matrix.h"

namespace tformer {

enum class Refusal : int64_t { SHAPE = -1, PAIRS = -2, MEMORY = -3, PATH = -4 };

// A matrix whose weights are being packed. Threads may share the work: each packs panels of its own.
struct Packing {
  std::shared_ptr<Matrix> matrix;  // null if refused
  Refusal refusal = Refusal::SHAPE;
  size_t units = 0, weights_of_unit = 0;                    // the work; a unit is some panels
  std::function<bool(size_t begin, size_t end)> pack_units;  // whether the path can multiply with these panels
};

// int8 weights (K, N): weight (k, n) is the byte at k · row_stride + n · column_stride, XOR `flip` (0, or 0x80 for
// weights that are stored as uint8 around 128).
Packing prepare_8_bits(const Path& path, const uint8_t* weights, ptrdiff_t row_stride, ptrdiff_t column_stride,
                       uint8_t flip, size_t inner, size_t columns, const float* scale, const float* bias);

// 4-bit weights as MatMulNBits reads them, (N, ⌈K / block⌉, block / 2), the lower half first, and their
// codes (N, ⌈K / block⌉).
Packing prepare_4_bits(const Path& path, const uint8_t* nibbles, const uint8_t* codes, size_t block, size_t inner,
                       size_t columns, const float* scale, const float* bias);

// float32 weights (K, N): weight (k, n) is the number at k · row_stride + n · column_stride.
Packing prepare_floats(const Path& path, const float* weights, ptrdiff_t row_stride, ptrdiff_t column_stride,
                       size_t inner, size_t columns, const float* bias);

}  // namespace tformer

// The library's own functions, for ctypes. Pointers are to memory that the caller keeps for the call alone.
#include <cstdint>
#include <new>

#include "beams.h"
#include "export.h"
#include "packer.h"
#include "packing.h"
#include "paths.h"
#include "product.h"
#include "store.h"

using namespace tformer;

namespace {

constexpr int32_t ABI_VERSION = 9;  // grows whenever a function or an operator changes

// Packs in the background, or at once without a packer.
int64_t pack(Packing packing, Packer* packer, MappedBytes source) {
  if (packer != nullptr) return packer->add(std::move(packing), source);
  const auto refusal = static_cast<int64_t>(packing.refusal);
  Packer alone(1);
  const int64_t handle = alone.add(std::move(packing), source);
  return alone.wait() == 0 ? handle : refusal;
}

template <class Body>
int64_t guarded(const Body& body) {
  try {
    return body();
  } catch (...) {  // memory alone fails there
    return static_cast<int64_t>(Refusal::MEMORY);
  }
}

}  // namespace

TFORMER_EXPORT int32_t tformer_kernels_version() { return ABI_VERSION; }

// The name of the path at this place, the best first; null beyond the last.
TFORMER_EXPORT const char* tformer_kernels_path(uint32_t index) {
  const Path* path = path_at(index);
  return path ? path->name : nullptr;
}

// Whether the processor has the path.
TFORMER_EXPORT int32_t tformer_kernels_supports(const char* path) { return find_path(path) != nullptr; }

// Returns an object that packs matrices on `threads` threads; null without memory. It must be closed.
TFORMER_EXPORT void* tformer_kernels_new_packer(uint32_t threads) {
  try {
    return new Packer(threads);
  } catch (...) {
    return nullptr;
  }
}

// Returns when all matrices of a packer are packed, and how many of them were refused: these have no handle any more.
TFORMER_EXPORT int64_t tformer_kernels_wait(void* packer) {
  return static_cast<int64_t>(static_cast<Packer*>(packer)->wait());
}

// Matrices that are not packed yet remain so: their handles must be released, and not be used.
TFORMER_EXPORT void tformer_kernels_close_packer(void* packer) { delete static_cast<Packer*>(packer); }

// Returns a handle, or a number of `Refusal`, which is negative. With a packer the handle is returned at once, and weights
// are read until `tformer_kernels_wait` returns; without one they are packed in the call. The first `mapped` bytes of the
// weights are let go then.
TFORMER_EXPORT int64_t tformer_kernels_pack8(const char* path, const uint8_t* weights, int64_t row_stride,
                                             int64_t column_stride, uint8_t flip, uint64_t inner, uint64_t columns,
                                             const float* scale, const float* bias, void* packer, uint64_t mapped) {
  const Path* found = find_path(path);
  if (found == nullptr) return static_cast<int64_t>(Refusal::PATH);
  return guarded([&] {
    return pack(prepare_8_bits(*found, weights, row_stride, column_stride, flip, inner, columns, scale, bias),
                static_cast<Packer*>(packer), {weights, mapped});
  });
}

TFORMER_EXPORT int64_t tformer_kernels_pack4(const char* path, const uint8_t* nibbles, const uint8_t* codes,
                                             uint64_t block, uint64_t inner, uint64_t columns, const float* scale,
                                             const float* bias, void* packer, uint64_t mapped) {
  const Path* found = find_path(path);
  if (found == nullptr) return static_cast<int64_t>(Refusal::PATH);
  return guarded([&] {
    return pack(prepare_4_bits(*found, nibbles, codes, block, inner, columns, scale, bias), static_cast<Packer*>(packer),
                {nibbles, mapped});
  });
}

// float32 weights; strides in numbers.
TFORMER_EXPORT int64_t tformer_kernels_pack_float(const char* path, const float* weights, int64_t row_stride,
                                                  int64_t column_stride, uint64_t inner, uint64_t columns,
                                                  const float* bias, void* packer, uint64_t mapped) {
  const Path* found = find_path(path);
  if (found == nullptr) return static_cast<int64_t>(Refusal::PATH);
  return guarded([&] {
    return pack(prepare_floats(*found, weights, row_stride, column_stride, inner, columns, bias),
                static_cast<Packer*>(packer), {weights, mapped});
  });
}

// Whether a handle is of a matrix.
TFORMER_EXPORT int32_t tformer_kernels_knows(int64_t handle) { return find_matrix(handle) != nullptr; }

// Returns whether the handle was known. Sessions that multiply with the matrix keep it.
TFORMER_EXPORT int32_t tformer_kernels_release(int64_t handle) { return release_matrix(handle); }

// The number of matrices in memory.
TFORMER_EXPORT int32_t tformer_kernels_matrices() { return Matrix::count; }

// Multiplies on the calling thread, without onnxruntime; x (rows, K), out (rows, N). Returns 0, or a `Refusal`.
TFORMER_EXPORT int64_t tformer_kernels_multiply(int64_t handle, const float* x, uint64_t rows, float* out,
                                                int32_t magnitude, float floor, float step, int32_t zero,
                                                int32_t reciprocal, float fixed_scale, int32_t column_first) {
  return guarded([&]() -> int64_t {
    auto matrix = find_matrix(handle);
    if (!matrix || matrix->bits == FLOAT_BITS || zero < 0 || zero > 255) return static_cast<int64_t>(Refusal::SHAPE);
    RowScaling scaling{magnitude != 0, floor, step, zero, reciprocal != 0, fixed_scale};
    multiply(Call{matrix.get(), scaling, column_first != 0, x, out, rows, {}}, run_alone, nullptr);
    return 0;
  });
}

// As `tformer_kernels_multiply`, of a float32 matrix.
TFORMER_EXPORT int64_t tformer_kernels_multiply_float(int64_t handle, const float* x, uint64_t rows, float* out) {
  return guarded([&]() -> int64_t {
    auto matrix = find_matrix(handle);
    if (!matrix || matrix->bits != FLOAT_BITS) return static_cast<int64_t>(Refusal::SHAPE);
    multiply(FloatCall{matrix.get(), x, out, rows, {}}, run_alone, nullptr);
    return 0;
  });
}

// Returns 0, or a `Refusal`. Rows of beams must be rows of the logits.
TFORMER_EXPORT int64_t tformer_kernels_rank_beams(const float* logits, uint64_t row_stride, uint64_t vocabulary,
                                                  const float* norms, const int64_t* rows, const float* scores,
                                                  uint64_t groups, uint64_t beams, uint64_t width, float* numbers,
                                                  int64_t* places) {
  return guarded([&]() -> int64_t {
    if (width == 0) return static_cast<int64_t>(Refusal::SHAPE);
    const size_t size = groups * width;
    rank_beams(BeamStep{logits, norms, rows, scores, row_stride, vocabulary, groups, beams},
               RankedBeams{numbers, numbers + size, places, places + size, width});
    return 0;
  });
}

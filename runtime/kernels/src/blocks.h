// Division of rows and panels into register tiles.
#pragma once

#include <array>
#include <type_traits>
#include <utility>

#include "matrix.h"

#define INLINE __attribute__((always_inline)) inline
#define UNROLLED(i) [&](auto i) __attribute__((always_inline))

namespace tformer {
namespace {

// Calls body(i) for each i below COUNT, as constants. A loop that the compiler unrolls itself leaves arrays of vectors in
// memory.
template <int COUNT, class Body>
INLINE void unroll(Body&& body) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (body(std::integral_constant<int, I>{}), ...);
  }(std::make_integer_sequence<int, COUNT>{});
}

// Calls Kernel<rows, PANELS>::run(tile, row, panel, weights of the panel) for the rows of a tile, in blocks of at most
// MAX_ROWS of about equal size.
template <template <int, int> class Kernel, int PANELS, int MAX_ROWS, class AnyTile, class Weight>
inline void for_rows(const AnyTile& tile, size_t p, const Weight* weights) {
  using Function = void (*)(const AnyTile&, size_t, size_t, const Weight*);
  static constexpr auto functions = []<int... N>(std::integer_sequence<int, N...>) {
    return std::array<Function, MAX_ROWS>{&Kernel<N + 1, PANELS>::run...};
  }(std::make_integer_sequence<int, MAX_ROWS>{});
  const size_t rows = tile.row_end - tile.row_begin, blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;
  for (size_t b = 0; b < blocks; b++) {
    const size_t begin = rows * b / blocks, end = rows * (b + 1) / blocks;
    functions[end - begin - 1](tile, tile.row_begin + begin, p, weights);
  }
}

// The calling thread's buffer for the int8 form of panels of 4 bits.
inline uint8_t* expanded_panels(size_t bytes) {
  static thread_local Growing<uint8_t> buffer;
  return buffer.reserve(bytes);
}

}  // namespace
}  // namespace tformer

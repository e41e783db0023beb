// The instructions of AMX. With TFORMER_EMULATE_AMX they are plain C++, so that a processor without AMX runs the code around
// them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if !defined(TFORMER_EMULATE_AMX)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace tformer {
namespace {

// The operand of LDTILECFG.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64);

#if defined(TFORMER_EMULATE_AMX)

struct EmulatedTile {
  uint8_t bytes[16][64];
};
thread_local EmulatedTile tiles[8];
thread_local TileShapes tile_shapes;

inline bool may_use_tiles() { return true; }
inline void load_shapes(const TileShapes& shapes) { tile_shapes = shapes; }
inline void release_tiles() { tile_shapes = {}; }

template <int T>
inline void clear_tile() {
  tiles[T] = {};
}
template <int T>
inline void load_tile(const void* base, size_t stride) {
  for (int r = 0; r < tile_shapes.rows[T]; r++)
    std::memcpy(tiles[T].bytes[r], static_cast<const uint8_t*>(base) + r * stride, tile_shapes.bytes[T]);
}
template <int T>
inline void store_tile(void* base, size_t stride) {
  for (int r = 0; r < tile_shapes.rows[T]; r++)
    std::memcpy(static_cast<uint8_t*>(base) + r * stride, tiles[T].bytes[r], tile_shapes.bytes[T]);
}
template <int SUMS, int A, int W>
inline void add_products() {
  for (int r = 0; r < tile_shapes.rows[SUMS]; r++)
    for (int c = 0; c < tile_shapes.bytes[SUMS] / 4; c++) {
      int32_t sum;
      std::memcpy(&sum, &tiles[SUMS].bytes[r][4 * c], 4);
      for (int k = 0; k < tile_shapes.bytes[A]; k++)
        sum += tiles[A].bytes[r][k] * static_cast<int8_t>(tiles[W].bytes[k / 4][4 * c + k % 4]);
      std::memcpy(&tiles[SUMS].bytes[r][4 * c], &sum, 4);
    }
}

#else

// Whether the processor has tiles of integers, and the system lets this process use them.
inline bool may_use_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned AMX_TILE = 1u << 24, AMX_INT8 = 1u << 25;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & AMX_TILE) == 0 || (d & AMX_INT8) == 0) return false;
#if defined(__linux__)
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return false;
#endif
}
// gcc's intrinsics take only literals as tiles.
inline void load_shapes(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
inline void release_tiles() { asm volatile("tilerelease"); }

template <int T>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
inline void load_tile(const void* base, size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(base), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void store_tile(void* base, size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(base), "r"(stride), "i"(T) : "memory");
}
template <int SUMS, int A, int W>
inline void add_products() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(W));
}

#endif

}  // namespace
}  // namespace tformer

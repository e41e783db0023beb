// Rows and tiles for Arm: SDOT adds 4 products of int8 to each of 4 sums. Activations are uint8 around `zero`; minus 128 they
// are int8.
#pragma once

#include <arm_neon.h>

#include "blocks.h"
#include "reference.h"

#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace tformer {
namespace {

constexpr size_t STEP = 16;            // rows of weights in one vector of activations
constexpr size_t ROWS_TO_EXPAND = 6;  // so many rows repay the making of int8 columns from 4 bits

// Whether the processor has a feature. bit: in the auxiliary vector's word `type` of Linux. name: in Darwin's system control.
[[maybe_unused]] inline bool has_feature([[maybe_unused]] unsigned long type, [[maybe_unused]] int bit,
                                         [[maybe_unused]] const char* name) {
#if defined(__linux__)
  return getauxval(type) >> bit & 1;
#elif defined(__APPLE__)
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
#else
  return false;
#endif
}

[[maybe_unused]] inline float quantise_neon(const float* x, size_t inner, size_t padded, const RowScaling& scaling,
                                            uint8_t* q) {
  float maximum = lowest_maximum(scaling);
  if (!(scaling.fixed_scale > 0)) {
    const uint32x4_t mask = vdupq_n_u32(scaling.magnitude ? 0x7fffffff : 0xffffffff);
    float32x4_t best[4] = {vdupq_n_f32(maximum), vdupq_n_f32(maximum), vdupq_n_f32(maximum), vdupq_n_f32(maximum)};
    size_t i = 0;
    for (; i + 16 <= inner; i += 16)
      for (size_t u = 0; u < 4; u++) {
        const uint32x4_t bits = vreinterpretq_u32_f32(vld1q_f32(x + i + 4 * u));
        best[u] = vmaxnmq_f32(best[u], vreinterpretq_f32_u32(vandq_u32(bits, mask)));
      }
    maximum = vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(best[0], best[1]), vmaxnmq_f32(best[2], best[3])));
    for (; i < inner; i++) maximum = larger(maximum, x[i], scaling.magnitude);
  }
  const float scale = row_scale_of(maximum, scaling), inverse = 1.0f / scale;
  const bool clips_first = scaling.reciprocal || scaling.fixed_scale > 0;
  const float32x4_t lowest = vdupq_n_f32(static_cast<float>(-scaling.zero));
  const float32x4_t highest = vdupq_n_f32(static_cast<float>(255 - scaling.zero));
  const int32x4_t zero = vdupq_n_s32(scaling.zero);
  size_t i = 0;
  for (; i + 16 <= inner; i += 16) {
    uint16x4_t number[4];
    for (size_t u = 0; u < 4; u++) {
      const float32x4_t value = vld1q_f32(x + i + 4 * u);
      float32x4_t ratio =
          scaling.reciprocal ? vmulq_f32(value, vdupq_n_f32(inverse)) : vdivq_f32(value, vdupq_n_f32(scale));
      if (clips_first) ratio = vminq_f32(vmaxq_f32(ratio, lowest), highest);
      number[u] = vqmovun_s32(vqaddq_s32(vcvtnq_s32_f32(ratio), zero));  // no number becomes zero
    }
    vst1q_u8(q + i, vcombine_u8(vqmovn_u16(vcombine_u16(number[0], number[1])),
                                vqmovn_u16(vcombine_u16(number[2], number[3]))));
  }
  for (; i < inner; i++) q[i] = quantise_number(x[i], scale, inverse, scaling);
  std::memset(q + inner, scaling.zero, padded - inner);
  return scale;
}

INLINE int8x16_t activations(const uint8_t* q) {
  return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(q), vdupq_n_u8(0x80)));
}

INLINE int8x16_t int8_weights(const uint8_t* weights) { return vreinterpretq_s8_u8(vld1q_u8(weights)); }

// Scales the sums (rows, 16) of a panel back and stores them.
[[maybe_unused, gnu::noinline]] inline void store_sums(const Tile& tile, size_t row, size_t rows, size_t p,
                                                       const int32_t* sums) {
  Tile shifted = tile;
  shifted.zero = tile.zero - 128;
  for (size_t r = 0; r < rows; r++) store_row(shifted, row + r, p, sums + r * PANEL);
}

template <int ROWS>
INLINE void store_tile(const Tile& tile, size_t row, size_t p, const int32x4_t (&sums)[ROWS][4]) {
  int32_t buffer[ROWS * PANEL];
  unroll<ROWS>(UNROLLED(r) { unroll<4>(UNROLLED(j) { vst1q_s32(buffer + r * PANEL + 4 * j, sums[r][j]); }); });
  store_sums(tile, row, ROWS, p, buffer);
}

template <int ROWS, int PANELS>
struct Dot8 {
  static_assert(PANELS == 1);
  static void run(const Tile& tile, size_t row, size_t p, const uint8_t* weights) {
    const size_t inner = tile.matrix->padded_inner;
    const uint8_t* q = tile.rows + row * inner;
    int32x4_t sums[ROWS][4];
    unroll<ROWS>(UNROLLED(r) { unroll<4>(UNROLLED(j) { sums[r][j] = vdupq_n_s32(0); }); });
    for (size_t k = 0; k < inner; k += STEP, weights += STEP * PANEL) {
      int8x16_t a[ROWS];
      unroll<ROWS>(UNROLLED(r) { a[r] = activations(q + r * inner + k); });
      unroll<4>(UNROLLED(lane) {
        unroll<4>(UNROLLED(j) {
          const int8x16_t w = int8_weights(weights + lane * GROUP_BYTES + j * 16);
          unroll<ROWS>(UNROLLED(r) { sums[r][j] = vdotq_laneq_s32(sums[r][j], w, a[r], lane); });
        });
      });
    }
    store_tile<ROWS>(tile, row, p, sums);
  }
};

// Numbers 4 · J to 4 · J + 3 of 16.
template <int J>
INLINE int32x4_t four_of(uint8x16_t numbers) {
  const uint16x8_t words = vmovl_u8(J < 2 ? vget_low_u8(numbers) : vget_high_u8(numbers));
  return vreinterpretq_s32_u32(vmovl_u16(J % 2 ? vget_high_u16(words) : vget_low_u16(words)));
}

template <int ROWS, int PANELS>
struct Dot4 {
  static_assert(PANELS == 1);
  static void run(const Tile& tile, size_t row, size_t p, const uint8_t* weights) {
    const Matrix& matrix = *tile.matrix;
    const size_t inner = matrix.padded_inner;
    const uint8_t *codes = matrix.codes_of(p), *q = tile.rows + row * inner;
    const int16_t* block_sums = tile.block_sums + row * matrix.blocks();
    int32x4_t sums[ROWS][4];
    unroll<ROWS>(UNROLLED(r) { unroll<4>(UNROLLED(j) { sums[r][j] = vdupq_n_s32(0); }); });
    for (size_t b = 0; b < inner; b += matrix.block, codes += PANEL, block_sums++) {
      int32x4_t part[ROWS][4];
      unroll<ROWS>(UNROLLED(r) { unroll<4>(UNROLLED(j) { part[r][j] = vdupq_n_s32(0); }); });
      for (size_t k = b; k < b + matrix.block; k += STEP, weights += 2 * GROUP_BYTES) {
        int8x16_t a[ROWS];
        unroll<ROWS>(UNROLLED(r) { a[r] = activations(q + r * inner + k); });
        unroll<2>(UNROLLED(pair) {
          unroll<4>(UNROLLED(j) {
            const uint8x16_t both = vld1q_u8(weights + pair * GROUP_BYTES + j * 16);
            const int8x16_t w = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
            const int8x16_t v = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
            unroll<ROWS>(UNROLLED(r) {
              part[r][j] = vdotq_laneq_s32(part[r][j], w, a[r], 2 * pair);
              part[r][j] = vdotq_laneq_s32(part[r][j], v, a[r], 2 * pair + 1);
            });
          });
        });
      }
      const uint8x16_t code = vld1q_u8(codes);
      const uint8x16_t m = vaddq_u8(vandq_u8(code, vdupq_n_u8(7)), vdupq_n_u8(1));
      const uint8x16_t shift = vshrq_n_u8(vmulq_u8(m, vshrq_n_u8(code, 3)), 1);  // at most 8 · 31 before
      const int32_t middle = 128 * static_cast<int32_t>(matrix.block);  // of activations minus 128
      unroll<4>(UNROLLED(j) {
        const int32x4_t factor = four_of<j>(m), subtracted = four_of<j>(shift);
        unroll<ROWS>(UNROLLED(r) {
          const int32_t sum = block_sums[r * matrix.blocks()] - middle;
          sums[r][j] = vmlaq_s32(sums[r][j], part[r][j], factor);
          sums[r][j] = vmlsq_n_s32(sums[r][j], subtracted, sum);
        });
      });
    }
    store_tile<ROWS>(tile, row, p, sums);
  }
};

// Multiplies 4-bit weights: few rows directly, more rows with `multiply(panel, weights)` of their int8 form.
template <class Multiply>
inline void multiply_4_bits(const Tile& tile, const Multiply& multiply) {
  const Matrix& matrix = *tile.matrix;
  const bool expands = tile.row_end - tile.row_begin >= ROWS_TO_EXPAND;
  uint8_t* expanded = expands ? expanded_panels(matrix.padded_inner * PANEL) : nullptr;
  for (size_t p = tile.panel_begin; p < tile.panel_end; p++)
    if (expands) {
      expand_panel(matrix, p, reinterpret_cast<int8_t*>(expanded));
      multiply(p, expanded);
    } else {
      for_rows<Dot4, 1, 3>(tile, p, matrix.panel(p));
    }
}

}  // namespace
}  // namespace tformer

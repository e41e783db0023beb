// Arm with SMMLA (Armv8.6): two rows times two columns, 8 numbers deep. A vector of weights is made of two groups.
#include "neon_floats.h"
#include "neon_rows.h"
#include "paths.h"

namespace tformer {
namespace {

constexpr int PAIRS = 3;       // of rows: 24 registers of sums
constexpr size_t DEPTH = 8;    // rows of weights in one vector
constexpr size_t DOT_ROWS = 2;  // so few rows fill no pairs

// rows: of which an odd number leaves half of the last pair.
template <int PAIR_COUNT>
void multiply_rows(const Tile& tile, size_t row, size_t rows, size_t p, const uint8_t* weights) {
  const size_t inner = tile.matrix->padded_inner;
  const uint8_t *first[PAIR_COUNT], *second[PAIR_COUNT];
  for (size_t i = 0; i < PAIR_COUNT; i++) {
    first[i] = tile.rows + (row + 2 * i) * inner;
    second[i] = 2 * i + 1 < rows ? first[i] + inner : first[i];
  }
  int32x4_t sums[PAIR_COUNT][8];
  unroll<PAIR_COUNT>(UNROLLED(i) { unroll<8>(UNROLLED(j) { sums[i][j] = vdupq_n_s32(0); }); });
  for (size_t k = 0; k < inner; k += DEPTH, weights += DEPTH * PANEL) {
    int8x16_t a[PAIR_COUNT];
    unroll<PAIR_COUNT>(UNROLLED(i) {
      const uint8x16_t both = vcombine_u8(vld1_u8(first[i] + k), vld1_u8(second[i] + k));
      a[i] = vreinterpretq_s8_u8(veorq_u8(both, vdupq_n_u8(0x80)));
    });
    unroll<4>(UNROLLED(j) {
      const int32x4_t upper = vreinterpretq_s32_u8(vld1q_u8(weights + 16 * j));
      const int32x4_t lower = vreinterpretq_s32_u8(vld1q_u8(weights + GROUP_BYTES + 16 * j));
      const int8x16_t w = vreinterpretq_s8_s32(vzip1q_s32(upper, lower));
      const int8x16_t v = vreinterpretq_s8_s32(vzip2q_s32(upper, lower));
      unroll<PAIR_COUNT>(UNROLLED(i) {
        sums[i][2 * j] = vmmlaq_s32(sums[i][2 * j], a[i], w);
        sums[i][2 * j + 1] = vmmlaq_s32(sums[i][2 * j + 1], a[i], v);
      });
    });
  }
  int32_t buffer[2 * PAIR_COUNT * PANEL];
  unroll<PAIR_COUNT>(UNROLLED(i) {
    unroll<8>(UNROLLED(j) {
      vst1_s32(buffer + 2 * i * PANEL + 2 * j, vget_low_s32(sums[i][j]));
      vst1_s32(buffer + (2 * i + 1) * PANEL + 2 * j, vget_high_s32(sums[i][j]));
    });
  });
  store_sums(tile, row, rows, p, buffer);
}

void multiply_panel(const Tile& tile, size_t p, const uint8_t* weights) {
  if (tile.row_end - tile.row_begin <= DOT_ROWS) return for_rows<Dot8, 1, DOT_ROWS>(tile, p, weights);
  for (size_t row = tile.row_begin; row < tile.row_end; row += 2 * PAIRS) {
    const size_t left = tile.row_end - row, rows = left < 2 * PAIRS ? left : 2 * PAIRS;
    if (rows > 4)
      multiply_rows<3>(tile, row, rows, p, weights);
    else if (rows > 2)
      multiply_rows<2>(tile, row, rows, p, weights);
    else
      multiply_rows<1>(tile, row, rows, p, weights);
  }
}

void multiply8(const Tile& tile) {
  for (size_t p = tile.panel_begin; p < tile.panel_end; p++) multiply_panel(tile, p, tile.matrix->panel(p));
}

void multiply4(const Tile& tile) {
  multiply_4_bits(tile, [&](size_t p, const uint8_t* weights) { multiply_panel(tile, p, weights); });
}

bool supported() { return has_feature(26, 13, "hw.optional.arm.FEAT_I8MM"); }  // AT_HWCAP2, HWCAP2_I8MM

}  // namespace

constinit const Path NEON_I8MM = {"neoni8mm", supported, STEP, ROWS_TO_EXPAND - 1, false, quantise_neon, multiply8,
                                  multiply4, PANEL, multiply_float_neon, attend_neon, rotate_neon, &ELEMENTWISE_NEON};

}  // namespace tformer

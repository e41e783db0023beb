// Arm with SDOT (Armv8.2).
#include "attention_rows.h"
#include "elementwise_rows.h"
#include "neon_floats.h"
#include "neon_rows.h"
#include "paths.h"

namespace tformer {
namespace {

constexpr int ROWS = 4;  // 16 registers of sums

void multiply8(const Tile& tile) {
  for (size_t p = tile.panel_begin; p < tile.panel_end; p++) for_rows<Dot8, 1, ROWS>(tile, p, tile.matrix->panel(p));
}

void multiply4(const Tile& tile) {
  multiply_4_bits(tile, [&](size_t p, const uint8_t* weights) { for_rows<Dot8, 1, ROWS>(tile, p, weights); });
}

bool supported() { return has_feature(16, 20, "hw.optional.arm.FEAT_DotProd"); }  // AT_HWCAP, HWCAP_ASIMDDP

}  // namespace

void attend_neon(const AttentionTile& tile) { Attention<Vector128, 12>::run(tile); }

void rotate_neon(const AttentionCall& call, size_t position, const float* from, float* into, float scale) {
  rotate_head(call, position, from, into, scale);
}

constinit const Elementwise ELEMENTWISE_NEON = ElementwiseRows<Vector128>::FUNCTIONS;

constinit const Path NEON_DOT = {"neondot", supported, STEP, ROWS_TO_EXPAND - 1, false, quantise_neon, multiply8,
                                 multiply4, PANEL, multiply_float_neon, attend_neon, rotate_neon, &ELEMENTWISE_NEON};

}  // namespace tformer

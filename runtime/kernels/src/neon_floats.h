// Products of float32 with Arm's 128-bit vectors.
#pragma once

#include <arm_neon.h>

#include "panel_floats.h"

namespace tformer {
namespace {

struct Vector128 {
  using Type = float32x4_t;
  static constexpr int WIDTH = 4;
  static INLINE Type zero() { return vdupq_n_f32(0); }
  static INLINE Type load(const float* from) { return vld1q_f32(from); }
  static INLINE Type repeat(const float* from) { return vld1q_dup_f32(from); }
  static INLINE Type add_product(Type sum, Type a, Type b) { return vfmaq_f32(sum, a, b); }
  static INLINE void store(float* into, Type value) { vst1q_f32(into, value); }
};

inline void multiply_float_neon(const FloatTile& tile) { PanelFloats<Vector128>::multiply(tile); }

}  // namespace
}  // namespace tformer

// Arm's vectors of 128 bits for float32, and products with them.
#pragma once

#include <arm_neon.h>

#include "panel_floats.h"

namespace tformer {
namespace {

struct Vector128 {
  using Type = float32x4_t;
  static constexpr int WIDTH = 4;
  static INLINE Type load(const float* from) { return vld1q_f32(from); }
  static INLINE void store(float* into, Type value) { vst1q_f32(into, value); }
  static INLINE Type repeat(float x) { return vdupq_n_f32(x); }
  static INLINE Type add_product(Type sum, Type a, Type b) { return vfmaq_f32(sum, a, b); }
  static INLINE Type add(Type a, Type b) { return vaddq_f32(a, b); }
  static INLINE Type subtract(Type a, Type b) { return vsubq_f32(a, b); }
  static INLINE Type multiply(Type a, Type b) { return vmulq_f32(a, b); }
  static INLINE Type divide(Type a, Type b) { return vdivq_f32(a, b); }
  static INLINE Type larger(Type a, Type b) { return vmaxq_f32(a, b); }
  static INLINE Type smaller(Type a, Type b) { return vbslq_f32(vcltq_f32(a, b), a, b); }  // b if a is not a number
  static INLINE Type round(Type x) { return vrndnq_f32(x); }
  static INLINE Type power_of_two(Type n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
  }
  static INLINE Type zero_where_below(Type x, Type limit, Type value) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), vcltq_f32(x, limit)));
  }
};

inline void multiply_float_neon(const FloatTile& tile) { PanelFloats<Vector128>::multiply(tile); }

}  // namespace
}  // namespace tformer

// AVX-VNNI: VPDPBUSD with 256-bit vectors.
#include <cpuid.h>

#include "avx2_floats.h"
#include "avx2_tiles.h"
#include "paths.h"

namespace tformer {
namespace {

struct Dot {
  static constexpr int ROWS_8 = 6, ROWS_4 = 4;  // 16 registers
  static constexpr size_t PART_ROWS = SIZE_MAX;  // sums of a whole block are exact in 32 bits
  static constexpr size_t ROWS_TO_EXPAND = 7;

  static __m256i add(__m256i sums, __m256i a, __m256i w) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(a), "x"(w));  // not the intrinsic, as in avx512_vnni.cpp
    return sums;
  }
  static __m256i add_part(__m256i part, __m256i a, __m256i w) { return add(part, a, w); }
  template <int ROWS>
  static void add_parts(__m256i (&part)[ROWS][2], const __m256i (&others)[ROWS][2]) {
    tformer::add<ROWS>(part, others);
  }
  static __m256i factors(__m256i m) { return m; }
  static __m256i times(__m256i part, __m256i m) { return _mm256_mullo_epi32(part, m); }
};

bool supported() {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return false;
  unsigned a = 0, b = 0, c = 0, d = 0;  // gcc 12 does not know the feature by name
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

}  // namespace

constinit const Path AVX_VNNI = {"avxvnni", supported, 2 * GROUP, Dot::ROWS_TO_EXPAND - 1, false, quantise_avx2,
                                 Kernels<Dot>::multiply8, Kernels<Dot>::multiply4, PANEL, multiply_float_avx2, attend_avx2, rotate_avx2,
                                 &ELEMENTWISE_AVX2};

}  // namespace tformer

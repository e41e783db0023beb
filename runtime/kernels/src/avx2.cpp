// AVX2: VPMADDUBSW adds two products in 16 bits, which int8 columns must keep in range (`Path::limits_pairs`).
#include "attention_rows.h"
#include "avx2_floats.h"
#include "avx2_tiles.h"
#include "elementwise_rows.h"
#include "paths.h"

namespace tformer {
namespace {

struct Dot {
  static constexpr int ROWS_8 = 4, ROWS_4 = 4;       // 16 registers
  static constexpr size_t PART_ROWS = 16;            // 8 products of at most 255 · 15 fit 16 bits
  static constexpr size_t ROWS_TO_EXPAND = SIZE_MAX;  // 4 bits take fewer instructions than 8

  static __m256i add(__m256i sums, __m256i a, __m256i w) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(a, w), _mm256_set1_epi16(1)));
  }
  static __m256i add_part(__m256i part, __m256i a, __m256i w) {
    return _mm256_add_epi16(part, _mm256_maddubs_epi16(a, w));
  }
  template <int ROWS>
  static void add_parts(__m256i (&part)[ROWS][2], const __m256i (&others)[ROWS][2]) {
    for (int r = 0; r < ROWS; r++)
      for (int half = 0; half < 2; half++) part[r][half] = _mm256_add_epi16(part[r][half], others[r][half]);
  }
  static __m256i factors(__m256i m) { return twice(m); }  // for the two 16-bit sums of a column
  static __m256i times(__m256i part, __m256i m) { return _mm256_madd_epi16(part, m); }
};

bool supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

}  // namespace

void attend_avx2(const AttentionTile& tile) { Attention<Vector256, 6>::run(tile); }

void rotate_avx2(const AttentionCall& call, size_t position, const float* from, float* into, float scale) {
  rotate_head(call, position, from, into, scale);
}

constinit const Elementwise ELEMENTWISE_AVX2 = ElementwiseRows<Vector256>::FUNCTIONS;

constinit const Path AVX2 = {"avx2", supported, 2 * GROUP, Dot::ROWS_TO_EXPAND - 1, true, quantise_avx2,
                             Kernels<Dot>::multiply8, Kernels<Dot>::multiply4, PANEL, multiply_float_avx2, attend_avx2, rotate_avx2,
                             &ELEMENTWISE_AVX2};

}  // namespace tformer

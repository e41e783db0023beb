// Quantising rows and scaling back with AVX-512, for AVX-512 VNNI and AMX.
#pragma once

#include <immintrin.h>

#include "blocks.h"
#include "reference.h"

namespace tformer {
namespace {

constexpr size_t STREAM_ROWS_4 = 2;  // for so few rows weights of 4 bits are read as fast as they come from memory

template <bool CLIPS_FIRST, bool RECIPROCAL>
inline __m128i quantise_16(__m512 x, __m512 divisor, __m512 lowest, __m512 highest, __m512i zero) {
  __m512 ratio = RECIPROCAL ? _mm512_mul_ps(x, divisor) : _mm512_div_ps(x, divisor);
  if (CLIPS_FIRST) ratio = _mm512_min_ps(_mm512_max_ps(ratio, lowest), highest);  // no number becomes the lowest
  __m512i number = _mm512_add_epi32(_mm512_cvtps_epi32(ratio), zero);
  return _mm512_cvtusepi32_epi8(_mm512_max_epi32(number, _mm512_setzero_si512()));
}

template <bool CLIPS_FIRST, bool RECIPROCAL>
inline void round_row(const float* x, size_t inner, float scale, const RowScaling& scaling, uint8_t* q) {
  const __m512 divisor = _mm512_set1_ps(RECIPROCAL ? 1.0f / scale : scale);
  const __m512 lowest = _mm512_set1_ps(static_cast<float>(-scaling.zero));
  const __m512 highest = _mm512_set1_ps(static_cast<float>(255 - scaling.zero));
  const __m512i zero = _mm512_set1_epi32(scaling.zero);
  size_t i = 0;
  for (; i + 16 <= inner; i += 16)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + i),
                     quantise_16<CLIPS_FIRST, RECIPROCAL>(_mm512_loadu_ps(x + i), divisor, lowest, highest, zero));
  if (i < inner) {
    const __mmask16 rest = static_cast<__mmask16>((1u << (inner - i)) - 1);
    _mm_mask_storeu_epi8(q + i, rest,
                         quantise_16<CLIPS_FIRST, RECIPROCAL>(_mm512_maskz_loadu_ps(rest, x + i), divisor, lowest,
                                                              highest, zero));
  }
}

inline float quantise_avx512(const float* x, size_t inner, size_t padded, const RowScaling& scaling, uint8_t* q) {
  float maximum = lowest_maximum(scaling);
  if (!(scaling.fixed_scale > 0)) {
    const __m512i mask = _mm512_set1_epi32(scaling.magnitude ? 0x7fffffff : -1);
    auto load = [&](size_t i) {
      return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(_mm512_loadu_ps(x + i)), mask));
    };
    __m512 a = _mm512_set1_ps(maximum), b = a, c = a, d = a;
    size_t i = 0;
    for (; i + 64 <= inner; i += 64) {
      a = _mm512_max_ps(a, load(i));
      b = _mm512_max_ps(b, load(i + 16));
      c = _mm512_max_ps(c, load(i + 32));
      d = _mm512_max_ps(d, load(i + 48));
    }
    for (; i + 16 <= inner; i += 16) a = _mm512_max_ps(a, load(i));
    maximum = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(a, b), _mm512_max_ps(c, d)));
    for (; i < inner; i++) maximum = larger(maximum, x[i], scaling.magnitude);
  }
  float scale = row_scale_of(maximum, scaling);
  if (scaling.reciprocal)
    round_row<true, true>(x, inner, scale, scaling, q);
  else if (scaling.fixed_scale > 0)
    round_row<true, false>(x, inner, scale, scaling, q);
  else
    round_row<false, false>(x, inner, scale, scaling, q);
  std::memset(q + inner, scaling.zero, padded - inner);
  return scale;
}

// As `Step`, of 16 columns.
struct Steps {
  __m512i m, shift;

  INLINE explicit Steps(const uint8_t* codes) {
    const __m512i code = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(codes)));
    m = _mm512_add_epi32(_mm512_and_si512(code, _mm512_set1_epi32(7)), _mm512_set1_epi32(1));
    shift = _mm512_srli_epi32(_mm512_mullo_epi16(m, _mm512_srli_epi32(code, 3)), 1);
  }
};

// Steps for weights that are made in bytes. m: in each word. shift: in each byte.
struct ByteSteps {
  __m512i m, shift;

  INLINE explicit ByteSteps(const uint8_t* codes) {
    const Steps steps(codes);
    m = _mm512_or_si512(steps.m, _mm512_slli_epi32(steps.m, 16));
    const __m512i word = _mm512_or_si512(steps.shift, _mm512_slli_epi32(steps.shift, 16));
    shift = _mm512_or_si512(word, _mm512_slli_epi16(word, 8));
  }
};

// The int8 weights of a pair of groups. Products of 4 bits and a multiplier fit a byte, so that one multiplication of words
// makes two.
struct Pair {
  __m512i first, second;

  INLINE Pair(const uint8_t* weights, __m512i m, __m512i shift) {
    const __m512i low = _mm512_set1_epi8(15), both = _mm512_load_si512(weights);
    first = _mm512_and_si512(both, low);
    second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    first = _mm512_sub_epi8(_mm512_mullo_epi16(first, m), shift);
    second = _mm512_sub_epi8(_mm512_mullo_epi16(second, m), shift);
  }
};

// As `expand_panel`.
[[maybe_unused]] inline void expand_panel_avx512(const Matrix& matrix, size_t p, uint8_t* out) {
  const uint8_t *data = matrix.panel(p), *codes = matrix.codes_of(p);
  for (size_t b = 0; b < matrix.blocks(); b++, codes += PANEL) {
    const ByteSteps steps(codes);
    for (size_t row = 0; row < matrix.block; row += 2 * GROUP, data += GROUP_BYTES, out += 2 * GROUP_BYTES) {
      const Pair w(data, steps.m, steps.shift);
      _mm512_store_si512(out, w.first);
      _mm512_store_si512(out + GROUP_BYTES, w.second);
    }
  }
}

// Scales integer sums (rows, panels, 16) back and stores them. Sums come through memory: a function that holds them in
// registers until here makes the compiler spill them in its inner loop.
[[maybe_unused, gnu::noinline]] void store_sums(const Tile& tile, size_t row, size_t rows, size_t p, size_t panels,
                                                const int32_t* sums) {
  const Matrix& matrix = *tile.matrix;
  for (size_t j = 0; j < panels; j++) {
    const size_t first = (p + j) * PANEL, left = matrix.columns - first;
    const __m512 scale = _mm512_load_ps(matrix.scale.get() + first);
    const bool has_bias = matrix.bias.get() != nullptr;
    const __m512 bias = has_bias ? _mm512_load_ps(matrix.bias.get() + first) : scale;
    const __m512i shift =
        _mm512_mullo_epi32(_mm512_load_si512(matrix.column_sum.get() + first), _mm512_set1_epi32(tile.zero));
    const __mmask16 columns = static_cast<__mmask16>(left >= PANEL ? 0xffff : (1u << left) - 1);
    for (size_t r = 0; r < rows; r++) {
      const __m512 row_scale = _mm512_set1_ps(tile.row_scale[row + r]);
      __m512 number = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_load_si512(sums + (r * panels + j) * PANEL), shift));
      number = _mm512_mul_ps(number, tile.column_first ? scale : row_scale);
      number = _mm512_mul_ps(number, tile.column_first ? row_scale : scale);
      if (has_bias) number = _mm512_add_ps(number, bias);
      _mm512_mask_storeu_ps(tile.out + (row + r) * matrix.columns + first, columns, number);
    }
  }
}

}  // namespace
}  // namespace tformer

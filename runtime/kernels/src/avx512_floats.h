// Products of float32 with AVX-512, and vectors for attention. Each number of a result is one chain of fused multiply-additions, as in scalar.cpp: a
// tile has at least as many chains as the processor has in flight.
#pragma once

#include <immintrin.h>

#include "blocks.h"

namespace tformer {
namespace {

constexpr size_t FLOAT_COLUMNS = 32;     // of a group: two vectors
constexpr int FLOAT_ROWS = 12;           // 24 registers of sums; rows of 4096 bytes are in different ways of a cache
constexpr size_t FLOAT_STEP = 4;         // rows of weights between prefetches
constexpr size_t FLOAT_PREFETCH = 8192;  // bytes ahead, if weights are read once

// What a tile of registers prefetches: `lines` cache lines from `next` on for each FLOAT_STEP rows of weights.
struct FloatPrefetch {
  const char* next;
  size_t lines;

  INLINE void step() {
    for (size_t i = 0; i < lines; i++, next += ALIGNMENT) _mm_prefetch(next, _MM_HINT_T0);
  }
};

// Few rows read all weights once, and prefetch what is a little ahead. The blocks of more rows read the same weights one
// after the other: each prefetches its share of the next group.
inline FloatPrefetch prefetch_of(const FloatTile& tile, size_t row, size_t rows, const float* weights) {
  const size_t all = tile.row_end - tile.row_begin, step_bytes = FLOAT_STEP * FLOAT_COLUMNS * sizeof(float);
  const char* begin = reinterpret_cast<const char*>(weights);
  if (rows == all) return {begin + FLOAT_PREFETCH, step_bytes / ALIGNMENT};
  const size_t group = tile.matrix->inner * FLOAT_COLUMNS * sizeof(float);
  const size_t share = group * (row - tile.row_begin) / all / ALIGNMENT * ALIGNMENT;
  return {begin + group + share, (step_bytes / ALIGNMENT * rows + all - 1) / all};
}

template <int ROWS, int>
struct FloatKernel {
  static void run(const FloatTile& tile, size_t row, size_t p, const float* weights) {
    const Matrix& matrix = *tile.matrix;
    const size_t inner = matrix.inner;
    const float* x = tile.rows + row * inner;
    const size_t first = p * PANEL;
    float* out = tile.out + row * matrix.columns + first;
    FloatPrefetch prefetch = prefetch_of(tile, row, ROWS, weights);
    __m512 sums[ROWS][2];
    unroll<ROWS>(UNROLLED(r) {
      sums[r][0] = sums[r][1] = _mm512_setzero_ps();
      _mm_prefetch(out + r * matrix.columns, _MM_HINT_T0);  // so that stores of sums need not wait for memory
      _mm_prefetch(out + r * matrix.columns + PANEL, _MM_HINT_T0);
    });
    auto add = [&](size_t k) __attribute__((always_inline)) {
      const float* row_weights = weights + k * FLOAT_COLUMNS;
      const __m512 w = _mm512_load_ps(row_weights), v = _mm512_load_ps(row_weights + PANEL);
      unroll<ROWS>(UNROLLED(r) {
        const __m512 a = _mm512_set1_ps(x[r * inner + k]);
        sums[r][0] = _mm512_fmadd_ps(a, w, sums[r][0]);
        sums[r][1] = _mm512_fmadd_ps(a, v, sums[r][1]);
      });
    };
    size_t left = inner;
    for (; left >= FLOAT_STEP; left -= FLOAT_STEP, x += FLOAT_STEP, weights += FLOAT_STEP * FLOAT_COLUMNS) {
      prefetch.step();
      unroll<FLOAT_STEP>(UNROLLED(k) { add(k); });
    }
    for (; left > 0; left--, x++, weights += FLOAT_COLUMNS) add(0);
    const uint32_t columns = matrix.columns - first >= FLOAT_COLUMNS ? ~0u : (1u << (matrix.columns - first)) - 1;
    const __mmask16 masks[2] = {static_cast<__mmask16>(columns), static_cast<__mmask16>(columns >> PANEL)};
    if (matrix.bias.get() != nullptr) {
      const __m512 b = _mm512_load_ps(matrix.bias.get() + first), d = _mm512_load_ps(matrix.bias.get() + first + PANEL);
      unroll<ROWS>(UNROLLED(r) {
        sums[r][0] = _mm512_add_ps(sums[r][0], b);
        sums[r][1] = _mm512_add_ps(sums[r][1], d);
      });
    }
    unroll<ROWS>(UNROLLED(r) {
      _mm512_mask_storeu_ps(out + r * matrix.columns, masks[0], sums[r][0]);
      _mm512_mask_storeu_ps(out + r * matrix.columns + PANEL, masks[1], sums[r][1]);
    });
  }
};

inline void multiply_float_avx512(const FloatTile& tile) {
  constexpr size_t panels = FLOAT_COLUMNS / PANEL;
  for (size_t p = tile.panel_begin; p < tile.panel_end; p += panels)
    for_rows<FloatKernel, panels, FLOAT_ROWS>(tile, p, tile.matrix->floats(p));
}

struct Vector512 {
  using Type = __m512;
  static constexpr int WIDTH = 16;
  static INLINE Type load(const float* from) { return _mm512_loadu_ps(from); }
  static INLINE void store(float* into, Type value) { _mm512_storeu_ps(into, value); }
  static INLINE Type repeat(float x) { return _mm512_set1_ps(x); }
  static INLINE Type add_product(Type sum, Type a, Type b) { return _mm512_fmadd_ps(a, b, sum); }
  static INLINE Type add(Type a, Type b) { return _mm512_add_ps(a, b); }
  static INLINE Type subtract(Type a, Type b) { return _mm512_sub_ps(a, b); }
  static INLINE Type multiply(Type a, Type b) { return _mm512_mul_ps(a, b); }
  static INLINE Type divide(Type a, Type b) { return _mm512_div_ps(a, b); }
  static INLINE Type larger(Type a, Type b) { return _mm512_max_ps(a, b); }
  static INLINE Type smaller(Type a, Type b) { return _mm512_min_ps(a, b); }
  static INLINE Type round(Type x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static INLINE Type power_of_two(Type n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
  }
  static INLINE Type zero_where_below(Type x, Type limit, Type value) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), value);
  }
};

}  // namespace
}  // namespace tformer

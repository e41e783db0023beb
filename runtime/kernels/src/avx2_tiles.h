// Rows and tiles with 256-bit vectors, for AVX2 and AVX-VNNI. They differ in how products are added (`Dot`).
#pragma once

#include <immintrin.h>

#include "blocks.h"
#include "reference.h"

namespace tformer {
namespace {

constexpr size_t PREFETCH_BYTES = 1024;

inline __m256i load(const uint8_t* pointer) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(pointer)); }

inline __m256i broadcast(const uint8_t* q) {
  int32_t four;
  std::memcpy(&four, q, 4);
  return _mm256_set1_epi32(four);
}

template <bool CLIPS_FIRST, bool RECIPROCAL>
inline size_t round_row(const float* x, size_t inner, float scale, const RowScaling& scaling, uint8_t* q) {
  const __m256 divisor = _mm256_set1_ps(RECIPROCAL ? 1.0f / scale : scale);
  const __m256 lowest = _mm256_set1_ps(static_cast<float>(-scaling.zero));
  const __m256 highest = _mm256_set1_ps(static_cast<float>(255 - scaling.zero));
  const __m256i zero = _mm256_set1_epi16(static_cast<int16_t>(scaling.zero));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  size_t i = 0;
  for (; i + 32 <= inner; i += 32) {
    __m256i number[4];
    unroll<4>(UNROLLED(u) {
      const __m256 value = _mm256_loadu_ps(x + i + 8 * u);
      __m256 ratio = RECIPROCAL ? _mm256_mul_ps(value, divisor) : _mm256_div_ps(value, divisor);
      if (CLIPS_FIRST) ratio = _mm256_min_ps(_mm256_max_ps(ratio, lowest), highest);
      number[u] = _mm256_cvtps_epi32(ratio);
    });
    const __m256i a = _mm256_adds_epi16(_mm256_packs_epi32(number[0], number[1]), zero);
    const __m256i b = _mm256_adds_epi16(_mm256_packs_epi32(number[2], number[3]), zero);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + i),
                        _mm256_permutevar8x32_epi32(_mm256_packus_epi16(a, b), order));
  }
  return i;
}

inline float quantise_avx2(const float* x, size_t inner, size_t padded, const RowScaling& scaling, uint8_t* q) {
  float maximum = lowest_maximum(scaling);
  if (!(scaling.fixed_scale > 0)) {
    const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(scaling.magnitude ? 0x7fffffff : -1));
    __m256 best[4];
    unroll<4>(UNROLLED(u) { best[u] = _mm256_set1_ps(maximum); });
    size_t i = 0;
    for (; i + 32 <= inner; i += 32)
      unroll<4>(UNROLLED(u) { best[u] = _mm256_max_ps(best[u], _mm256_and_ps(_mm256_loadu_ps(x + i + 8 * u), mask)); });
    float each[8];
    _mm256_storeu_ps(each, _mm256_max_ps(_mm256_max_ps(best[0], best[1]), _mm256_max_ps(best[2], best[3])));
    for (float value : each) maximum = value > maximum ? value : maximum;
    for (; i < inner; i++) maximum = larger(maximum, x[i], scaling.magnitude);
  }
  const float scale = row_scale_of(maximum, scaling), inverse = 1.0f / scale;
  size_t done = 0;
  if (scaling.reciprocal)
    done = round_row<true, true>(x, inner, scale, scaling, q);
  else if (scaling.fixed_scale > 0)
    done = round_row<true, false>(x, inner, scale, scaling, q);
  else
    done = round_row<false, false>(x, inner, scale, scaling, q);
  for (; done < inner; done++) q[done] = quantise_number(x[done], scale, inverse, scaling);
  std::memset(q + inner, scaling.zero, padded - inner);
  return scale;
}

// Scales integer sums (rows, 16) back and stores them. Sums come through memory: a function that holds them in registers
// until here makes the compiler spill them in its inner loop.
[[maybe_unused, gnu::noinline]] void store_sums(const Tile& tile, size_t row, size_t rows, size_t p,
                                                const int32_t* sums) {
  const Matrix& matrix = *tile.matrix;
  auto integers = [](const int32_t* pointer) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(pointer)); };
  for (size_t first = p * PANEL; first < (p + 1) * PANEL && first < matrix.columns; first += 8, sums += 8) {
    const int left = matrix.columns > first + 8 ? 8 : static_cast<int>(matrix.columns - first);
    const __m256 scale = _mm256_load_ps(matrix.scale.get() + first);
    const bool has_bias = matrix.bias.get() != nullptr;
    const __m256 bias = has_bias ? _mm256_load_ps(matrix.bias.get() + first) : scale;
    const __m256i shift =
        _mm256_mullo_epi32(integers(matrix.column_sum.get() + first), _mm256_set1_epi32(tile.zero));
    const __m256i columns = _mm256_cmpgt_epi32(_mm256_set1_epi32(left), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    for (size_t r = 0; r < rows; r++) {
      const __m256 row_scale = _mm256_set1_ps(tile.row_scale[row + r]);
      __m256 number = _mm256_cvtepi32_ps(_mm256_sub_epi32(integers(sums + r * PANEL), shift));
      number = _mm256_mul_ps(number, tile.column_first ? scale : row_scale);
      number = _mm256_mul_ps(number, tile.column_first ? row_scale : scale);
      if (has_bias) number = _mm256_add_ps(number, bias);
      _mm256_maskstore_ps(tile.out + (row + r) * matrix.columns + first, columns, number);
    }
  }
}

template <int ROWS>
INLINE void store_tile(const Tile& tile, size_t row, size_t p, const __m256i (&sums)[ROWS][2]) {
  alignas(ALIGNMENT) int32_t buffer[ROWS * PANEL];
  unroll<ROWS>(UNROLLED(r) {
    unroll<2>(UNROLLED(half) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(buffer + r * PANEL + half * 8), sums[r][half]);
    });
  });
  store_sums(tile, row, ROWS, p, buffer);
}

// As `Step`, of 8 columns.
struct Steps {
  __m256i m, shift;

  INLINE explicit Steps(const uint8_t* codes) {
    const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    m = _mm256_add_epi32(_mm256_and_si256(code, _mm256_set1_epi32(7)), _mm256_set1_epi32(1));
    shift = _mm256_srli_epi32(_mm256_mullo_epi16(m, _mm256_srli_epi32(code, 3)), 1);
  }
};

// Numbers of 16 bits, twice in each 32.
INLINE __m256i twice(__m256i numbers) { return _mm256_or_si256(numbers, _mm256_slli_epi32(numbers, 16)); }

// As `expand_panel`. Products of 4 bits and a multiplier fit a byte, so that one multiplication of words makes two.
[[maybe_unused]] inline void expand_panel_avx2(const Matrix& matrix, size_t p, uint8_t* out) {
  const uint8_t *data = matrix.panel(p), *codes = matrix.codes_of(p);
  const __m256i low = _mm256_set1_epi8(15);
  for (size_t b = 0; b < matrix.blocks(); b++, codes += PANEL) {
    __m256i m[2], shift[2];
    for (int half = 0; half < 2; half++) {
      const Steps steps(codes + 8 * half);
      m[half] = twice(steps.m);
      shift[half] = twice(steps.shift);
      shift[half] = _mm256_or_si256(shift[half], _mm256_slli_epi16(shift[half], 8));  // in each byte
    }
    for (size_t row = 0; row < matrix.block; row += 2 * GROUP, data += GROUP_BYTES, out += 2 * GROUP_BYTES)
      for (int half = 0; half < 2; half++) {
        auto store = [&](uint8_t* to, __m256i numbers) {
          _mm256_store_si256(reinterpret_cast<__m256i*>(to),
                             _mm256_sub_epi8(_mm256_mullo_epi16(numbers, m[half]), shift[half]));
        };
        const __m256i both = load(data + 32 * half);
        store(out + 32 * half, _mm256_and_si256(both, low));
        store(out + GROUP_BYTES + 32 * half, _mm256_and_si256(_mm256_srli_epi16(both, 4), low));
      }
  }
}

INLINE void prefetch(const uint8_t* weights) {
  _mm_prefetch(reinterpret_cast<const char*>(weights), _MM_HINT_T0);
}

template <int ROWS>
INLINE void clear(__m256i (&sums)[ROWS][2]) {
  unroll<ROWS>(UNROLLED(r) { sums[r][0] = sums[r][1] = _mm256_setzero_si256(); });
}

// Adds 32-bit sums.
template <int ROWS>
INLINE void add(__m256i (&sums)[ROWS][2], const __m256i (&others)[ROWS][2]) {
  unroll<ROWS>(UNROLLED(r) {
    unroll<2>(UNROLLED(half) { sums[r][half] = _mm256_add_epi32(sums[r][half], others[r][half]); });
  });
}

template <class Dot>
struct Kernels {
  // Sums of few rows are added in two ways, so that they wait for each other half as often.
  template <int ROWS>
  static constexpr int WAYS = ROWS <= 2 ? 2 : 1;

  template <int ROWS, int PANELS>
  struct Kernel8 {
    static_assert(PANELS == 1);
    static void run(const Tile& tile, size_t row, size_t p, const uint8_t* weights) {
      const size_t inner = tile.matrix->padded_inner;
      const uint8_t* q = tile.rows + row * inner;
      __m256i sums[WAYS<ROWS>][ROWS][2];
      unroll<WAYS<ROWS>>(UNROLLED(u) { clear<ROWS>(sums[u]); });
      for (size_t k = 0; k < inner; k += WAYS<ROWS> * GROUP, weights += WAYS<ROWS> * GROUP_BYTES)
        unroll<WAYS<ROWS>>(UNROLLED(u) {
          const __m256i w = load(weights + u * GROUP_BYTES), v = load(weights + u * GROUP_BYTES + 32);
          prefetch(weights + u * GROUP_BYTES + PREFETCH_BYTES);
          unroll<ROWS>(UNROLLED(r) {
            const __m256i a = broadcast(q + r * inner + k + u * GROUP);
            sums[u][r][0] = Dot::add(sums[u][r][0], a, w);
            sums[u][r][1] = Dot::add(sums[u][r][1], a, v);
          });
        });
      if (WAYS<ROWS> == 2) add<ROWS>(sums[0], sums[WAYS<ROWS> - 1]);
      store_tile<ROWS>(tile, row, p, sums[0]);
    }
  };

  template <int ROWS, int PANELS>
  struct Kernel4 {
    static_assert(PANELS == 1);
    static void run(const Tile& tile, size_t row, size_t p, const uint8_t* weights) {
      const Matrix& matrix = *tile.matrix;
      const size_t inner = matrix.padded_inner;
      const size_t part_rows = matrix.block < Dot::PART_ROWS ? matrix.block : Dot::PART_ROWS;
      const uint8_t *codes = matrix.codes_of(p), *q = tile.rows + row * inner;
      const int16_t* block_sums = tile.block_sums + row * matrix.blocks();
      const __m256i low = _mm256_set1_epi8(15);
      __m256i sums[ROWS][2];
      clear<ROWS>(sums);
      for (size_t b = 0; b < inner; b += matrix.block, codes += PANEL, block_sums++) {
        for (size_t begin = b; begin < b + matrix.block; begin += part_rows) {
          __m256i part[WAYS<ROWS>][ROWS][2];
          unroll<WAYS<ROWS>>(UNROLLED(u) { clear<ROWS>(part[u]); });
          for (size_t k = begin; k < begin + part_rows; k += 2 * GROUP, weights += GROUP_BYTES) {
            prefetch(weights + PREFETCH_BYTES);
            unroll<2>(UNROLLED(half) {
              constexpr int last = WAYS<ROWS> - 1;
              const __m256i both = load(weights + 32 * half);
              const __m256i w = _mm256_and_si256(both, low), v = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
              unroll<ROWS>(UNROLLED(r) {
                const uint8_t* a = q + r * inner + k;
                part[0][r][half] = Dot::add_part(part[0][r][half], broadcast(a), w);
                part[last][r][half] = Dot::add_part(part[last][r][half], broadcast(a + GROUP), v);
              });
            });
          }
          if (WAYS<ROWS> == 2) Dot::template add_parts<ROWS>(part[0], part[WAYS<ROWS> - 1]);
          unroll<2>(UNROLLED(half) {
            const __m256i m = Dot::factors(Steps(codes + 8 * half).m);
            unroll<ROWS>(UNROLLED(r) {
              sums[r][half] = _mm256_add_epi32(sums[r][half], Dot::times(part[0][r][half], m));
            });
          });
        }
        unroll<2>(UNROLLED(half) {
          const __m256i shift = Steps(codes + 8 * half).shift;
          unroll<ROWS>(UNROLLED(r) {
            const __m256i sum = _mm256_set1_epi32(block_sums[r * matrix.blocks()]);
            sums[r][half] = _mm256_sub_epi32(sums[r][half], _mm256_madd_epi16(shift, sum));
          });
        });
      }
      store_tile<ROWS>(tile, row, p, sums);
    }
  };

  static void multiply8(const Tile& tile) {
    for (size_t p = tile.panel_begin; p < tile.panel_end; p++)
      for_rows<Kernel8, 1, Dot::ROWS_8>(tile, p, tile.matrix->panel(p));
  }

  static void multiply4(const Tile& tile) {
    const Matrix& matrix = *tile.matrix;
    const bool expands = tile.row_end - tile.row_begin >= Dot::ROWS_TO_EXPAND;
    uint8_t* expanded = expands ? expanded_panels(matrix.padded_inner * PANEL) : nullptr;
    for (size_t p = tile.panel_begin; p < tile.panel_end; p++)
      if (expands) {
        expand_panel_avx2(matrix, p, expanded);
        for_rows<Kernel8, 1, Dot::ROWS_8>(tile, p, expanded);
      } else {
        for_rows<Kernel4, 1, Dot::ROWS_4>(tile, p, matrix.panel(p));
      }
  }
};

}  // namespace
}  // namespace tformer

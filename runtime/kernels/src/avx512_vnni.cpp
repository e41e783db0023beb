// AVX-512 VNNI: VPDPBUSD adds 4 products to each of 16 sums.
#include <immintrin.h>

#include "attention_rows.h"
#include "avx512_floats.h"
#include "avx512_rows.h"
#include "blocks.h"
#include "elementwise_rows.h"
#include "paths.h"

namespace tformer {
namespace {

constexpr size_t STREAM_ROWS_8 = 8;  // as STREAM_ROWS_4, with 8 bits
constexpr size_t DIRECT_ROWS = 10;  // for so few rows 4 bits are unpacked in registers
constexpr size_t STREAM_PREFETCH = 8192;  // bytes
constexpr size_t NEAR_BYTES = 32768;      // panels of so many bytes stay in the nearest cache with those before them

INLINE __m512i broadcast(const uint8_t* q) {
  int32_t four;
  std::memcpy(&four, q, 4);
  return _mm512_set1_epi32(four);
}

INLINE void prefetch(const uint8_t* weights) {
  _mm_prefetch(reinterpret_cast<const char*>(weights), _MM_HINT_T0);
}

// The instruction as such: with the intrinsic, gcc copies sums between registers, at twice the time.
INLINE void add_products(__m512i& sums, __m512i a, __m512i w) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(w));
}

template <int ROWS, int PANELS>
INLINE void store_tile(const Tile& tile, size_t row, size_t p, const __m512i (&sums)[ROWS][PANELS]) {
  alignas(ALIGNMENT) int32_t buffer[ROWS * PANELS * PANEL];
  unroll<ROWS>(UNROLLED(r) {
    unroll<PANELS>(UNROLLED(j) { _mm512_store_si512(buffer + (r * PANELS + j) * PANEL, sums[r][j]); });
  });
  store_sums(tile, row, ROWS, p, PANELS, buffer);
}

// Few rows: one panel after the other, with WAYS sums of a row, which do not wait for each other.
template <int ROWS, int PANELS>
struct Stream8 {
  static_assert(PANELS == 1);
  static constexpr int WAYS = ROWS <= 4 ? 4 : 2;
  static void run(const Tile& tile, size_t row, size_t p, const uint8_t* weights) {
    const size_t inner = tile.matrix->padded_inner;
    const uint8_t* q = tile.rows + row * inner;
    __m512i sums[ROWS][WAYS], total[ROWS][1];
    unroll<ROWS>(UNROLLED(r) { unroll<WAYS>(UNROLLED(j) { sums[r][j] = _mm512_setzero_si512(); }); });
    size_t k = 0;
    for (; k + WAYS * GROUP <= inner; k += WAYS * GROUP, weights += WAYS * GROUP_BYTES)
      unroll<WAYS>(UNROLLED(j) {
        const __m512i w = _mm512_load_si512(weights + j * GROUP_BYTES);
        prefetch(weights + j * GROUP_BYTES + STREAM_PREFETCH);
        unroll<ROWS>(UNROLLED(r) { add_products(sums[r][j], broadcast(q + r * inner + k + j * GROUP), w); });
      });
    for (; k < inner; k += GROUP, weights += GROUP_BYTES) {
      const __m512i w = _mm512_load_si512(weights);
      unroll<ROWS>(UNROLLED(r) { add_products(sums[r][0], broadcast(q + r * inner + k), w); });
    }
    unroll<ROWS>(UNROLLED(r) {
      total[r][0] = sums[r][0];
      unroll<WAYS - 1>(UNROLLED(j) { total[r][0] = _mm512_add_epi32(total[r][0], sums[r][j + 1]); });
    });
    store_tile<ROWS, 1>(tile, row, p, total);
  }
};

template <int ROWS, int PANELS>
struct Kernel8 {
  static void run(const Tile& tile, size_t row, size_t p, const uint8_t* weights) {
    const size_t inner = tile.matrix->padded_inner, panel = inner * PANEL;
    const size_t ahead = PANELS * panel <= NEAR_BYTES ? PANELS * panel : STREAM_PREFETCH;
    const uint8_t* next = tile.next ? tile.next : weights + ahead;
    const size_t next_panel = tile.next ? 0 : panel;
    const uint8_t* q = tile.rows + row * inner;
    __m512i sums[ROWS][PANELS];
    unroll<ROWS>(UNROLLED(r) { unroll<PANELS>(UNROLLED(j) { sums[r][j] = _mm512_setzero_si512(); }); });
    for (size_t k = 0; k < inner; k += GROUP, weights += GROUP_BYTES, next += GROUP_BYTES) {
      __m512i w[PANELS];
      unroll<PANELS>(UNROLLED(j) {
        w[j] = _mm512_load_si512(weights + j * panel);
        prefetch(next + j * next_panel);
      });
      unroll<ROWS>(UNROLLED(r) {
        const __m512i a = broadcast(q + r * inner + k);
        unroll<PANELS>(UNROLLED(j) { add_products(sums[r][j], a, w[j]); });
      });
    }
    store_tile<ROWS, PANELS>(tile, row, p, sums);
  }
};

void multiply8(const Tile& tile) {
  const Matrix& matrix = *tile.matrix;
  const size_t rows = tile.row_end - tile.row_begin;
  size_t p = tile.panel_begin;
  if (rows <= STREAM_ROWS_8)
    for (; p < tile.panel_end; p++) for_rows<Stream8, 1, STREAM_ROWS_8>(tile, p, matrix.panel(p));
  for (; p + 2 <= tile.panel_end; p += 2) for_rows<Kernel8, 2, 12>(tile, p, matrix.panel(p));
  for (; p < tile.panel_end; p++) for_rows<Kernel8, 1, 12>(tile, p, matrix.panel(p));
}

// As VPDPBUSD, of two products of 16 bits.
INLINE void add_word_products(__m512i& sums, __m512i a, __m512i b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
}

// Few rows: weights are used as they are. Sums of a block are exact in 32 bits; then its steps are applied.
template <int ROWS, int PANELS>
struct Stream4 {
  static_assert(PANELS == 1);
  static void run(const Tile& tile, size_t row, size_t p, const uint8_t* weights) {
    const Matrix& matrix = *tile.matrix;
    const size_t inner = matrix.padded_inner, blocks = matrix.blocks();
    const uint8_t *codes = matrix.codes_of(p), *q = tile.rows + row * inner;
    const int16_t* block_sums = tile.block_sums + row * blocks;
    const __m512i low = _mm512_set1_epi8(15);
    __m512i total[ROWS][1], shifts[ROWS];
    unroll<ROWS>(UNROLLED(r) { total[r][0] = shifts[r] = _mm512_setzero_si512(); });
    for (size_t b = 0; b < blocks; b++, codes += PANEL) {
      __m512i sums[ROWS][2];
      unroll<ROWS>(UNROLLED(r) { sums[r][0] = sums[r][1] = _mm512_setzero_si512(); });
      for (size_t k = b * matrix.block; k < (b + 1) * matrix.block; k += 4 * GROUP, weights += 2 * GROUP_BYTES)
        unroll<2>(UNROLLED(j) {
          const __m512i both = _mm512_load_si512(weights + j * GROUP_BYTES);
          prefetch(weights + j * GROUP_BYTES + STREAM_PREFETCH);
          const __m512i first = _mm512_and_si512(both, low);
          const __m512i second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
          unroll<ROWS>(UNROLLED(r) {
            const uint8_t* a = q + r * inner + k + j * 2 * GROUP;
            add_products(sums[r][0], broadcast(a), first);
            add_products(sums[r][1], broadcast(a + GROUP), second);
          });
        });
      const Steps steps(codes);
      unroll<ROWS>(UNROLLED(r) {
        const __m512i sum = _mm512_add_epi32(sums[r][0], sums[r][1]);
        total[r][0] = _mm512_add_epi32(total[r][0], _mm512_mullo_epi32(sum, steps.m));
        add_word_products(shifts[r], _mm512_set1_epi32(block_sums[r * blocks + b]), steps.shift);
      });
    }
    unroll<ROWS>(UNROLLED(r) { total[r][0] = _mm512_sub_epi32(total[r][0], shifts[r]); });
    store_tile<ROWS, 1>(tile, row, p, total);
  }
};

// More rows: their int8 form is made in registers.
template <int ROWS, int PANELS>
struct Direct4 {
  static void run(const Tile& tile, size_t row, size_t p, const uint8_t* weights) {
    const Matrix& matrix = *tile.matrix;
    const size_t inner = matrix.padded_inner, panel = matrix.panel_bytes(), code_bytes = matrix.blocks() * PANEL;
    const uint8_t *codes = matrix.codes_of(p), *q = tile.rows + row * inner;
    __m512i sums[ROWS][PANELS];
    unroll<ROWS>(UNROLLED(r) { unroll<PANELS>(UNROLLED(j) { sums[r][j] = _mm512_setzero_si512(); }); });
    for (size_t b = 0; b < inner; b += matrix.block, codes += PANEL) {
      __m512i m[PANELS], shift[PANELS];
      unroll<PANELS>(UNROLLED(j) {
        const ByteSteps steps(codes + j * code_bytes);
        m[j] = steps.m, shift[j] = steps.shift;
      });
      for (size_t k = b; k < b + matrix.block; k += 2 * GROUP, weights += GROUP_BYTES) {
        __m512i w[PANELS], v[PANELS];
        unroll<PANELS>(UNROLLED(j) {
          const Pair pair(weights + j * panel, m[j], shift[j]);
          w[j] = pair.first, v[j] = pair.second;
          prefetch(weights + j * panel + (PANELS == 1 ? STREAM_PREFETCH : PANELS * panel));
        });
        unroll<ROWS>(UNROLLED(r) {
          const __m512i a = broadcast(q + r * inner + k);
          unroll<PANELS>(UNROLLED(j) { add_products(sums[r][j], a, w[j]); });
        });
        unroll<ROWS>(UNROLLED(r) {
          const __m512i a = broadcast(q + r * inner + k + GROUP);
          unroll<PANELS>(UNROLLED(j) { add_products(sums[r][j], a, v[j]); });
        });
      }
    }
    store_tile<ROWS, PANELS>(tile, row, p, sums);
  }
};

// Many rows: the int8 form of two panels is made first.
void multiply4(const Tile& tile) {
  const Matrix& matrix = *tile.matrix;
  size_t p = tile.panel_begin;
  if (tile.row_end - tile.row_begin <= STREAM_ROWS_4) {
    for (; p < tile.panel_end; p++) for_rows<Stream4, 1, STREAM_ROWS_4>(tile, p, matrix.panel(p));
    return;
  }
  if (tile.row_end - tile.row_begin <= DIRECT_ROWS) {
    for (; p + 2 <= tile.panel_end; p += 2) for_rows<Direct4, 2, DIRECT_ROWS>(tile, p, matrix.panel(p));
    for (; p < tile.panel_end; p++) for_rows<Direct4, 1, DIRECT_ROWS>(tile, p, matrix.panel(p));
    return;
  }
  const size_t bytes = matrix.padded_inner * PANEL;
  uint8_t* weights = expanded_panels(2 * bytes);
  Tile expanded = tile;
  for (; p + 2 <= tile.panel_end; p += 2) {
    expand_panel_avx512(matrix, p, weights);
    expand_panel_avx512(matrix, p + 1, weights + bytes);
    expanded.next = matrix.panel(p + 2);
    for_rows<Kernel8, 2, 12>(expanded, p, weights);
  }
  if (p < tile.panel_end) {
    expand_panel_avx512(matrix, p, weights);
    for_rows<Kernel8, 1, 12>(tile, p, weights);
  }
}

bool supported() {
  return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

}  // namespace

// Heads whose size 16 does not divide have the vectors of AVX2.
void attend_avx512(const AttentionTile& tile) {
  if (tile.size % Vector512::WIDTH == 0)
    Attention<Vector512, FLOAT_ROWS>::run(tile);
  else
    attend_avx2(tile);
}

constinit const Elementwise ELEMENTWISE_AVX512 = ElementwiseRows<Vector512>::FUNCTIONS;

constinit const Path AVX512_VNNI = {"avx512vnni", supported, GROUP, STREAM_ROWS_4, false, quantise_avx512, multiply8,
                                    multiply4, FLOAT_COLUMNS, multiply_float_avx512, attend_avx512, rotate_avx2,
                                    &ELEMENTWISE_AVX512};

}  // namespace tformer

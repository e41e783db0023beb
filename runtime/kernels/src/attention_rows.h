// Attention of some rows, with the vectors of a path. All paths give the same bits: a score is one chain of fused
// multiply-additions over the numbers of a head, a result is one chain over the positions, and the sum of a row's weights
// has SCORE_LANES parts in any path. Positions that a row does not attend to have weight zero, which changes no sum of finite
// values.
//
// Vector has the type Type of WIDTH numbers and the functions below.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention.h"
#include "blocks.h"
#include "exponential.h"

namespace tformer {
namespace {

constexpr size_t VALUE_BLOCK = 512;  // positions whose values stay in the cache for all rows

constexpr float INFINITE = std::numeric_limits<float>::infinity();
// Upper limits of the scores before and after a row's end
constexpr float LIMITS[2 * SCORE_LANES] = {
    INFINITE,  INFINITE,  INFINITE,  INFINITE,  INFINITE,  INFINITE,  INFINITE,  INFINITE,  INFINITE,  INFINITE,  INFINITE,
    INFINITE,  INFINITE,  INFINITE,  INFINITE,  INFINITE,  -INFINITE, -INFINITE, -INFINITE, -INFINITE, -INFINITE, -INFINITE,
    -INFINITE, -INFINITE, -INFINITE, -INFINITE, -INFINITE, -INFINITE, -INFINITE, -INFINITE, -INFINITE, -INFINITE};

// Returns lanes of both vectors: in blocks of STEP lanes, the even blocks of a and of b, or the odd ones.
template <int WIDTH, int STEP, bool ODD, class Type>
INLINE Type take_blocks(Type a, Type b) {
  return [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    return Type(__builtin_shufflevector(a, b, ((I / STEP) % 2 == 0 ? I + (ODD ? STEP : 0) : WIDTH + I - (ODD ? 0 : STEP))...));
  }(std::make_integer_sequence<int, WIDTH>{});
}

template <int WIDTH, int STEP = 1, class Type>
INLINE void transpose(Type (&rows)[WIDTH]) {
  if constexpr (STEP < WIDTH) {
    unroll<WIDTH>(UNROLLED(i) {
      if constexpr ((i / STEP) % 2 == 0) {
        const Type a = rows[i], b = rows[i + STEP];
        rows[i] = take_blocks<WIDTH, STEP, false>(a, b);
        rows[i + STEP] = take_blocks<WIDTH, STEP, true>(a, b);
      }
    });
    transpose<WIDTH, 2 * STEP>(rows);
  }
}

// Rotates the numbers of a head by the angles of a position, and scales them: Su et al. 2021, "RoFormer", equation 34.
// Products and sums are not fused, so that all paths give the same bits.
inline void rotate_head(const AttentionCall& call, size_t position, const float* from, float* into, float scale) {
  const size_t half = call.rotated / 2;
  const float *cosines = call.cosines + position * half, *sines = call.sines + position * half;
  if (call.interleaved)
    for (size_t i = 0; i < half; i++) {
      const float a = from[2 * i], b = from[2 * i + 1];
      into[2 * i] = (a * cosines[i] - b * sines[i]) * scale;
      into[2 * i + 1] = (b * cosines[i] + a * sines[i]) * scale;
    }
  else
    for (size_t i = 0; i < half; i++) {
      const float a = from[i], b = from[i + half];
      into[i] = (a * cosines[i] - b * sines[i]) * scale;
      into[i + half] = (b * cosines[i] + a * sines[i]) * scale;
    }
  for (size_t i = call.rotated; i < call.size; i++) into[i] = from[i] * scale;
}

template <class Vector, int MAX_ROWS>
struct Attention {
  using Type = typename Vector::Type;
  static constexpr size_t WIDTH = Vector::WIDTH;
  static constexpr int STEP = 4;  // numbers of a row between checks of the end

  // out[r][c] = [out[r][c] +] Σ x[r][k] · w[k][c], for VECTORS · WIDTH columns.
  struct Product {
    const float* x;
    size_t x_stride;
    const float* w;
    size_t w_stride, count;
    float* out;
    size_t out_stride;
    bool adds;
  };

  template <int ROWS, int VECTORS>
  static void multiply(const Product& product) {
    auto [x, x_stride, w, w_stride, count, out, out_stride, adds] = product;
    Type sums[ROWS][VECTORS];
    if (adds)
      unroll<ROWS>(UNROLLED(r) {
        unroll<VECTORS>(UNROLLED(j) { sums[r][j] = Vector::load(out + r * out_stride + j * WIDTH); });
      });
    else
      unroll<ROWS>(UNROLLED(r) { unroll<VECTORS>(UNROLLED(j) { sums[r][j] = Vector::repeat(0.0f); }); });
    auto add_row = [&](size_t k) __attribute__((always_inline)) {
      Type columns[VECTORS];
      unroll<VECTORS>(UNROLLED(j) { columns[j] = Vector::load(w + k * w_stride + j * WIDTH); });
      unroll<ROWS>(UNROLLED(r) {
        const Type a = Vector::repeat(x[r * x_stride + k]);
        unroll<VECTORS>(UNROLLED(j) { sums[r][j] = Vector::add_product(sums[r][j], a, columns[j]); });
      });
    };
    size_t left = count;
    for (; left >= STEP; left -= STEP, x += STEP, w += STEP * w_stride) unroll<STEP>(UNROLLED(k) { add_row(k); });
    for (; left > 0; left--, x++, w += w_stride) add_row(0);
    unroll<ROWS>(UNROLLED(r) {
      unroll<VECTORS>(UNROLLED(j) { Vector::store(out + r * out_stride + j * WIDTH, sums[r][j]); });
    });
  }

  template <int LIMIT, int VECTORS>
  static void multiply_rows(size_t rows, const Product& product) {
    static constexpr auto functions = []<int... N>(std::integer_sequence<int, N...>) {
      return std::array<void (*)(const Product&), LIMIT>{&multiply<N + 1, VECTORS>...};
    }(std::make_integer_sequence<int, LIMIT>{});
    functions[rows - 1](product);
  }

  static void multiply_column(size_t rows, const Product& product) {
    for (size_t r = 0; r < rows; r++) {
      float sum = product.adds ? product.out[r * product.out_stride] : 0;
      for (size_t k = 0; k < product.count; k++)
        sum = std::fma(product.x[r * product.x_stride + k], product.w[k * product.w_stride], sum);
      product.out[r * product.out_stride] = sum;
    }
  }

  // Few rows have more columns at once, so that sums do not wait for each other.
  static void multiply_columns(size_t rows, size_t columns, Product product) {
    if (rows <= MAX_ROWS / 2)
      for (; columns >= 4 * WIDTH; columns -= 4 * WIDTH, product.w += 4 * WIDTH, product.out += 4 * WIDTH)
        multiply_rows<MAX_ROWS / 2, 4>(rows, product);
    for (; columns >= 2 * WIDTH; columns -= 2 * WIDTH, product.w += 2 * WIDTH, product.out += 2 * WIDTH)
      multiply_rows<MAX_ROWS, 2>(rows, product);
    for (; columns >= WIDTH; columns -= WIDTH, product.w += WIDTH, product.out += WIDTH)
      multiply_rows<MAX_ROWS, 1>(rows, product);
    for (; columns > 0; columns--, product.w++, product.out++) multiply_column(rows, product);
  }

  // Blocks of at most MAX_ROWS rows, and the positions that their rows attend to, rounded up to SCORE_LANES.
  template <class Body>
  static void for_row_blocks(const AttentionTile& tile, Body&& body) {
    const size_t blocks = (tile.row_count + MAX_ROWS - 1) / MAX_ROWS;
    for (size_t b = 0; b < blocks; b++) {
      const size_t row = tile.row_count * b / blocks, row_end = tile.row_count * (b + 1) / blocks;
      size_t end = 0;
      for (size_t r = row; r < row_end; r++) end = std::max(end, tile.rows[r].end);
      body(row, row_end - row, (end + SCORE_LANES - 1) / SCORE_LANES * SCORE_LANES);
    }
  }

  // The keys of a panel, so that a vector has one number of WIDTH keys. The last vector may repeat the last key.
  static void pack_panel(const AttentionTile& tile, size_t position, size_t end) {
    for (size_t key = 0; key < KEY_PANEL && position + key < end; key += WIDTH) {
      size_t d = 0;
      for (; d + WIDTH <= tile.size; d += WIDTH) {
        Type block[WIDTH];
        unroll<static_cast<int>(WIDTH)>(UNROLLED(i) {
          const float* from = tile.keys + std::min(position + key + i, end - 1) * tile.key_stride + d;
          __builtin_prefetch(from + KEY_PANEL * tile.key_stride);
          block[i] = Vector::load(from);
        });
        transpose<static_cast<int>(WIDTH)>(block);
        unroll<static_cast<int>(WIDTH)>(UNROLLED(i) { Vector::store(tile.panel + (d + i) * KEY_PANEL + key, block[i]); });
      }
      for (; d < tile.size; d++)
        for (size_t i = 0; i < WIDTH; i++)
          tile.panel[d * KEY_PANEL + key + i] = tile.keys[std::min(position + key + i, end - 1) * tile.key_stride + d];
    }
  }

  static void score(const AttentionTile& tile, size_t end) {
    for (size_t position = 0; position < end; position += KEY_PANEL) {
      pack_panel(tile, position, end);
      for_row_blocks(tile, [&](size_t row, size_t count, size_t last) {
        if (last <= position) return;
        multiply_columns(count, std::min(KEY_PANEL, last - position),
                         {tile.queries + row * tile.size, tile.size, tile.panel, KEY_PANEL, tile.size,
                          tile.scores + row * tile.score_stride + position, tile.score_stride, false});
      });
    }
  }

  static constexpr size_t LANE_VECTORS = SCORE_LANES / WIDTH;

  // Makes weights of a row's scores, and zeros up to `last`. Returns the sum of the weights.
  static float weigh(const AttentionTile& tile, size_t r, size_t last) {
    const AttentionRow& row = tile.rows[r];
    float* scores = tile.scores + r * tile.score_stride;
    const size_t end = (row.end + SCORE_LANES - 1) / SCORE_LANES * SCORE_LANES;
    if (row.bias != nullptr)
      for (size_t i = 0; i < row.end; i++) scores[i] += row.bias[i];
    for (size_t i = end - SCORE_LANES; i < end; i += WIDTH)
      Vector::store(scores + i, Vector::smaller(Vector::load(scores + i), Vector::load(LIMITS + SCORE_LANES + i - row.end)));
    for (size_t i = end; i < last; i += WIDTH) Vector::store(scores + i, Vector::repeat(0.0f));
    Type greatest = Vector::repeat(row.sink);
    for (size_t i = 0; i < end; i += WIDTH) greatest = Vector::larger(greatest, Vector::load(scores + i));
    alignas(ALIGNMENT) float lanes[SCORE_LANES];
    Vector::store(lanes, greatest);
    const Type maximum = Vector::repeat(*std::max_element(lanes, lanes + WIDTH));
    Type sums[LANE_VECTORS];
    unroll<static_cast<int>(LANE_VECTORS)>(UNROLLED(j) { sums[j] = Vector::repeat(0.0f); });
    for (size_t i = 0; i < end; i += SCORE_LANES)
      unroll<static_cast<int>(LANE_VECTORS)>(UNROLLED(j) {
        float* at = scores + i + j * WIDTH;
        const Type weight = exponential<Vector>(Vector::subtract(Vector::load(at), maximum));
        Vector::store(at, weight);
        sums[j] = Vector::add(sums[j], weight);
      });
    unroll<static_cast<int>(LANE_VECTORS)>(UNROLLED(j) { Vector::store(lanes + j * WIDTH, sums[j]); });
    for (size_t half = SCORE_LANES / 2; half > 0; half /= 2)
      for (size_t i = 0; i < half; i++) lanes[i] += lanes[i + half];
    if (row.sink == -INFINITE) return lanes[0];
    alignas(ALIGNMENT) float sink[WIDTH];
    Vector::store(sink, exponential<Vector>(Vector::subtract(Vector::repeat(row.sink), maximum)));
    return lanes[0] + sink[0];
  }

  static void run(const AttentionTile& tile) {
    size_t end = 0;
    for (size_t r = 0; r < tile.row_count; r++) end = std::max(end, tile.rows[r].end);
    score(tile, end);
    for_row_blocks(tile, [&](size_t row, size_t count, size_t last) {
      float totals[MAX_ROWS];
      for (size_t r = 0; r < count; r++) totals[r] = weigh(tile, row + r, last);
      last = std::min(last, end);  // no value is read beyond the end
      for (size_t position = 0; position < last; position += VALUE_BLOCK)
        multiply_columns(count, tile.size,
                         {tile.scores + row * tile.score_stride + position, tile.score_stride,
                          tile.values + position * tile.value_stride, tile.value_stride,
                          std::min(VALUE_BLOCK, last - position), tile.sums + row * tile.size, tile.size, position > 0});
      for (size_t r = 0; r < count; r++) {
        const float *sums = tile.sums + (row + r) * tile.size, factor = 1.0f / totals[r];
        for (size_t d = 0; d < tile.size; d++) tile.rows[row + r].out[d] = sums[d] * factor;
      }
    });
  }
};

}  // namespace
}  // namespace tformer

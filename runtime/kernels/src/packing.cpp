#include "packing.h"

#include <algorithm>
#include <cstring>

namespace tformer {
namespace {

constexpr int MAX_PAIR_SUM = 128;  // 255 · 128 < 2¹⁵
constexpr size_t FLOAT_ROWS_AT_ONCE = 16;  // of float32: a cache line of a column, where columns are stored one by one
constexpr size_t ROWS_AT_ONCE = 128;  // of 8 bits, where columns are stored one by one

// Packing is compiled for wider vectors as well. The loader takes the widest that the processor has, which needs ifunc.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12 && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define WIDEST_VECTORS __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#define IN_ITS_CALLER __attribute__((always_inline)) inline
#else
#define WIDEST_VECTORS
#define IN_ITS_CALLER inline
#endif

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// A number of each column, and zeros for the columns that pad the last panels.
void copy_columns(const Matrix& matrix, const float* source, Aligned<float>& target) {
  const size_t padded = matrix.panels * PANEL;
  target.allocate(padded);
  std::memcpy(target.get(), source, matrix.columns * sizeof(float));
  std::fill(target.get() + matrix.columns, target.get() + padded, 0.0f);
}

std::shared_ptr<Matrix> new_matrix(const Path& path, int bits, size_t block, size_t inner, size_t columns,
                                   const float* scale, const float* bias) {
  auto matrix = std::make_shared<Matrix>();
  matrix->path = &path;
  matrix->bits = bits;
  matrix->block = block;
  matrix->inner = inner;
  matrix->columns = columns;
  matrix->padded_inner = round_up(round_up(inner, block), path.inner_multiple);
  matrix->panels = round_up(columns, PANEL) / PANEL;
  copy_columns(*matrix, scale, matrix->scale);
  if (bias != nullptr) copy_columns(*matrix, bias, matrix->bias);
  matrix->column_sum.allocate(matrix->panels * PANEL);
  matrix->data.allocate(matrix->panels * matrix->panel_bytes());
  return matrix;
}

struct Source {
  const uint8_t* weights;
  ptrdiff_t row_stride, column_stride;
  uint8_t flip;
};

// 4 rows of 16 columns, column by column.
IN_ITS_CALLER void read_group(const Source& source, size_t row, size_t rows, size_t column, size_t columns,
                              uint8_t* out) {
  const uint8_t* first = source.weights + static_cast<ptrdiff_t>(row) * source.row_stride +
                         static_cast<ptrdiff_t>(column) * source.column_stride;
  if (rows == GROUP && columns == PANEL && source.column_stride == 1) {
    const uint8_t *a = first, *b = a + source.row_stride, *c = b + source.row_stride, *d = c + source.row_stride;
    uint32_t words[PANEL];
    for (size_t i = 0; i < PANEL; i++)
      words[i] = static_cast<uint32_t>(a[i]) | static_cast<uint32_t>(b[i]) << 8 | static_cast<uint32_t>(c[i]) << 16 |
                 static_cast<uint32_t>(d[i]) << 24;
    std::memcpy(out, words, GROUP_BYTES);
  } else if (rows == GROUP && columns == PANEL && source.row_stride == 1) {
    for (size_t i = 0; i < PANEL; i++) {
      uint32_t word;
      std::memcpy(&word, first + static_cast<ptrdiff_t>(i) * source.column_stride, GROUP);
      word ^= source.flip * 0x01010101u;
      std::memcpy(out + i * GROUP, &word, GROUP);
    }
    return;
  } else {
    std::memset(out, source.flip, GROUP_BYTES);  // becomes zero below
    for (size_t i = 0; i < columns; i++)
      for (size_t j = 0; j < rows; j++)
        out[i * GROUP + j] = first[static_cast<ptrdiff_t>(j) * source.row_stride +
                                   static_cast<ptrdiff_t>(i) * source.column_stride];
  }
  for (size_t i = 0; i < GROUP_BYTES; i++) out[i] ^= source.flip;
}

// Adds a group to the sums of columns. Returns whether the sum of two neighbours in a column leaves its range.
// Neighbours are added as the halves of wider numbers, which compilers turn into vectors; either may be the lower half.
IN_ITS_CALLER bool add_group(const uint8_t* group, int32_t* sums) {
  constexpr size_t PAIRS = GROUP_BYTES / 2;
  int16_t bytes[PAIRS], pairs[PAIRS];
  int32_t both[PANEL];
  int16_t beyond = 0;
  std::memcpy(bytes, group, GROUP_BYTES);
  for (size_t i = 0; i < PAIRS; i++) {
    auto low = static_cast<int16_t>(static_cast<uint16_t>(bytes[i]) << 8);
    pairs[i] = static_cast<int16_t>((low >> 8) + (bytes[i] >> 8));
    beyond |= static_cast<int16_t>((pairs[i] > MAX_PAIR_SUM) | (pairs[i] < -MAX_PAIR_SUM));
  }
  std::memcpy(both, pairs, sizeof both);
  for (size_t i = 0; i < PANEL; i++) sums[i] += static_cast<int16_t>(both[i] & 0xffff) + (both[i] >> 16);
  return beyond != 0;
}

// Some rows of a group of columns, row by row.
void read_floats(const float* weights, ptrdiff_t row_stride, ptrdiff_t column_stride, size_t rows, size_t columns,
                 size_t width, float* out) {
  for (size_t row = 0; row < rows; row++) {
    const float* from = weights + static_cast<ptrdiff_t>(row) * row_stride;
    float* into = out + row * width;
    if (column_stride == 1)
      std::memcpy(into, from, columns * sizeof(float));
    else
      for (size_t c = 0; c < columns; c++) into[c] = from[static_cast<ptrdiff_t>(c) * column_stride];
    std::fill(into + columns, into + width, 0.0f);
  }
}

// Packs one panel. Returns whether the sum of two neighbours in a column leaves its range.
WIDEST_VECTORS bool pack_panel(const Source& source, const Matrix& matrix, size_t p) {
  const size_t inner = matrix.inner, width = std::min(PANEL, matrix.columns - p * PANEL);
  uint8_t* out = matrix.data.get() + p * matrix.panel_bytes();
  int32_t sums[PANEL] = {};
  bool beyond = false;
  // What is written in words is added a while later: loads of whole vectors wait for words that were just written.
  const size_t at_once = source.column_stride == 1 ? GROUP : ROWS_AT_ONCE;
  size_t row = 0;
  while (row + at_once <= inner) {
    if (source.column_stride == 1) {
      read_group(source, row, GROUP, p * PANEL, width, out + row * PANEL);
      beyond |= add_group(out + row * PANEL, sums);
    } else {
      for (size_t i = row; i < row + at_once; i += GROUP)
        read_group(source, i, GROUP, p * PANEL, width, out + i * PANEL);
      for (size_t i = row; i < row + at_once; i += GROUP) beyond |= add_group(out + i * PANEL, sums);
    }
    row += at_once;
  }
  for (; row < inner; row += GROUP) {
    read_group(source, row, std::min(GROUP, inner - row), p * PANEL, width, out + row * PANEL);
    beyond |= add_group(out + row * PANEL, sums);
  }
  if (row < matrix.padded_inner) std::memset(out + row * PANEL, 0, (matrix.padded_inner - row) * PANEL);
  std::copy(sums, sums + PANEL, matrix.column_sum.get() + p * PANEL);
  return beyond;
}

bool valid_sizes(size_t inner, size_t columns) {
  return inner > 0 && columns > 0 && inner <= MAX_INNER && columns <= MAX_COLUMNS;
}

}  // namespace

Packing prepare_8_bits(const Path& path, const uint8_t* weights, ptrdiff_t row_stride, ptrdiff_t column_stride,
                       uint8_t flip, size_t inner, size_t columns, const float* scale, const float* bias) {
  if (!valid_sizes(inner, columns)) return {};
  auto matrix = new_matrix(path, 8, 1, inner, columns, scale, bias);
  const Source source{weights, row_stride, column_stride, flip};
  auto pack = [source, target = matrix.get(), limits = path.limits_pairs](size_t begin, size_t end) {
    bool beyond = false;
    for (size_t p = begin; p < end; p++) beyond |= pack_panel(source, *target, p);
    return !(beyond && limits);
  };
  return {matrix, Refusal::PAIRS, matrix->panels, inner * PANEL, pack};
}

namespace {

void pack_panel_of_4_bits(const uint8_t* nibbles, const uint8_t* codes, size_t blocks, const Matrix& matrix, size_t p) {
  const size_t block = matrix.block, inner = matrix.inner, columns = matrix.columns;
  const size_t column_bytes = blocks * block / 2;
  uint8_t* out = matrix.data.get() + p * matrix.panel_bytes();
  uint8_t* own_codes = matrix.codes.get() + p * matrix.blocks() * PANEL;
  int32_t* sums = matrix.column_sum.get() + p * PANEL;
  std::fill(sums, sums + PANEL, 0);
  for (size_t b = 0; b < matrix.blocks(); b++, own_codes += PANEL) {
    for (size_t c = 0; c < PANEL; c++) {
      size_t column = p * PANEL + c;
      own_codes[c] = column < columns && b < blocks ? codes[column * blocks + b] : ZERO_CODE;
    }
    int32_t block_sums[PANEL] = {};
    for (size_t row = b * block; row < (b + 1) * block; row += 2 * GROUP, out += GROUP_BYTES)
      for (size_t c = 0; c < PANEL; c++) {
        size_t column = p * PANEL + c;
        uint32_t eight = ZERO_NIBBLE * 0x11111111u;  // rows row … row + 7 of a column, the first one lowest
        if (column < columns && b < blocks) std::memcpy(&eight, nibbles + column * column_bytes + row / 2, 4);
        if (row + 8 > inner) {  // what pads K in the file may be any number
          unsigned kept = row < inner ? static_cast<unsigned>(inner - row) * 4 : 0;
          uint32_t mask = (uint32_t{1} << kept) - 1;
          eight = (eight & mask) | (ZERO_NIBBLE * 0x11111111u & ~mask);
        }
        uint32_t spread[2];
        for (int half = 0; half < 2; half++) {
          uint32_t four = eight >> 16 * half & 0xffff;
          spread[half] = (four & 0xf) | (four & 0xf0) << 4 | (four & 0xf00) << 8 | (four & 0xf000) << 12;
        }
        uint32_t pair = spread[0] | spread[1] << 4;
        std::memcpy(out + c * GROUP, &pair, 4);
        uint32_t sum = (eight & 0x0f0f0f0f) + (eight >> 4 & 0x0f0f0f0f);
        block_sums[c] += static_cast<int32_t>((sum * 0x01010101) >> 24);
      }
    for (size_t c = 0; c < PANEL; c++) {
      const Step step(own_codes[c]);
      sums[c] += block_sums[c] * step.m - static_cast<int32_t>(block) * step.shift;
    }
  }
}

}  // namespace

Packing prepare_4_bits(const Path& path, const uint8_t* nibbles, const uint8_t* codes, size_t block, size_t inner,
                       size_t columns, const float* scale, const float* bias) {
  if (!valid_sizes(inner, columns) || block < MIN_BLOCK || block > MAX_BLOCK || (block & (block - 1)) != 0) return {};
  const size_t blocks = (inner + block - 1) / block;
  auto matrix = new_matrix(path, 4, block, inner, columns, scale, bias);
  matrix->codes.allocate(matrix->panels * matrix->blocks() * PANEL);
  auto pack = [=, target = matrix.get()](size_t begin, size_t end) {
    for (size_t p = begin; p < end; p++) pack_panel_of_4_bits(nibbles, codes, blocks, *target, p);
    return true;
  };
  return {matrix, Refusal::SHAPE, matrix->panels, inner * PANEL, pack};
}

Packing prepare_floats(const Path& path, const float* weights, ptrdiff_t row_stride, ptrdiff_t column_stride,
                       size_t inner, size_t columns, const float* bias) {
  if (!valid_sizes(inner, columns)) return {};
  const size_t width = path.float_columns, groups = round_up(columns, width) / width;
  auto matrix = std::make_shared<Matrix>();
  matrix->path = &path;
  matrix->bits = FLOAT_BITS;
  matrix->block = 1;
  matrix->inner = matrix->padded_inner = inner;
  matrix->columns = columns;
  matrix->panels = groups * width / PANEL;
  if (bias != nullptr) copy_columns(*matrix, bias, matrix->bias);
  matrix->data.allocate(matrix->panels * matrix->panel_bytes());
  auto pack = [=, target = reinterpret_cast<float*>(matrix->data.get())](size_t begin, size_t end) {
    // Some rows of all groups, so that rows in the file are read in pieces that are longer than a group.
    for (size_t row = 0; row < inner; row += FLOAT_ROWS_AT_ONCE)
      for (size_t g = begin; g < end; g++) {
        const float* from = weights + static_cast<ptrdiff_t>(row) * row_stride +
                            static_cast<ptrdiff_t>(g * width) * column_stride;
        read_floats(from, row_stride, column_stride, std::min(FLOAT_ROWS_AT_ONCE, inner - row),
                    std::min(width, columns - g * width), width, target + (g * inner + row) * width);
      }
    return true;
  };
  return {matrix, Refusal::SHAPE, groups, inner * width, pack};
}

}  // namespace tformer

// A packed weight matrix, and the description of how activations are scaled and results are scaled back.
//
// Layout of float32 weights: groups of `Path::float_columns` columns; a group has its rows one after the other.
//
// Layout of 8-bit weights: panels of 16 columns. A panel is a sequence of groups of 4 rows; a group is 64 bytes, column by
// column 4 bytes. This is the operand of VPDPBUSD, SDOT and, 16 groups at a time, of a tile of AMX.
//
// Layout of 4-bit weights: panels of 16 columns, of blocks of rows, of pairs of groups. A pair is 64 bytes; the lower
// half of each byte belongs to the first group, the upper half to the second. A code for each block and column is stored
// apart: m − 1 in its lower 3 bits, z in the upper 5. Weights are m · u − ⌊m · z / 2⌋, as integers the same as the int8
// columns of the file. So the sum of x · weight over a block is m · Σ x · u − ⌊m · z / 2⌋ · Σ x.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace tformer {

constexpr size_t PANEL = 16;             // columns
constexpr size_t GROUP = 4;              // rows
constexpr size_t GROUP_BYTES = PANEL * GROUP;
constexpr size_t MAX_INNER = 65535;      // 65535 · 255 · 128 < 2³¹
constexpr size_t MAX_COLUMNS = 1 << 24;
constexpr int FLOAT_BITS = 32;
constexpr size_t MIN_BLOCK = 16, MAX_BLOCK = 128;  // rows of a block of 4 bits: the sum of 128 bytes fits 16 bits
constexpr uint8_t ZERO_CODE = 16 << 3, ZERO_NIBBLE = 8;  // m = 1 and z / 2 = 8
constexpr size_t ALIGNMENT = 64;

template <class T>
struct Aligned {
  struct Free {
    void operator()(T* pointer) const { std::free(pointer); }
  };
  std::unique_ptr<T[], Free> data;

  // Memory for `count` numbers, and a cache line of zeros, so that loops may prefetch and load whole vectors.
  void allocate(size_t count) {
    size_t bytes = (count * sizeof(T) + 2 * ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    void* pointer = std::aligned_alloc(ALIGNMENT, bytes);
    if (pointer == nullptr) throw std::bad_alloc();
    data.reset(static_cast<T*>(pointer));
    for (size_t i = bytes / sizeof(T) - ALIGNMENT / sizeof(T); i < bytes / sizeof(T); i++) data[i] = T{};
  }
  T* get() const { return data.get(); }
};

// Memory that grows to the greatest count that was asked for. Its numbers are lost when it grows.
template <class T>
struct Growing {
  Aligned<T> memory;
  size_t size = 0;

  T* reserve(size_t count) {
    if (size < count) {
      size = 0;
      memory.data.reset();  // first, so that both are never there at the same time
      memory.allocate(count);
      size = count;
    }
    return memory.get();
  }
};

// What a code says.
struct Step {
  int m, shift;

  explicit Step(uint8_t code) : m((code & 7) + 1), shift(m * (code >> 3) / 2) {}
};

struct Path;

struct Matrix {
  static inline std::atomic<int32_t> count{0};  // of matrices in memory

  Matrix() { count++; }
  ~Matrix() { count--; }
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;

  const Path* path;
  size_t inner, columns;      // K and N
  size_t padded_inner;        // K rounded up: the stride of quantised rows
  size_t panels;              // ⌈N / 16⌉; a multiple of those of a group of float32
  int bits;                   // 8, 4, or 32 for float32
  size_t block;               // rows of a block of 4 bits
  Aligned<uint8_t> data;
  Aligned<uint8_t> codes;        // 4 bits: (panels, blocks, 16)
  Aligned<float> scale, bias;    // (panels · 16); bias has no data if there is none
  Aligned<int32_t> column_sum;   // (panels · 16), of the weights as integers

  size_t panel_bytes() const { return padded_inner * PANEL * static_cast<size_t>(bits) / 8; }
  size_t blocks() const { return padded_inner / block; }
  const uint8_t* codes_of(size_t p) const { return codes.get() + p * blocks() * PANEL; }
  const uint8_t* panel(size_t p) const { return data.get() + p * panel_bytes(); }
  const float* floats(size_t p) const { return reinterpret_cast<const float*>(panel(p)); }  // p: the first of a group
};

// How a row of activations becomes uint8: scale = step · maximum, q = round(x / scale) + zero, clipped to 0 … 255.
struct RowScaling {
  bool magnitude;     // whether the maximum is that of |x|
  float floor;        // a lower bound of the maximum, if it is that of x
  float step;
  int zero;
  bool reciprocal;    // x · (1 / scale) instead of x / scale
  float fixed_scale;  // one scale for all rows, of which step · maximum is not computed; 0 for none
};

// Rows first … last of activations times panels first … last of a matrix.
struct Tile {
  const Matrix* matrix;
  const uint8_t* rows;        // quantised, padded_inner bytes each
  const int16_t* block_sums;  // of the quantised numbers of each block of 4 bits, blocks() for each row; if they are read
  const float* row_scale;
  float* out;                 // (rows, N)
  size_t row_begin, row_end, panel_begin, panel_end;
  int zero;                   // the uint8 that stands for zero
  bool column_first;          // whether results are multiplied by the column's scale before the row's
  const uint8_t* next = nullptr;  // what is read after these weights, if they are not followed by the next panels
};

// Rows first … last of float32 times panels first … last of a float32 matrix. Panels are whole groups.
struct FloatTile {
  const Matrix* matrix;
  const float* rows;  // (rows, K)
  float* out;         // (rows, N)
  size_t row_begin, row_end, panel_begin, panel_end;
};

// What is applied to each number of a result.
struct Activation {
  // Rectified; x · Φ(x) (Hendrycks and Gimpel 2016), and its approximation by tanh; x · sigmoid(alpha · x).
  enum Kind : int { NONE, RELU, GELU, GELU_TANH, SWISH };
  Kind kind = NONE;
  float alpha = 1;
};

struct AttentionTile;
struct AttentionCall;
struct NormTile;
struct GateTile;

// What is computed number by number and row by row, with one kind of vectors (elementwise.h).
struct Elementwise {
  // Of `count` numbers of each row; stride: numbers between rows.
  void (*activate)(float* values, size_t rows, size_t stride, size_t count, const Activation& activation);
  void (*gate)(const GateTile& tile);
  void (*normalise)(const NormTile& tile);
};

// The functions of one kind of processor.
struct Path {
  const char* name;
  bool (*supported)();
  size_t inner_multiple;      // K is padded to a multiple of this
  size_t block_sum_rows;      // for so many rows and fewer, multiply4 reads the sums of blocks
  bool limits_pairs;          // pairs of products are added in 16 bits: int8 columns must keep them in range
  float (*quantise)(const float* x, size_t inner, size_t padded, const RowScaling& scaling, uint8_t* q);
  void (*multiply8)(const Tile& tile);
  void (*multiply4)(const Tile& tile);
  size_t float_columns;       // of a group of float32 weights: 16 or 32
  void (*multiply_float)(const FloatTile& tile);
  void (*attend)(const AttentionTile& tile);  // attention.h
  void (*rotate)(const AttentionCall& call, size_t position, const float* from, float* into, float scale);
  const Elementwise* elementwise;
};

}  // namespace tformer

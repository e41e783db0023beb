// Division of a product among threads: blocks of rows, and chunks of panels.
#pragma once

#include <algorithm>
#include <cstddef>

#include "matrix.h"

namespace tformer {

// Rows that a task multiplies with a panel while the panel is in the cache. Each task unpacks a panel of 4 bits to int8, so a
// task of 4 bits has more rows. It reads their quantised numbers from the second cache.
constexpr size_t block_rows(const Matrix& matrix) { return matrix.bits == 4 ? 144 : 48; }

struct Division {
  size_t rows, panels, row_blocks, panel_chunks = 1;

  Division(size_t rows, const Matrix& matrix)
      : rows(rows), panels(matrix.panels), row_blocks((rows + block_rows(matrix) - 1) / block_rows(matrix)) {}

  // Whether there are so many rows that they are divided by rows alone.
  bool by_rows_alone() const { return row_blocks >= OWN_BLOCKS; }

  // Whether a second thread gains more than the time until it has begun and ended, some microseconds.
  bool is_worth_threads(const Matrix& matrix) const {
    const size_t least = matrix.bits == FLOAT_BITS ? SHARED_PRODUCTS : 2 * SHARED_PRODUCTS;
    return products(matrix) >= least || bytes(matrix) >= SHARED_BYTES;
  }

  // Chooses the number of chunks, so that a task is worth its start.
  void divide_panels(const Matrix& matrix) {
    const size_t wanted = std::min(MAX_TASKS, std::max(products(matrix) / TASK_PRODUCTS, bytes(matrix) / TASK_BYTES));
    panel_chunks = std::clamp<size_t>((wanted + row_blocks - 1) / row_blocks, 1, units());
  }

  size_t tasks() const { return row_blocks * panel_chunks; }

  struct Ranges {
    size_t row_begin, row_end, panel_begin, panel_end;
  };

  // What task i multiplies. Tasks that follow each other have the same panels.
  Ranges ranges(size_t i) const {
    const size_t chunk = i / row_blocks, block = i % row_blocks;
    return {rows * block / row_blocks, rows * (block + 1) / row_blocks, units() * chunk / panel_chunks * UNIT_PANELS,
            std::min(panels, units() * (chunk + 1) / panel_chunks * UNIT_PANELS)};
  }

 private:
  static constexpr size_t UNIT_PANELS = 4;  // panels that a path may want at once
  static constexpr size_t OWN_BLOCKS = 8;
  static constexpr size_t SHARED_PRODUCTS = 1 << 20;  // float32 multiplications worth a second thread
  static constexpr size_t SHARED_BYTES = 1 << 19;     // bytes of weights worth a second thread
  static constexpr size_t TASK_PRODUCTS = 1 << 18;  // multiplications worth a task
  static constexpr size_t TASK_BYTES = 1 << 16;     // bytes of weights worth a task
  static constexpr size_t MAX_TASKS = 64;

  size_t products(const Matrix& matrix) const { return rows * matrix.padded_inner * panels * PANEL; }
  size_t bytes(const Matrix& matrix) const { return panels * matrix.panel_bytes(); }  // of weights

  size_t units() const { return (panels + UNIT_PANELS - 1) / UNIT_PANELS; }
};

}  // namespace tformer

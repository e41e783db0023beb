#include "product.h"

#include <algorithm>
#include <atomic>
#include <new>

namespace tformer {
namespace {

constexpr size_t BLOCK_ROWS = 48;         // rows that a task multiplies with a panel while it is in the cache
constexpr size_t UNIT_PANELS = 4;         // panels that a path may want at once
constexpr size_t ROWS_OF_OWN_BLOCKS = 8 * BLOCK_ROWS;  // so many rows are divided by rows alone
constexpr size_t QUANTISE_ROWS = 16;      // rows that a task quantises
constexpr size_t QUANTISE_ALONE = 1 << 14;  // numbers that are quantised in less time than other threads take to begin
constexpr size_t TASK_PRODUCTS = 1 << 18;  // multiplications worth a task
constexpr size_t TASK_BYTES = 1 << 16;     // bytes of weights worth a task
constexpr size_t MAX_TASKS = 64;

constexpr size_t whole_lines(size_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

// Quantised rows: padded_inner bytes each, and the sums of their blocks where 4 bits need them.
struct Rows {
  uint8_t* numbers = nullptr;
  int16_t* block_sums = nullptr;
  float* scales = nullptr;
};

// Memory of a thread for quantised rows.
struct Scratch {
  Aligned<uint8_t> memory;
  size_t size = 0;
  Rows rows;

  void reserve(size_t count, const Matrix& matrix) {
    const size_t blocks = matrix.bits == 4 ? matrix.blocks() : 0;
    const size_t scale_bytes = whole_lines(count * sizeof(float));
    const size_t sum_bytes = whole_lines(count * blocks * sizeof(int16_t));
    const size_t bytes = scale_bytes + sum_bytes + count * matrix.padded_inner;
    if (size < bytes) {
      size = 0;
      memory.allocate(bytes);
      size = bytes;
    }
    rows.scales = reinterpret_cast<float*>(memory.get());
    rows.block_sums = reinterpret_cast<int16_t*>(memory.get() + scale_bytes);
    rows.numbers = memory.get() + scale_bytes + sum_bytes;
  }
};

Scratch& scratch() {
  static thread_local Scratch instance;
  return instance;
}

struct Job {
  const Call* call;
  Rows rows;  // of all rows, if threads share them
  size_t row_blocks, panel_chunks;
  std::atomic<bool> lacks_memory{false};
};

// The inner loop has a known length, so that the compiler makes vectors of it.
void sum_blocks(const uint8_t* numbers, size_t block, size_t blocks, int16_t* sums) {
  for (size_t b = 0; b < blocks; b++, numbers += block) {
    int sum = 0;
    for (size_t i = 0; i < block; i += MIN_BLOCK)
      for (size_t j = 0; j < MIN_BLOCK; j++) sum += numbers[i + j];
    sums[b] = static_cast<int16_t>(sum);
  }
}

// Quantises rows begin … end. into: the memory of rows from `first` on. A task multiplies all rows of a call if these are few
// enough for sums of blocks.
void quantise(const Call& call, size_t begin, size_t end, size_t first, const Rows& into) {
  const Matrix& matrix = *call.matrix;
  const bool scaled_by_columns = call.scaling.fixed_scale > 0 && call.column_first;  // which contain the fixed scale
  for (size_t r = begin; r < end; r++) {
    const size_t place = r - first;
    uint8_t* numbers = into.numbers + place * matrix.padded_inner;
    const float scale =
        matrix.path->quantise(call.x + r * matrix.inner, matrix.inner, matrix.padded_inner, call.scaling, numbers);
    into.scales[place] = scaled_by_columns ? 1 : scale;
    if (matrix.bits == 4 && call.rows <= matrix.path->block_sum_rows)
      sum_blocks(numbers, matrix.block, matrix.blocks(), into.block_sums + place * matrix.blocks());
  }
}

void multiply_tile(const Tile& tile) {
  (tile.matrix->bits == 4 ? tile.matrix->path->multiply4 : tile.matrix->path->multiply8)(tile);
}

void quantise_task(void* data, size_t i) {
  const Job& job = *static_cast<Job*>(data);
  const size_t begin = i * QUANTISE_ROWS, end = std::min(job.call->rows, begin + QUANTISE_ROWS);
  quantise(*job.call, begin, end, 0, job.rows);
}

// Some rows, quantised by all, times some panels.
void shared_task(void* data, size_t i) {
  Job& job = *static_cast<Job*>(data);
  const Call& call = *job.call;
  const size_t chunk = i / job.row_blocks, block = i % job.row_blocks;
  const size_t units = (call.matrix->panels + UNIT_PANELS - 1) / UNIT_PANELS;
  const size_t panel_begin = units * chunk / job.panel_chunks * UNIT_PANELS;
  const size_t panel_end = std::min(call.matrix->panels, units * (chunk + 1) / job.panel_chunks * UNIT_PANELS);
  try {
    multiply_tile({call.matrix, job.rows.numbers, job.rows.block_sums, job.rows.scales, call.out,
                   call.rows * block / job.row_blocks, call.rows * (block + 1) / job.row_blocks, panel_begin, panel_end,
                   call.scaling.zero, call.column_first});
  } catch (const std::bad_alloc&) {
    job.lacks_memory = true;
  }
}

// Some rows times all panels.
void own_rows_task(void* data, size_t i) {
  Job& job = *static_cast<Job*>(data);
  const Call& call = *job.call;
  const size_t begin = call.rows * i / job.row_blocks, end = call.rows * (i + 1) / job.row_blocks;
  try {
    Scratch& own = scratch();
    own.reserve(end - begin, *call.matrix);
    quantise(call, begin, end, begin, own.rows);
    multiply_tile({call.matrix, own.rows.numbers, own.rows.block_sums, own.rows.scales,
                   call.out + begin * call.matrix->columns, 0, end - begin, 0, call.matrix->panels, call.scaling.zero,
                   call.column_first});
  } catch (const std::bad_alloc&) {
    job.lacks_memory = true;
  }
}

}  // namespace

void multiply(const Call& call, ParallelFor parallel_for, void* context) {
  const Matrix& matrix = *call.matrix;
  if (call.rows == 0) return;
  Job job;
  job.call = &call;
  job.row_blocks = (call.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  if (call.rows >= ROWS_OF_OWN_BLOCKS) {
    parallel_for(context, own_rows_task, job.row_blocks, &job);
  } else {
    Scratch& shared = scratch();
    shared.reserve(call.rows, matrix);
    job.rows = shared.rows;
    if (call.rows > QUANTISE_ROWS && call.rows * matrix.inner > QUANTISE_ALONE)
      parallel_for(context, quantise_task, (call.rows + QUANTISE_ROWS - 1) / QUANTISE_ROWS, &job);
    else
      quantise(call, 0, call.rows, 0, job.rows);
    const size_t weights = matrix.panels * matrix.panel_bytes();
    const size_t tasks = std::min(
        MAX_TASKS, std::max(call.rows * matrix.padded_inner * matrix.panels * PANEL / TASK_PRODUCTS, weights / TASK_BYTES));
    const size_t units = (matrix.panels + UNIT_PANELS - 1) / UNIT_PANELS;
    job.panel_chunks = std::clamp<size_t>((tasks + job.row_blocks - 1) / job.row_blocks, 1, units);
    if (job.panel_chunks * job.row_blocks == 1)
      shared_task(&job, 0);
    else
      parallel_for(context, shared_task, job.panel_chunks * job.row_blocks, &job);
  }
  if (job.lacks_memory) throw std::bad_alloc();
}

}  // namespace tformer

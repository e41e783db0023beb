#include "product.h"

#include <algorithm>
#include <atomic>
#include <new>

#include "division.h"

namespace tformer {
namespace {

constexpr size_t QUANTISE_ROWS = 16;      // rows that a task quantises
constexpr size_t QUANTISE_ALONE = 1 << 14;  // numbers that are quantised in less time than other threads take to begin

constexpr size_t whole_lines(size_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

// Quantised rows: padded_inner bytes each, and the sums of their blocks where 4 bits need them.
struct Rows {
  uint8_t* numbers = nullptr;
  int16_t* block_sums = nullptr;
  float* scales = nullptr;
};

// Memory of a thread for quantised rows.
struct Scratch {
  Growing<uint8_t> memory;
  Rows rows;

  void reserve(size_t count, const Matrix& matrix) {
    const size_t blocks = matrix.bits == 4 ? matrix.blocks() : 0;
    const size_t scale_bytes = whole_lines(count * sizeof(float));
    const size_t sum_bytes = whole_lines(count * blocks * sizeof(int16_t));
    uint8_t* begin = memory.reserve(scale_bytes + sum_bytes + count * matrix.padded_inner);
    rows.scales = reinterpret_cast<float*>(begin);
    rows.block_sums = reinterpret_cast<int16_t*>(begin + scale_bytes);
    rows.numbers = begin + scale_bytes + sum_bytes;
  }
};

Scratch& scratch() {
  static thread_local Scratch instance;
  return instance;
}

struct Job {
  const Call* call;
  Division division;
  Rows rows = {};  // of all rows, if threads share them
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

// Applies the activation of a call to what a task has computed, while it is in the cache.
template <class AnyCall>
void activate(const AnyCall& call, const Division::Ranges& part) {
  if (call.activation.kind == Activation::NONE) return;
  const size_t columns = call.matrix->columns, begin = part.panel_begin * PANEL, end = std::min(columns, part.panel_end * PANEL);
  call.matrix->path->elementwise->activate(call.out + part.row_begin * columns + begin, part.row_end - part.row_begin, columns,
                                           end - begin, call.activation);
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
  const auto [row_begin, row_end, panel_begin, panel_end] = job.division.ranges(i);
  try {
    multiply_tile({call.matrix, job.rows.numbers, job.rows.block_sums, job.rows.scales, call.out, row_begin, row_end,
                   panel_begin, panel_end, call.scaling.zero, call.column_first});
    activate(call, {row_begin, row_end, panel_begin, panel_end});
  } catch (const std::bad_alloc&) {
    job.lacks_memory = true;
  }
}

// Some rows times all panels.
void own_rows_task(void* data, size_t i) {
  Job& job = *static_cast<Job*>(data);
  const Call& call = *job.call;
  const auto [begin, end, panel_begin, panel_end] = job.division.ranges(i);
  try {
    Scratch& own = scratch();
    own.reserve(end - begin, *call.matrix);
    quantise(call, begin, end, begin, own.rows);
    multiply_tile({call.matrix, own.rows.numbers, own.rows.block_sums, own.rows.scales,
                   call.out + begin * call.matrix->columns, 0, end - begin, panel_begin, panel_end, call.scaling.zero,
                   call.column_first});
    activate(call, {begin, end, panel_begin, panel_end});
  } catch (const std::bad_alloc&) {
    job.lacks_memory = true;
  }
}

struct FloatJob {
  const FloatCall* call;
  Division division;
};

void float_task(void* data, size_t i) {
  const FloatJob& job = *static_cast<FloatJob*>(data);
  const FloatCall& call = *job.call;
  const auto [row_begin, row_end, panel_begin, panel_end] = job.division.ranges(i);
  call.matrix->path->multiply_float({call.matrix, call.x, call.out, row_begin, row_end, panel_begin, panel_end});
  activate(call, {row_begin, row_end, panel_begin, panel_end});
}

}  // namespace

void multiply(const Call& call, ParallelFor parallel_for, void* context) {
  const Matrix& matrix = *call.matrix;
  if (call.rows == 0) return;
  Job job{&call, Division(call.rows, matrix)};
  if (!job.division.is_worth_threads(matrix)) parallel_for = run_alone;
  if (job.division.by_rows_alone()) {
    run_tasks(parallel_for, context, own_rows_task, job.division.tasks(), &job);
  } else {
    Scratch& shared = scratch();
    shared.reserve(call.rows, matrix);
    job.rows = shared.rows;
    if (call.rows > QUANTISE_ROWS && call.rows * matrix.inner > QUANTISE_ALONE)
      run_tasks(parallel_for, context, quantise_task, (call.rows + QUANTISE_ROWS - 1) / QUANTISE_ROWS, &job);
    else
      quantise(call, 0, call.rows, 0, job.rows);
    job.division.divide_panels(matrix);
    run_tasks(parallel_for, context, shared_task, job.division.tasks(), &job);
  }
  if (job.lacks_memory) throw std::bad_alloc();
}

void multiply(const FloatCall& call, ParallelFor parallel_for, void* context) {
  if (call.rows == 0) return;
  FloatJob job{&call, Division(call.rows, *call.matrix)};
  if (!job.division.is_worth_threads(*call.matrix)) parallel_for = run_alone;
  if (!job.division.by_rows_alone()) job.division.divide_panels(*call.matrix);
  run_tasks(parallel_for, context, float_task, job.division.tasks(), &job);
}

}  // namespace tformer

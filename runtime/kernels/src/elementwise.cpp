#include "elementwise.h"

#include <algorithm>

namespace tformer {
namespace {

constexpr size_t TASK_NUMBERS = 1 << 14;  // worth a task

struct NormJob {
  const Path& path;
  const NormTile& all;
  size_t tasks;
};

void norm_task(void* data, size_t i) {
  const NormJob& job = *static_cast<NormJob*>(data);
  NormTile tile = job.all;
  const size_t begin = tile.rows * i / job.tasks, end = tile.rows * (i + 1) / job.tasks;
  tile.rows = end - begin;
  tile.x += begin * tile.size;
  tile.out += begin * tile.size;
  if (tile.residual != nullptr) tile.residual += begin * tile.size;
  if (tile.sum != nullptr) tile.sum += begin * tile.size;
  job.path.elementwise->normalise(tile);
}

struct GateJob {
  const Path& path;
  const GateTile& all;
  size_t tasks;
};

void gate_task(void* data, size_t i) {
  const GateJob& job = *static_cast<GateJob*>(data);
  GateTile tile = job.all;
  const size_t begin = tile.rows * i / job.tasks, end = tile.rows * (i + 1) / job.tasks;
  tile.rows = end - begin;
  tile.x += begin * 2 * tile.size;
  tile.out += begin * tile.size;
  job.path.elementwise->gate(tile);
}

size_t tasks_of(size_t rows, size_t size) { return std::clamp<size_t>(rows * size / TASK_NUMBERS, 1, std::max<size_t>(rows, 1)); }

}  // namespace

void normalise(const Path& path, const NormTile& all, ParallelFor parallel_for, void* context) {
  NormJob job{path, all, tasks_of(all.rows, all.size)};
  run_tasks(parallel_for, context, norm_task, job.tasks, &job);
}

void gate(const Path& path, const GateTile& all, ParallelFor parallel_for, void* context) {
  GateJob job{path, all, tasks_of(all.rows, all.size)};
  run_tasks(parallel_for, context, gate_task, job.tasks, &job);
}

}  // namespace tformer

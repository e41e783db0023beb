#include "elementwise.h"

#include <algorithm>

namespace tformer {
namespace {

constexpr size_t TASK_NUMBERS = 1 << 14;  // worth a task

NormTile rows_between(NormTile tile, size_t begin, size_t end) {
  tile.rows = end - begin;
  tile.x += begin * tile.size;
  tile.out += begin * tile.size;
  if (tile.residual != nullptr) tile.residual += begin * tile.size;
  if (tile.sum != nullptr) tile.sum += begin * tile.size;
  return tile;
}

GateTile rows_between(GateTile tile, size_t begin, size_t end) {
  tile.rows = end - begin;
  tile.x += begin * 2 * tile.size;
  tile.out += begin * tile.size;
  return tile;
}

template <class Tile>
struct Job {
  void (*run)(const Tile& tile);
  const Tile& all;
  size_t tasks;
};

template <class Tile>
void run_rows(void (*run)(const Tile&), const Tile& all, ParallelFor parallel_for, void* context) {
  Job<Tile> job{run, all, std::clamp<size_t>(all.rows * all.size / TASK_NUMBERS, 1, std::max<size_t>(all.rows, 1))};
  auto task = [](void* data, size_t i) {
    const Job<Tile>& job = *static_cast<Job<Tile>*>(data);
    job.run(rows_between(job.all, job.all.rows * i / job.tasks, job.all.rows * (i + 1) / job.tasks));
  };
  run_tasks(parallel_for, context, task, job.tasks, &job);
}

}  // namespace

void normalise(const Path& path, const NormTile& all, ParallelFor parallel_for, void* context) {
  run_rows(path.elementwise->normalise, all, parallel_for, context);
}

void gate(const Path& path, const GateTile& all, ParallelFor parallel_for, void* context) {
  run_rows(path.elementwise->gate, all, parallel_for, context);
}

}  // namespace tformer

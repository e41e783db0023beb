#include "packer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "store.h"

namespace tformer {
namespace {

// A thread takes longer to start than it packs fewer weights than these.
constexpr size_t WEIGHTS_OF_THREAD = 1 << 21;
constexpr size_t WEIGHTS_AT_ONCE = 1 << 18;  // that a thread takes: 0.1 ms, in which the lock is free

void let_go(MappedBytes source) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<uintptr_t>(source.begin) + page - 1) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(source.begin) + source.count) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace

Packer::~Packer() {
  {
    std::lock_guard<std::mutex> guard(lock_);
    closes_ = true;
    waiting_.clear();
  }
  changed_.notify_all();
  for (auto& helper : helpers_) helper.join();
}

int64_t Packer::add(Packing packing, MappedBytes source) {
  if (!packing.matrix) return static_cast<int64_t>(packing.refusal);
  auto task = std::make_shared<Task>(std::move(packing), source);
  {
    std::lock_guard<std::mutex> guard(lock_);
    waiting_.push_back(task);
    try {
      task->handle = keep_matrix(task->packing.matrix);
    } catch (...) {
      waiting_.pop_back();
      throw;
    }
    unfinished_++;
    waiting_weights_ += task->packing.units * task->packing.weights_of_unit;
    start_threads();
  }
  changed_.notify_one();
  return task->handle;
}

size_t Packer::wait() {
  std::unique_lock<std::mutex> guard(lock_);
  while (unfinished_ > 0)
    if (!pack_some(guard)) changed_.wait(guard);
  return refused_;
}

// Packs some units of the first matrix that has any left. Returns false, at once, if there is none.
bool Packer::pack_some(std::unique_lock<std::mutex>& guard) {
  if (waiting_.empty()) return false;
  const std::shared_ptr<Task> task = waiting_.front();
  const Packing& packing = task->packing;
  const size_t begin = task->next;
  const size_t end = std::min(packing.units, begin + std::max<size_t>(1, WEIGHTS_AT_ONCE / packing.weights_of_unit));
  task->next = end;
  waiting_weights_ -= (end - begin) * packing.weights_of_unit;
  if (end == packing.units) waiting_.pop_front();
  guard.unlock();
  const bool is_packed = packing.pack_units(begin, end);
  guard.lock();
  task->is_refused |= !is_packed;
  task->unfinished -= end - begin;
  if (task->unfinished == 0) {
    guard.unlock();
    finish(*task);
    guard.lock();
    refused_ += task->is_refused;
    if (--unfinished_ == 0) changed_.notify_all();
  }
  return true;
}

void Packer::start_threads() {
  while (helpers_.size() + 1 < threads_ && waiting_weights_ > (helpers_.size() + 1) * WEIGHTS_OF_THREAD) try {
      helpers_.emplace_back([this] {
        std::unique_lock<std::mutex> guard(lock_);
        while (!closes_)
          if (!pack_some(guard)) changed_.wait(guard);
      });
    } catch (...) {  // the system gives no thread or no memory: `wait` packs the rest
      return;
    }
}

void Packer::finish(Task& task) {
  let_go(task.source);
  if (task.is_refused) release_matrix(task.handle);
}

}  // namespace tformer

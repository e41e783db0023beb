// Packs the matrices of a file in the background, while the caller reads the rest of the file.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "packing.h"

namespace tformer {

// A piece of memory that a file is mapped to.
struct MappedBytes {
  const void* begin = nullptr;
  size_t count = 0;
};

class Packer {
 public:
  // threads: how many pack, the one that waits included.
  explicit Packer(size_t threads) : threads_(threads) {}
  // Leaves out what no thread has begun.
  ~Packer();
  Packer(const Packer&) = delete;
  Packer& operator=(const Packer&) = delete;

  // Returns a handle at once, or a number of `Refusal`. Weights are read until `wait` has returned. `source`: pages that
  // are let go when the matrix is packed; they are read from the file again if need be.
  int64_t add(Packing packing, MappedBytes source);

  // Returns when all matrices are packed. The calling thread packs, too. A matrix that its path cannot multiply with has
  // no handle any more; returns the number of these so far.
  size_t wait();

 private:
  struct Task {
    Task(Packing work, MappedBytes pages) : packing(std::move(work)), source(pages), unfinished(packing.units) {}

    Packing packing;
    MappedBytes source;
    int64_t handle = 0;
    size_t next = 0, unfinished;  // units
    bool is_refused = false;
  };

  bool pack_some(std::unique_lock<std::mutex>& guard);
  void start_threads();
  void finish(Task& task);

  const size_t threads_;
  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Task>> waiting_;  // with units that no thread has begun
  size_t waiting_weights_ = 0, unfinished_ = 0, refused_ = 0;
  bool closes_ = false;
  std::vector<std::thread> helpers_;
};

}  // namespace tformer

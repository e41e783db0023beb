// Memory for the values between the operators of a chain.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

#include "matrix.h"

namespace tformer {

// Memory of a chain that runs. There are as many buffers as values that are needed at the same time.
class Buffers {
 public:
  // Takes the smallest buffer that has so many numbers; if none has, the largest grows.
  size_t take(size_t count) {
    auto best = std::min_element(unused.begin(), unused.end(), [&](size_t a, size_t b) {
      const size_t size_a = memory[a].size, size_b = memory[b].size;
      const bool fits_a = size_a >= count, fits_b = size_b >= count;
      if (fits_a != fits_b) return fits_a;
      return fits_a ? size_a < size_b : size_a > size_b;
    });
    if (best == unused.end()) {
      memory.emplace_back();
      unused.reserve(memory.size());  // so that buffers can be given back without new memory
      best = unused.insert(unused.end(), memory.size() - 1);
    }
    const size_t buffer = *best;
    memory[buffer].reserve(std::max<size_t>(count, 1));
    unused.erase(best);
    return buffer;
  }

  float* floats(size_t buffer) { return memory[buffer].memory.get(); }
  void give_back(size_t buffer) { unused.push_back(buffer); }

 private:
  std::vector<Growing<float>> memory;
  std::vector<size_t> unused;
};

// The buffers of the chains that run at the same time.
class BufferPool {
 public:
  std::unique_ptr<Buffers> take() {
    const std::lock_guard guard(lock);
    if (unused.empty()) return std::make_unique<Buffers>();
    std::unique_ptr<Buffers> buffers = std::move(unused.back());
    unused.pop_back();
    return buffers;
  }

  void give_back(std::unique_ptr<Buffers> buffers) {
    const std::lock_guard guard(lock);
    unused.push_back(std::move(buffers));
  }

  // The pool of all chains; its memory is freed with the last chain.
  static std::shared_ptr<BufferPool> shared() {
    static std::mutex lock;
    static auto& pool = *new std::weak_ptr<BufferPool>;  // never destroyed: sessions may outlive static objects
    const std::lock_guard guard(lock);
    std::shared_ptr<BufferPool> found = pool.lock();
    if (!found) pool = found = std::make_shared<BufferPool>();
    return found;
  }

 private:
  std::mutex lock;
  std::vector<std::unique_ptr<Buffers>> unused;
};

}  // namespace tformer

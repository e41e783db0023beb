#include "store.h"

#include <mutex>
#include <random>
#include <unordered_map>
#include <utility>

namespace tformer {
namespace {

struct Store {
  std::mutex lock;
  std::unordered_map<int64_t, std::shared_ptr<const Matrix>> matrices;
  int64_t last = first();

  // A number that a file cannot guess.
  static int64_t first() {
    std::random_device random;
    return static_cast<int64_t>((uint64_t{random()} << 32 | random()) >> 3 | uint64_t{1} << 60);
  }
};

Store& store() {
  static Store* instance = new Store;  // never destroyed: sessions may outlive static objects
  return *instance;
}

}  // namespace

int64_t keep_matrix(std::shared_ptr<const Matrix> matrix) {
  std::lock_guard<std::mutex> guard(store().lock);
  int64_t handle = ++store().last;
  store().matrices.emplace(handle, std::move(matrix));
  return handle;
}

std::shared_ptr<const Matrix> find_matrix(int64_t handle) {
  std::lock_guard<std::mutex> guard(store().lock);
  auto found = store().matrices.find(handle);
  return found == store().matrices.end() ? nullptr : found->second;
}

bool release_matrix(int64_t handle) {
  std::shared_ptr<const Matrix> last;  // freed outside of the lock
  std::lock_guard<std::mutex> guard(store().lock);
  auto found = store().matrices.find(handle);
  if (found == store().matrices.end()) return false;
  last = std::move(found->second);
  store().matrices.erase(found);
  return true;
}

}  // namespace tformer

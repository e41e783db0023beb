#include "paths.h"

#include <cstring>

namespace tformer {
namespace {

const Path* const PATHS[] = {
#if defined(__x86_64__)
    &AMX, &AVX512_VNNI, &AVX_VNNI, &AVX2,
#elif defined(__aarch64__)
    &NEON_I8MM, &NEON_DOT,
#endif
    &SCALAR,
};

}  // namespace

const Path* path_at(size_t index) { return index < sizeof PATHS / sizeof *PATHS ? PATHS[index] : nullptr; }

const Path* find_path(const char* name) {
  for (const Path* path : PATHS)
    if (std::strcmp(path->name, name) == 0 && path->supported()) return path;
  return nullptr;
}

}  // namespace tformer

// The paths that this library has been built with, the best first. They are `constinit`: no instruction of a path runs while
// the library is loaded.
#pragma once

#include <cstddef>

#include "matrix.h"

namespace tformer {

#if defined(__x86_64__)
extern const Path AMX, AVX512_VNNI, AVX_VNNI, AVX2;
#elif defined(__aarch64__)
extern const Path NEON_I8MM, NEON_DOT;
#endif
extern const Path SCALAR;

// Functions that several paths share
#if defined(__x86_64__)
extern const Elementwise ELEMENTWISE_AVX512, ELEMENTWISE_AVX2;
#elif defined(__aarch64__)
extern const Elementwise ELEMENTWISE_NEON;
#endif
extern const Elementwise ELEMENTWISE_SCALAR;

#if defined(__x86_64__)
void attend_avx2(const AttentionTile& tile);
void attend_avx512(const AttentionTile& tile);
void rotate_avx2(const AttentionCall& call, size_t position, const float* from, float* into, float scale);
#elif defined(__aarch64__)
void attend_neon(const AttentionTile& tile);
void rotate_neon(const AttentionCall& call, size_t position, const float* from, float* into, float scale);
#endif

// The path at this place of the list; nullptr beyond its end.
const Path* path_at(size_t index);

// The path of this name if the processor has it; nullptr otherwise.
const Path* find_path(const char* name);

}  // namespace tformer

// The multiply-additions that a core can do: chains in registers, which do not wait for each other or for memory.
#include <stddef.h>

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
#define CHAINS 12  // as many as two units keep busy, and fit into 16 registers

typedef float vector __attribute__((vector_size(BYTES)));

// Returns the number of multiply-additions that it has done.
double multiply_add(size_t rounds, float factor, float *out) {
  vector sums[CHAINS], a = (vector){} + factor, b = (vector){} + 1;
  for (int i = 0; i < CHAINS; i++) sums[i] = (vector){} + (float)i;
  for (size_t round = 0; round < rounds; round++) {
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) sums[i] = sums[i] * a + b;
  }
  for (int i = 1; i < CHAINS; i++) sums[0] += sums[i];
  *out = sums[0][0];
  return (double)rounds * CHAINS * (BYTES / sizeof(float));
}

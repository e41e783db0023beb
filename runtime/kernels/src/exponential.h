// e^x with the vectors of a path. All paths give the same bits.
#pragma once

#include "blocks.h"

namespace tformer {
namespace {

// e^x for x ≤ 89: 2ⁿ · e^r, and the polynomial of Cephes' expf (Moshier) for e^r. Zero below the least normal number, infinite
// from n = 128 on.
template <class Vector>
INLINE typename Vector::Type exponential(typename Vector::Type x) {
  using Type = typename Vector::Type;
  static constexpr float log2e = 1.44269504088896341f, high = -0.693359375f, low = 2.12194440e-4f, least = -87.3365447f;
  static constexpr float terms[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                    4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  const Type n = Vector::round(Vector::multiply(x, Vector::repeat(log2e)));
  const Type r = Vector::add_product(Vector::add_product(x, n, Vector::repeat(high)), n, Vector::repeat(low));
  Type p = Vector::repeat(terms[0]);
  unroll<5>(UNROLLED(i) { p = Vector::add_product(Vector::repeat(terms[i + 1]), p, r); });
  p = Vector::add(Vector::add_product(r, p, Vector::multiply(r, r)), Vector::repeat(1.0f));
  return Vector::zero_where_below(x, Vector::repeat(least), Vector::multiply(p, Vector::power_of_two(n)));
}

}  // namespace
}  // namespace tformer

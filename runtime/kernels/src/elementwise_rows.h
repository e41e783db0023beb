// Activations, gates and norms with the vectors of a path. All paths give the same bits: a number is computed by the same
// operations, and the sum of a row has NORM_LANES parts in any path.
//
// Vector has the type Type of WIDTH numbers and the functions below.
#pragma once

#include <cmath>

#include "blocks.h"
#include "elementwise.h"
#include "exponential.h"

namespace tformer {
namespace {

constexpr size_t NORM_LANES = 64;  // parts of a row's sum, each of every 64th number

template <class Vector>
struct ElementwiseRows {
  using Type = typename Vector::Type;
  static constexpr size_t WIDTH = Vector::WIDTH;
  static constexpr int VECTORS = static_cast<int>(NORM_LANES / WIDTH);

  static INLINE Type repeat(float x) { return Vector::repeat(x); }
  static INLINE Type negative(Type x) { return Vector::multiply(x, repeat(-1.0f)); }

  // 1 / (1 + e^−x)
  static INLINE Type sigmoid(Type x) {
    const Type one = repeat(1.0f), e = exponential<Vector>(Vector::smaller(repeat(89.0f), negative(x)));
    return Vector::divide(one, Vector::add(one, e));
  }

  // The distribution function of the normal distribution: 1/2 + x · P(x²) / Q(x²) for |x| ≤ 5.6, where it is 0 and 1 in
  // float32. P and Q were fitted for the least maximum error, 9 · 10⁻⁹ before rounding.
  static INLINE Type normal_distribution(Type x) {
    static constexpr float limit = 5.6f;
    static constexpr float p[] = {2.21447327e-8f, 6.35649439e-6f, 0.000173853387f, 0.00470727523f, 0.0343764283f, 0.398942222f};
    static constexpr float q[] = {1.1801921e-6f, 7.51024721e-5f, 0.00191299371f, 0.0289402615f, 0.25283464f, 1.0f};
    const Type near = Vector::smaller(repeat(limit), Vector::larger(repeat(-limit), x)), square = Vector::multiply(near, near);
    Type above = repeat(p[0]), below = repeat(q[0]);
    unroll<5>(UNROLLED(i) {
      above = Vector::add_product(repeat(p[i + 1]), above, square);
      below = Vector::add_product(repeat(q[i + 1]), below, square);
    });
    return Vector::add(repeat(0.5f), Vector::divide(Vector::multiply(near, above), below));
  }

  template <Activation::Kind KIND>
  static INLINE Type activated(Type x, Type alpha) {
    if constexpr (KIND == Activation::RELU) return Vector::zero_where_below(x, repeat(0.0f), x);
    if constexpr (KIND == Activation::GELU) return Vector::multiply(x, normal_distribution(x));
    if constexpr (KIND == Activation::GELU_TANH) {  // (1 + tanh u) / 2 = sigmoid(2u)
      const Type cube = Vector::multiply(Vector::multiply(x, x), x);
      const Type u = Vector::multiply(Vector::add_product(x, cube, repeat(0.044715f)), repeat(1.59576912f));  // 2√(2/π)
      return Vector::multiply(x, sigmoid(u));
    }
    if constexpr (KIND == Activation::SWISH) return Vector::multiply(x, sigmoid(Vector::multiply(x, alpha)));
    return x;
  }

  // Calls body(activation as a function of a vector) with the kind as a constant.
  template <class Body>
  static void with_activation(const Activation& activation, const Body& body) {
    const Type alpha = repeat(activation.alpha);
    switch (activation.kind) {
      case Activation::NONE: return body([](Type x) __attribute__((always_inline)) { return x; });
      case Activation::RELU: return body([=](Type x) __attribute__((always_inline)) { return activated<Activation::RELU>(x, alpha); });
      case Activation::GELU: return body([=](Type x) __attribute__((always_inline)) { return activated<Activation::GELU>(x, alpha); });
      case Activation::GELU_TANH:
        return body([=](Type x) __attribute__((always_inline)) { return activated<Activation::GELU_TANH>(x, alpha); });
      case Activation::SWISH: return body([=](Type x) __attribute__((always_inline)) { return activated<Activation::SWISH>(x, alpha); });
    }
  }

  // The vector of the last `count` numbers, and zeros.
  static INLINE Type load_some(const float* from, size_t count) {
    float numbers[WIDTH] = {};
    for (size_t i = 0; i < count; i++) numbers[i] = from[i];
    return Vector::load(numbers);
  }
  static INLINE void store_some(float* into, Type value, size_t count) {
    float numbers[WIDTH];
    Vector::store(numbers, value);
    for (size_t i = 0; i < count; i++) into[i] = numbers[i];
  }

  static void activate(float* values, size_t rows, size_t stride, size_t count, const Activation& activation) {
    with_activation(activation, [=](auto function) {
      for (size_t r = 0; r < rows; r++) {
        float* row = values + r * stride;
        size_t i = 0;
        for (; i + WIDTH <= count; i += WIDTH) Vector::store(row + i, function(Vector::load(row + i)));
        if (i < count) store_some(row + i, function(load_some(row + i, count - i)), count - i);
      }
    });
  }

  static void gate(const GateTile& tile) {
    with_activation(tile.activation, [&tile](auto function) {
      for (size_t r = 0; r < tile.rows; r++) {
        const float *row = tile.x + r * 2 * tile.size, *opened = row + (tile.first ? 0 : tile.size);
        const float* factor = row + (tile.first ? tile.size : 0);
        float* out = tile.out + r * tile.size;
        size_t i = 0;
        for (; i + WIDTH <= tile.size; i += WIDTH)
          Vector::store(out + i, Vector::multiply(function(Vector::load(opened + i)), Vector::load(factor + i)));
        const size_t left = tile.size - i;
        if (left > 0) store_some(out + i, Vector::multiply(function(load_some(opened + i, left)), load_some(factor + i, left)), left);
      }
    });
  }

  static float total(float (&lanes)[NORM_LANES]) {
    for (size_t width = NORM_LANES / 2; width > 0; width /= 2)
      for (size_t i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
  }

  // Σ of the numbers of a row, or of their squares: add(sum, numbers) returns a vector, add_one a number.
  template <class Add, class AddOne>
  static INLINE float reduce(const float* row, size_t size, const Add& add, const AddOne& add_one) {
    Type sums[VECTORS];
    unroll<VECTORS>(UNROLLED(j) { sums[j] = repeat(0.0f); });
    size_t k = 0;
    for (; k + NORM_LANES <= size; k += NORM_LANES)
      unroll<VECTORS>(UNROLLED(j) { sums[j] = add(sums[j], Vector::load(row + k + j * WIDTH)); });
    float lanes[NORM_LANES];
    unroll<VECTORS>(UNROLLED(j) { Vector::store(lanes + j * WIDTH, sums[j]); });
    for (size_t i = 0; k < size; k++, i++) lanes[i] = add_one(lanes[i], row[k]);
    return total(lanes);
  }

  static void normalise(const NormTile& tile) {
    const size_t size = tile.size;
    for (size_t r = 0; r < tile.rows; r++) {
      const float* row = tile.x + r * size;
      float* out = tile.out + r * size;
      if (tile.residual != nullptr) {
        const float* residual = tile.residual + r * size;
        float* sum = tile.sum != nullptr ? tile.sum + r * size : out;
        size_t i = 0;
        for (; i + WIDTH <= size; i += WIDTH) Vector::store(sum + i, Vector::add(Vector::load(row + i), Vector::load(residual + i)));
        for (; i < size; i++) sum[i] = row[i] + residual[i];
        row = sum;
      }
      float mean = 0;
      if (!tile.root_mean_square)
        mean = reduce(row, size, [](Type sum, Type x) __attribute__((always_inline)) { return Vector::add(sum, x); },
                      [](float sum, float x) { return sum + x; }) / static_cast<float>(size);
      const Type means = repeat(mean);
      const float squares = reduce(
          row, size,
          [=](Type sum, Type x) __attribute__((always_inline)) {
            const Type d = Vector::subtract(x, means);
            return Vector::add_product(sum, d, d);
          },
          [=](float sum, float x) { return std::fma(x - mean, x - mean, sum); });
      const float factor = 1.0f / std::sqrt(squares / static_cast<float>(size) + tile.epsilon);
      const Type factors = repeat(factor);
      auto scaled = [&](Type x, Type w, Type b) __attribute__((always_inline)) {
        return Vector::add_product(b, Vector::multiply(Vector::subtract(x, means), factors), w);
      };
      const float *weight = tile.weight, *bias = tile.bias;
      size_t i = 0;
      if (bias != nullptr)
        for (; i + WIDTH <= size; i += WIDTH)
          Vector::store(out + i, scaled(Vector::load(row + i), Vector::load(weight + i), Vector::load(bias + i)));
      else
        for (; i + WIDTH <= size; i += WIDTH)
          Vector::store(out + i, Vector::multiply(Vector::multiply(Vector::subtract(Vector::load(row + i), means), factors), Vector::load(weight + i)));
      for (; i < size; i++) {
        const float x = (row[i] - mean) * factor;
        out[i] = bias != nullptr ? std::fma(x, weight[i], bias[i]) : x * weight[i];
      }
    }
  }

  static constexpr Elementwise FUNCTIONS = {activate, gate, normalise};
};

}  // namespace
}  // namespace tformer

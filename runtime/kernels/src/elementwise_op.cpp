// The operators of norms and gates, in the domain ai.tformer.
//
// Norm (x, residual, weight, bias) → (y, sum) normalises rows, of x + residual if there is a residual: `NormTile` says how.
// Attributes: `path`, the place of a path in the list of paths; epsilon, root_mean_square.
//
// Gate (x) → (y) multiplies one half of each row, activated, by the other half. Attributes: path, first, and the activation
// (activation, alpha).
#include "elementwise.h"
#include "operator.h"

namespace tformer {
namespace {

enum NormInput : size_t { X, RESIDUAL, WEIGHT, BIAS, NORM_INPUTS };

void require_axes(const ort::Api* api, const Input& input, size_t least = 1) {
  require(api, input.data != nullptr && input.rank >= least && input.rank <= MAX_RANK,
          "tformer-kernels: a norm or a gate needs an input of 1 to 32 axes");
}

bool is_same_shape(const Input& a, const Input& b) { return a.rank == b.rank && std::equal(a.sizes, a.sizes + a.rank, b.sizes); }

// The shape of a sum of arrays whose axes of size 1 are repeated.
Input sum_shape(const ort::Api* api, const Input& a, const Input& b) {
  Input sum;
  sum.rank = std::max(a.rank, b.rank);
  for (size_t i = 1; i <= sum.rank; i++) {
    const int64_t m = i <= a.rank ? a.sizes[a.rank - i] : 1, n = i <= b.rank ? b.sizes[b.rank - i] : 1;
    if (m != n && m != 1 && n != 1) fail(api, "tformer-kernels: the arrays of a sum must have the same shape");
    sum.sizes[sum.rank - i] = m == 1 ? n : m;
  }
  return sum;
}

// Where a row of a sum begins in one of its arrays.
size_t place_of_row(const Input& input, const Input& shape, size_t row) {
  size_t place = 0, stride = input.rank > 0 ? input.size(input.rank - 1) : 1;
  for (size_t axis = 2; axis <= input.rank; axis++) {
    const size_t own = input.size(input.rank - axis), size = shape.size(shape.rank - axis);
    place += (own == 1 ? 0 : row % size) * stride;
    row /= size, stride *= own;
  }
  return place;
}

// Adds arrays of different shapes row by row.
void add_repeated(const Input& a, const Input& b, const Input& shape, float* out) {
  const size_t size = shape.size(shape.rank - 1), rows = rows_of(shape);
  auto is_row = [&](const Input& input) { return input.rank > 0 && input.size(input.rank - 1) == size; };
  const size_t step_a = is_row(a), step_b = is_row(b);  // 0: one number for a row
  for (size_t r = 0; r < rows; r++, out += size) {
    const float *x = a.floats() + place_of_row(a, shape, r), *y = b.floats() + place_of_row(b, shape, r);
    if (step_a == 1 && step_b == 1)  // in vectors
      for (size_t i = 0; i < size; i++) out[i] = x[i] + y[i];
    else
      for (size_t i = 0; i < size; i++) out[i] = x[i * step_a] + y[i * step_b];
  }
}

class Norm final : public Operator {
 public:
  explicit Norm(const Attributes& attributes)
      : path(attributes.path()),
        epsilon(attributes.number("epsilon")),
        root_mean_square(attributes.integer("root_mean_square") != 0) {}

  void run(Operands& operands) const override {
    const ort::Api* api = operands.api;
    const Input x = operands.input(X), residual = operands.input(RESIDUAL);
    const Input weight = operands.input(WEIGHT), bias = operands.input(BIAS);
    require_axes(api, x, 0);
    if (residual.data != nullptr) require_axes(api, residual, 0);
    const bool differ = residual.data != nullptr && !is_same_shape(x, residual);
    Input shape = differ ? sum_shape(api, x, residual) : x;
    shape.data = x.data;
    require_axes(api, shape);
    NormTile tile{};
    tile.size = shape.size(shape.rank - 1);
    auto is_row = [&](const Input& input) { return input.data != nullptr && input.rank == 1 && input.size(0) == tile.size; };
    require(api, is_row(weight) && (bias.data == nullptr || is_row(bias)),
            "tformer-kernels: a norm's weight and bias must have a number for each number of a row");
    tile.out = operands.output(0, shape.sizes, shape.rank);
    tile.sum = residual.data != nullptr ? operands.output(1, shape.sizes, shape.rank) : nullptr;
    tile.rows = rows_of(shape);
    if (tile.rows * tile.size == 0) return;
    tile.x = x.floats(), tile.residual = residual.data != nullptr ? residual.floats() : nullptr;
    if (differ) {
      float* sum = tile.sum != nullptr ? tile.sum : tile.out;
      add_repeated(x, residual, shape, sum);
      tile.x = sum, tile.residual = nullptr, tile.sum = nullptr;
    }
    tile.weight = weight.floats(), tile.bias = bias.data != nullptr ? bias.floats() : nullptr;
    tile.epsilon = epsilon, tile.root_mean_square = root_mean_square;
    normalise(*path, tile, parallel_for, &operands);
  }

 private:
  const Path* const path;
  const float epsilon;
  const bool root_mean_square;
};

class Gate final : public Operator {
 public:
  explicit Gate(const Attributes& attributes)
      : path(attributes.path()), first(attributes.integer("first") != 0), activation(attributes.activation()) {}

  void run(Operands& operands) const override {
    Input x = operands.input(0);
    require_axes(operands.api, x);
    const size_t width = x.size(x.rank - 1);
    require(operands.api, width % 2 == 0, "tformer-kernels: a gate needs rows of an even length");
    GateTile tile{x.floats(), nullptr, rows_of(x), width / 2, first, activation};
    x.sizes[x.rank - 1] = static_cast<int64_t>(tile.size);
    tile.out = operands.output(0, x.sizes, x.rank);
    if (tile.rows * tile.size > 0) gate(*path, tile, parallel_for, &operands);
  }

 private:
  const Path* const path;
  const bool first;
  const Activation activation;
};

}  // namespace

const OperatorKind NORM = {"Norm", NORM_INPUTS, 2, 1 << RESIDUAL | 1 << BIAS, 0, false, make_operator<Norm>};
const OperatorKind GATE = {"Gate", 1, 1, 0, 0, false, make_operator<Gate>};

}  // namespace tformer

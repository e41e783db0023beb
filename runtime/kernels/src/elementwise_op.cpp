// The operators of norms and gates, in the domain ai.tformer.
//
// Norm (x, residual, weight, bias) → (y, sum) normalises rows, of x + residual if there is a residual: `NormTile` says how.
// Attributes: `path`, the place of a path in the list of paths; epsilon, root_mean_square.
//
// Gate (x) → (y) multiplies one half of each row, activated, by the other half. Attributes: path, first, and the activation
// (activation, alpha).
#include "broadcast.h"
#include "elementwise.h"
#include "operator.h"

namespace tformer {
namespace {

enum NormInput : size_t { X, RESIDUAL, WEIGHT, BIAS, NORM_INPUTS };

constexpr char AXES[] = "tformer-kernels: a norm or a gate needs an input of 1 to 32 axes";

void require_axes(const ort::Api* api, const Input& input, size_t least = 1) {
  require(api, input.data != nullptr && input.rank >= least && input.rank <= MAX_RANK, AXES);
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
    if (!differ) require_axes(api, x);
    const Shape shape = differ ? broadcast_shape(api, x, residual) : Shape(x);
    require(api, shape.rank > 0, AXES);
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
      combine(x, residual, shape, sum, [](float a, float b) { return a + b; });
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
    const Input x = operands.input(0);
    require_axes(operands.api, x);
    const size_t width = x.size(x.rank - 1);
    require(operands.api, width % 2 == 0, "tformer-kernels: a gate needs rows of an even length");
    GateTile tile{x.floats(), nullptr, rows_of(x), width / 2, first, activation};
    Shape shape(x);
    shape.sizes[x.rank - 1] = static_cast<int64_t>(tile.size);
    tile.out = operands.output(0, shape.sizes, x.rank);
    if (tile.rows * tile.size > 0) gate(*path, tile, parallel_for, &operands);
  }

 private:
  const Path* const path;
  const bool first;
  const Activation activation;
};

}  // namespace

const OperatorKind NORM = {"Norm", NORM_INPUTS, 2, 1 << RESIDUAL | 1 << BIAS, "ffff", "aa--", false, make_operator<Norm>};
const OperatorKind GATE = {"Gate", 1, 1, 0, "f", "r", false, make_operator<Gate>};

}  // namespace tformer

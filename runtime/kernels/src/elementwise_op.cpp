// The operators of norms and gates, in the domain ai.tformer.
//
// Norm (x, residual, weight, bias) → (y, sum) normalises rows, of x + residual if there is a residual: `NormTile` says how.
// Attributes: `path`, the place of a path in the list of paths; epsilon, root_mean_square.
//
// Gate (x) → (y) multiplies one half of each row, activated, by the other half. Attributes: path, first, and the activation
// (activation, alpha).
#include "elementwise_op.h"

#include <algorithm>
#include <memory>

#include "elementwise.h"
#include "operator.h"

namespace tformer {
namespace {

enum NormInput : size_t { X, RESIDUAL, WEIGHT, BIAS, NORM_INPUTS };

struct NormKernel {
  const ort::Api* api;
  const Path* path;
  float epsilon;
  bool root_mean_square;
};

struct GateKernel {
  const ort::Api* api;
  const Path* path;
  bool first;
  Activation activation;
};

void require_axes(const ort::Api* api, const Input& input, size_t least = 1) {
  if (input.data == nullptr || input.rank < least || input.rank > MAX_RANK)
    fail(api, "tformer-kernels: a norm or a gate needs an input of 1 to 32 axes");
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

void run_norm(const NormKernel& kernel, ort::KernelContext* context) {
  const ort::Api* api = kernel.api;
  const Input x = read_input(api, context, X), residual = read_input(api, context, RESIDUAL);
  const Input weight = read_input(api, context, WEIGHT), bias = read_input(api, context, BIAS);
  require_axes(api, x, 0);
  if (residual.data != nullptr) require_axes(api, residual, 0);
  const bool differ = residual.data != nullptr && !is_same_shape(x, residual);
  Input shape = differ ? sum_shape(api, x, residual) : x;
  shape.data = x.data;
  require_axes(api, shape);
  NormTile tile{};
  tile.size = shape.size(shape.rank - 1);
  auto is_row = [&](const Input& input) { return input.data != nullptr && input.rank == 1 && input.size(0) == tile.size; };
  if (!is_row(weight) || (bias.data != nullptr && !is_row(bias)))
    fail(api, "tformer-kernels: a norm's weight and bias must have a number for each number of a row");
  tile.out = write_output(api, context, 0, shape.sizes, shape.rank);
  tile.sum = residual.data != nullptr ? write_output(api, context, 1, shape.sizes, shape.rank) : nullptr;
  tile.rows = rows_of(shape);
  if (tile.rows * tile.size == 0) return;
  tile.x = x.floats(), tile.residual = residual.data != nullptr ? residual.floats() : nullptr;
  if (differ) {
    float* sum = tile.sum != nullptr ? tile.sum : tile.out;
    add_repeated(x, residual, shape, sum);
    tile.x = sum, tile.residual = nullptr, tile.sum = nullptr;
  }
  tile.weight = weight.floats(), tile.bias = bias.data != nullptr ? bias.floats() : nullptr;
  tile.epsilon = kernel.epsilon, tile.root_mean_square = kernel.root_mean_square;
  Parallel parallel{api, context};
  normalise(*kernel.path, tile, parallel_for, &parallel);
}

void run_gate(const GateKernel& kernel, ort::KernelContext* context) {
  const ort::Api* api = kernel.api;
  Input x = read_input(api, context, 0);
  require_axes(api, x);
  const size_t width = x.size(x.rank - 1);
  if (width % 2 != 0) fail(api, "tformer-kernels: a gate needs rows of an even length");
  GateTile tile{x.floats(), nullptr, rows_of(x), width / 2, kernel.first, kernel.activation};
  x.sizes[x.rank - 1] = static_cast<int64_t>(tile.size);
  tile.out = write_output(api, context, 0, x.sizes, x.rank);
  Parallel parallel{api, context};
  if (tile.rows * tile.size > 0) gate(*kernel.path, tile, parallel_for, &parallel);
}

template <class Kernel, class Read>
ort::Status* create(const ort::Api* api, const ort::KernelInfo* info, void** out, const Read& read) {
  return guarded(api, [&] {
    auto kernel = std::make_unique<Kernel>();
    kernel->api = api;
    kernel->path = path_of(api, info);
    read(*kernel);
    *out = kernel.release();
  });
}

}  // namespace

ort::CustomOp norm_operator() {
  ort::CustomOp op = describe_common();
  op.GetName = [](const ort::CustomOp*) { return "Norm"; };
  op.GetInputTypeCount = [](const ort::CustomOp*) -> size_t { return NORM_INPUTS; };
  op.GetOutputTypeCount = [](const ort::CustomOp*) -> size_t { return 2; };
  op.GetInputCharacteristic = [](const ort::CustomOp*, size_t i) { return i == X || i == WEIGHT ? ort::REQUIRED : ort::OPTIONAL; };
  op.GetOutputCharacteristic = [](const ort::CustomOp*, size_t i) { return i == 0 ? ort::REQUIRED : ort::OPTIONAL; };
  op.CreateKernelV2 = [](const ort::CustomOp*, const ort::Api* api, const ort::KernelInfo* info, void** out) {
    return create<NormKernel>(api, info, out, [&](NormKernel& kernel) {
      kernel.epsilon = number(api, info, "epsilon");
      kernel.root_mean_square = integer(api, info, "root_mean_square") != 0;
    });
  };
  op.KernelComputeV2 = [](void* state, ort::KernelContext* context) {
    const NormKernel& kernel = *static_cast<NormKernel*>(state);
    return guarded(kernel.api, [&] { run_norm(kernel, context); });
  };
  op.KernelDestroy = [](void* state) { delete static_cast<NormKernel*>(state); };
  return op;
}

ort::CustomOp gate_operator() {
  ort::CustomOp op = describe_common();
  op.GetName = [](const ort::CustomOp*) { return "Gate"; };
  op.CreateKernelV2 = [](const ort::CustomOp*, const ort::Api* api, const ort::KernelInfo* info, void** out) {
    return create<GateKernel>(api, info, out, [&](GateKernel& kernel) {
      kernel.first = integer(api, info, "first") != 0;
      kernel.activation = read_activation(api, info);
    });
  };
  op.KernelComputeV2 = [](void* state, ort::KernelContext* context) {
    const GateKernel& kernel = *static_cast<GateKernel*>(state);
    return guarded(kernel.api, [&] { run_gate(kernel, context); });
  };
  op.KernelDestroy = [](void* state) { delete static_cast<GateKernel*>(state); };
  return op;
}

}  // namespace tformer

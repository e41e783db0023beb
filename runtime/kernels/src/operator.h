// What the operators share: errors as statuses, attributes, inputs and results, onnxruntime's threads, and the
// description of an operator.
#pragma once

#include <algorithm>
#include <new>

#include "matrix.h"
#include "ort_abi.h"
#include "paths.h"

namespace tformer {
namespace {

constexpr size_t MAX_RANK = 32;  // as many as arrays of NumPy had before its second version

struct Failure {
  ort::Status* status;
};

[[maybe_unused]] inline void check(ort::Status* status) {
  if (status != nullptr) throw Failure{status};
}

[[noreturn]] inline void fail(const ort::Api* api, const char* message) {
  throw Failure{ort::CreateStatus::call(api, ort::INVALID_ARGUMENT, message)};
}

// Runs a function and returns its error as a status: no exception may reach onnxruntime.
template <class Body>
ort::Status* guarded(const ort::Api* api, const Body& body) {
  try {
    body();
    return nullptr;
  } catch (const Failure& failure) {
    return failure.status;
  } catch (const std::bad_alloc&) {
    return ort::CreateStatus::call(api, ort::FAIL, "tformer-kernels: bad_alloc, there is not enough memory");
  } catch (...) {
    return ort::CreateStatus::call(api, ort::FAIL, "tformer-kernels: an unexpected error");
  }
}

[[maybe_unused]] inline int64_t integer(const ort::Api* api, const ort::KernelInfo* info, const char* name) {
  int64_t value = 0;
  check(ort::KernelInfoGetAttribute_int64::call(api, info, name, &value));
  return value;
}

[[maybe_unused]] inline float number(const ort::Api* api, const ort::KernelInfo* info, const char* name) {
  float value = 0;
  check(ort::KernelInfoGetAttribute_float::call(api, info, name, &value));
  return value;
}

// The path of the attribute `path`, its place in the list of paths.
[[maybe_unused]] inline const Path* path_of(const ort::Api* api, const ort::KernelInfo* info) {
  constexpr int64_t MAX_PATHS = 64;
  const int64_t place = integer(api, info, "path");
  const Path* path = place >= 0 && place < MAX_PATHS ? path_at(static_cast<size_t>(place)) : nullptr;
  if (path == nullptr || !path->supported()) fail(api, "tformer-kernels: this processor lacks the path");
  return path;
}

// The activation of the attributes `activation` and `alpha`.
[[maybe_unused]] inline Activation read_activation(const ort::Api* api, const ort::KernelInfo* info) {
  const int64_t kind = integer(api, info, "activation");
  if (kind < Activation::NONE || kind > Activation::SWISH) fail(api, "tformer-kernels: there is no such activation");
  return {static_cast<Activation::Kind>(kind), number(api, info, "alpha")};
}

struct Parallel {
  const ort::Api* api;
  ort::KernelContext* context;
};

// A batch for each task: threads take tasks one by one, so that a thread which the system delays leaves its share to the others.
[[maybe_unused]] inline void parallel_for(void* context, void (*function)(void*, size_t), size_t count, void* data) {
  auto* parallel = static_cast<Parallel*>(context);
  check(ort::KernelContext_ParallelFor::call(parallel->api, parallel->context, function, count, count, data));
}

// An input; data is nullptr if it is not there. Sizes are known of at most MAX_RANK axes.
struct Input {
  const void* data = nullptr;
  size_t rank = 0;
  int64_t sizes[MAX_RANK] = {};

  const float* floats() const { return static_cast<const float*>(data); }
  size_t size(size_t axis) const { return static_cast<size_t>(sizes[axis]); }
};

// The product of all sizes but the last.
[[maybe_unused]] inline size_t rows_of(const Input& input) {
  size_t rows = 1;
  for (size_t axis = 0; axis + 1 < input.rank; axis++) rows *= input.size(axis);
  return rows;
}

// Reads the shape of a tensor. Older versions of onnxruntime copy it to the heap first, which takes 0.2 µs.
[[maybe_unused]] inline void read_shape(const ort::Api* api, const ort::Value* value, Input& input) {
  if (const ort::Api* newer = ort::shape_api.load(std::memory_order_relaxed)) {
    ort::ElementType type;
    const int64_t* sizes = nullptr;
    check(ort::GetTensorElementTypeAndShapeDataReference::call(newer, value, &type, &sizes, &input.rank));
    if (input.rank <= MAX_RANK) std::copy_n(sizes, input.rank, input.sizes);
    return;
  }
  ort::TypeAndShape* shape = nullptr;
  check(ort::GetTensorTypeAndShape::call(api, value, &shape));
  ort::Status* status = ort::GetDimensionsCount::call(api, shape, &input.rank);
  if (status == nullptr && input.rank <= MAX_RANK) status = ort::GetDimensions::call(api, shape, input.sizes, input.rank);
  ort::ReleaseTypeAndShape::call(api, shape);
  check(status);
}

[[maybe_unused]] inline Input read_input(const ort::Api* api, ort::KernelContext* context, size_t index) {
  Input input;
  const ort::Value* value = nullptr;
  check(ort::KernelContext_GetInput::call(api, context, index, &value));
  if (value == nullptr) return input;
  read_shape(api, value, input);
  void* data = nullptr;
  check(ort::GetTensorMutableData::call(api, const_cast<ort::Value*>(value), &data));
  static const float nothing = 0;  // onnxruntime may give no address for tensors without numbers
  input.data = data == nullptr ? &nothing : data;
  return input;
}

[[maybe_unused]] inline float* write_output(const ort::Api* api, ort::KernelContext* context, size_t index, const int64_t* sizes, size_t rank) {
  ort::Value* value = nullptr;
  check(ort::KernelContext_GetOutput::call(api, context, index, sizes, rank, &value));
  if (value == nullptr) return nullptr;
  void* data = nullptr;
  check(ort::GetTensorMutableData::call(api, value, &data));
  static float nothing = 0;  // for tensors without numbers, as above
  return data == nullptr ? &nothing : static_cast<float*>(data);
}

// An operator of the CPU with one input and one result of float32.
[[maybe_unused]] inline ort::CustomOp describe_common() {
  ort::CustomOp op{};
  op.version = ort::API_VERSION;
  op.GetExecutionProviderType = [](const ort::CustomOp*) { return "CPUExecutionProvider"; };
  op.GetInputType = op.GetOutputType = [](const ort::CustomOp*, size_t) { return ort::FLOAT; };
  op.GetInputTypeCount = op.GetOutputTypeCount = [](const ort::CustomOp*) -> size_t { return 1; };
  op.GetInputCharacteristic = op.GetOutputCharacteristic = [](const ort::CustomOp*, size_t) { return ort::REQUIRED; };
  op.GetInputMemoryType = [](const ort::CustomOp*, size_t) { return 0; };
  op.GetVariadicInputMinArity = op.GetVariadicInputHomogeneity = [](const ort::CustomOp*) { return 1; };
  op.GetVariadicOutputMinArity = op.GetVariadicOutputHomogeneity = [](const ort::CustomOp*) { return 1; };
  op.GetStartVersion = [](const ort::CustomOp*) { return 1; };
  op.GetEndVersion = [](const ort::CustomOp*) { return 1; };
  return op;
}

}  // namespace
}  // namespace tformer

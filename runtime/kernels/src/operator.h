// What the operators share: errors as statuses, attributes, inputs and results, and onnxruntime's threads.
#pragma once

#include <algorithm>
#include <memory>
#include <new>
#include <string>

#include "matrix.h"
#include "ort_abi.h"
#include "paths.h"

namespace tformer {

constexpr size_t MAX_RANK = 32;  // as many as arrays of NumPy had before its second version

struct Failure {
  ort::Status* status;
};

inline void check(ort::Status* status) {
  if (status != nullptr) throw Failure{status};
}

[[noreturn]] inline void fail(const ort::Api* api, const char* message) {
  throw Failure{ort::CreateStatus::call(api, ort::INVALID_ARGUMENT, message)};
}

inline void require(const ort::Api* api, bool holds, const char* message) {
  if (!holds) fail(api, message);
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

// The attributes of an operator. Those of an operator of a chain have a prefix.
struct Attributes {
  const ort::Api* api;
  const ort::KernelInfo* info;
  std::string prefix;

  int64_t integer(const char* name) const {
    int64_t value = 0;
    check(ort::KernelInfoGetAttribute_int64::call(api, info, (prefix + name).c_str(), &value));
    return value;
  }

  float number(const char* name) const {
    float value = 0;
    check(ort::KernelInfoGetAttribute_float::call(api, info, (prefix + name).c_str(), &value));
    return value;
  }

  std::string text(const char* name) const {
    const std::string full = prefix + name;
    size_t size = 0;  // with the zero at the end
    check(ort::KernelInfoGetAttribute_string::call(api, info, full.c_str(), nullptr, &size));
    std::string value(size, '\0');
    check(ort::KernelInfoGetAttribute_string::call(api, info, full.c_str(), value.data(), &size));
    value.resize(size > 0 ? size - 1 : 0);
    return value;
  }

  // The path of the attribute `path`, its place in the list of paths.
  const Path* path() const {
    constexpr int64_t MAX_PATHS = 64;
    const int64_t place = integer("path");
    const Path* found = place >= 0 && place < MAX_PATHS ? path_at(static_cast<size_t>(place)) : nullptr;
    require(api, found != nullptr && found->supported(), "tformer-kernels: this processor lacks the path");
    return found;
  }

  // The activation of the attributes `activation` and `alpha`.
  Activation activation() const {
    const int64_t kind = integer("activation");
    require(api, kind >= Activation::NONE && kind <= Activation::SWISH, "tformer-kernels: there is no such activation");
    return {static_cast<Activation::Kind>(kind), number("alpha")};
  }
};

// An input; data is nullptr if it is not there. Sizes are known of at most MAX_RANK axes.
struct Input {
  const void* data = nullptr;
  ort::ElementType type = ort::FLOAT;
  size_t rank = 0;
  int64_t sizes[MAX_RANK] = {};

  const float* floats() const { return static_cast<const float*>(data); }
  size_t size(size_t axis) const { return static_cast<size_t>(sizes[axis]); }
};

// The product of all sizes but the last.
inline size_t rows_of(const Input& input) {
  size_t rows = 1;
  for (size_t axis = 0; axis + 1 < input.rank; axis++) rows *= input.size(axis);
  return rows;
}

// Where an operator reads its inputs and writes its results: onnxruntime's context, or the values of a chain.
class Operands {
 public:
  const ort::Api* const api;
  ort::KernelContext* const context;  // of the operator that onnxruntime runs

  Operands(const ort::Api* api, ort::KernelContext* context) : api(api), context(context) {}
  virtual ~Operands() = default;

  virtual Input input(size_t index) = 0;

  // Memory for a result; nullptr if nobody reads it.
  virtual float* output(size_t index, const int64_t* sizes, size_t rank) = 0;
};

// A batch for each task: threads take tasks one by one, so that a thread which the system delays leaves its share to the
// others. operands: those of the operator.
inline void parallel_for(void* operands, void (*function)(void*, size_t), size_t count, void* data) {
  const Operands& running = *static_cast<const Operands*>(operands);
  check(ort::KernelContext_ParallelFor::call(running.api, running.context, function, count, count, data));
}

// An operator with its attributes. Several threads may run it at the same time.
class Operator {
 public:
  virtual ~Operator() = default;
  virtual void run(Operands& operands) const = 0;
};

template <class Kind>
std::unique_ptr<Operator> make_operator(const Attributes& attributes) {
  return std::make_unique<Kind>(attributes);
}

// A kind of operators of float32. A chain has any number of inputs and results.
struct OperatorKind {
  const char* name;
  size_t inputs, outputs;  // the first result alone must be there
  uint32_t optional;       // bit i: input i may be missing
  uint32_t integers;       // bit i: input i is of int32
  bool is_chain;
  std::unique_ptr<Operator> (*make)(const Attributes& attributes);
};

extern const OperatorKind ROW_QUANTIZED_MATMUL, PACKED_MATMUL;  // product_op.cpp
extern const OperatorKind ATTENTION, CONTEXT_ATTENTION;         // attention_op.cpp
extern const OperatorKind NORM, GATE;                           // elementwise_op.cpp
extern const OperatorKind CHAIN;                                // chain_op.cpp

constexpr const OperatorKind* KINDS[] = {&ROW_QUANTIZED_MATMUL, &PACKED_MATMUL, &ATTENTION, &CONTEXT_ATTENTION,
                                         &NORM, &GATE, &CHAIN};

}  // namespace tformer

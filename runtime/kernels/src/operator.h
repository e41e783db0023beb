// What the operators share: errors as statuses, attributes, inputs and results, and onnxruntime's threads.
#pragma once

#include <algorithm>
#include <memory>
#include <new>
#include <string>

#include "matrix.h"
#include "ort_abi.h"
#include "paths.h"
#include "product.h"

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

// An input; data is nullptr if it is not there.
struct Input {
  const void* data = nullptr;
  ort::ElementType type = ort::FLOAT;
  size_t rank = 0;
  const int64_t* sizes = nullptr;

  const float* floats() const { return static_cast<const float*>(data); }
  size_t size(size_t axis) const { return static_cast<size_t>(sizes[axis]); }
};

// A shape that is computed.
struct Shape {
  size_t rank = 0;
  int64_t sizes[MAX_RANK];

  Shape() = default;
  explicit Shape(const Input& input) : rank(input.rank) { std::copy_n(input.sizes, std::min(rank, MAX_RANK), sizes); }

  size_t size(size_t axis) const { return static_cast<size_t>(sizes[axis]); }
};

constexpr size_t MAX_NUMBERS = size_t{1} << 60;  // of a value
constexpr size_t NONE = ~size_t{0};              // the number of a value that is not there

// The product of sizes. Throws bad_alloc if no memory holds as many numbers.
inline size_t count_of(const int64_t* sizes, size_t rank) {
  if (std::find(sizes, sizes + rank, 0) != sizes + rank) return 0;
  size_t count = 1;
  for (size_t axis = 0; axis < rank; axis++)
    if (__builtin_mul_overflow(count, static_cast<size_t>(sizes[axis]), &count) || count > MAX_NUMBERS) throw std::bad_alloc();
  return count;
}

// The product of all sizes but the last.
template <class Sized>
size_t rows_of(const Sized& array) {
  size_t rows = 1;
  for (size_t axis = 0; axis + 1 < array.rank; axis++) rows *= array.size(axis);
  return rows;
}

// Where an operator reads its inputs and writes its results: onnxruntime's context, or the values of a chain.
class Operands {
 public:
  const ort::Api* const api;
  ort::KernelContext* const context;  // of the operator that onnxruntime runs
  const bool has_threads;             // whether it may use onnxruntime's threads

  Operands(const ort::Api* api, ort::KernelContext* context, bool has_threads = true)
      : api(api), context(context), has_threads(has_threads) {}
  virtual ~Operands() = default;

  virtual Input input(size_t index) = 0;

  // Memory for a result; nullptr if nobody reads it.
  virtual float* output(size_t index, const int64_t* sizes, size_t rank) = 0;
};

// A batch for each task: threads take tasks one by one, so that a thread which the system delays leaves its share to the
// others. operands: those of the operator.
inline void parallel_for(void* operands, void (*function)(void*, size_t), size_t count, void* data) {
  const Operands& running = *static_cast<const Operands*>(operands);
  if (!running.has_threads) return run_alone(operands, function, count, data);
  check(ort::KernelContext_ParallelFor::call(running.api, running.context, function, count, count, data));
}

// An operator with its attributes. Several threads may run it at the same time.
class Operator {
 public:
  virtual ~Operator() = default;
  virtual void run(Operands& operands) const = 0;

  // The matrix that it multiplies with; nullptr for none.
  virtual const Matrix* weights() const { return nullptr; }
};

template <class Kind>
std::unique_ptr<Operator> make_operator(const Attributes& attributes) {
  return std::make_unique<Kind>(attributes);
}

// A kind of operators, whose results are float32. A chain has any number of inputs and results.
//
// types: of each input: f float32, i int32, l int64, * any.
// axes: what axis 0 of each input is, so that a chain can divide a batch:
//   r: the batch; axis 1 are its positions, axis 2 their numbers. The first result has the same axes 0 and 1
//   p: the batch; axis 1 are its positions
//   b: the batch
//   a: as r; or the input is one that all sequences share, with fewer axes or an axis 0 of size 1
//   m: the batch, of four axes; or the input is one that all sequences share, as for a
//   c: a context: the batch, or groups of neighbouring sequences of it
//   g: the groups of the context, of four axes; or the input is one that all sequences share, as for a
//   -: the input is one that all sequences share
struct OperatorKind {
  const char* name;
  size_t inputs, outputs;  // the first result alone must be there
  uint32_t optional;       // bit i: input i may be missing
  const char *types, *axes;
  bool is_chain;
  std::unique_ptr<Operator> (*make)(const Attributes& attributes);

  // Of input i.
  ort::ElementType type(size_t i) const {
    return types[i] == 'f' ? ort::FLOAT : types[i] == 'i' ? ort::INT32 : types[i] == 'l' ? ort::INT64 : ort::ANY;
  }
};

extern const OperatorKind ROW_QUANTIZED_MATMUL, PACKED_MATMUL;  // product_op.cpp
extern const OperatorKind ATTENTION, CONTEXT_ATTENTION;         // attention_op.cpp
extern const OperatorKind NORM, GATE;                           // elementwise_op.cpp
extern const OperatorKind LOOKUP, ARITHMETIC, SELECT;           // rows_op.cpp
extern const OperatorKind CHAIN;                                // chain_op.cpp

constexpr const OperatorKind* KINDS[] = {&ROW_QUANTIZED_MATMUL, &PACKED_MATMUL, &ATTENTION, &CONTEXT_ATTENTION, &NORM,
                                         &GATE, &LOOKUP, &ARITHMETIC, &SELECT, &CHAIN};

}  // namespace tformer

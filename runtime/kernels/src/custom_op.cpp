// The operators of the domain ai.tformer: rows x (…, K) of float32 times a packed matrix (K, N).
//
// RowQuantizedMatMul (x) → (y) has integer weights. Attributes: `handle` of the matrix, and how rows are scaled
// (`RowScaling` and `Tile` say what each means): magnitude, zero, reciprocal, column_first (integers), floor, step,
// fixed_scale (floats).
//
// PackedMatMul (x) → (y) has float32 weights. Attribute: `handle`.
#include <atomic>
#include <cstring>
#include <memory>
#include <new>

#include "export.h"
#include "ort_abi.h"
#include "product.h"
#include "store.h"

namespace tformer {
namespace {

constexpr size_t MAX_RANK = 8;

struct QuantizedKernel {
  static constexpr const char* NAME = "RowQuantizedMatMul";
  const ort::Api* api;
  std::shared_ptr<const Matrix> matrix;
  RowScaling scaling;
  bool column_first;

  bool fits() const { return matrix->bits != FLOAT_BITS; }
  void read_attributes(const ort::KernelInfo* info);
  void run(const float* x, float* out, size_t rows, ParallelFor parallel_for, void* context) const {
    multiply(Call{matrix.get(), scaling, column_first, x, out, rows}, parallel_for, context);
  }
};

struct FloatKernel {
  static constexpr const char* NAME = "PackedMatMul";
  const ort::Api* api;
  std::shared_ptr<const Matrix> matrix;

  bool fits() const { return matrix->bits == FLOAT_BITS; }
  void read_attributes(const ort::KernelInfo*) {}
  void run(const float* x, float* out, size_t rows, ParallelFor parallel_for, void* context) const {
    multiply(FloatCall{matrix.get(), x, out, rows}, parallel_for, context);
  }
};

struct Failure {
  ort::Status* status;
};

void check(ort::Status* status) {
  if (status != nullptr) throw Failure{status};
}

[[noreturn]] void fail(const ort::Api* api, const char* message) {
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

int64_t integer(const ort::Api* api, const ort::KernelInfo* info, const char* name) {
  int64_t value = 0;
  check(ort::KernelInfoGetAttribute_int64::call(api, info, name, &value));
  return value;
}

float number(const ort::Api* api, const ort::KernelInfo* info, const char* name) {
  float value = 0;
  check(ort::KernelInfoGetAttribute_float::call(api, info, name, &value));
  return value;
}

void QuantizedKernel::read_attributes(const ort::KernelInfo* info) {
  const int64_t zero = integer(api, info, "zero");
  if (zero < 0 || zero > 255) fail(api, "tformer-kernels: zero must be 0 to 255");
  scaling.zero = static_cast<int>(zero);
  scaling.magnitude = integer(api, info, "magnitude") != 0;
  scaling.reciprocal = integer(api, info, "reciprocal") != 0;
  scaling.floor = number(api, info, "floor");
  scaling.step = number(api, info, "step");
  scaling.fixed_scale = number(api, info, "fixed_scale");
  column_first = integer(api, info, "column_first") != 0;
}

template <class Kernel>
ort::Status* create(const ort::CustomOp*, const ort::Api* api, const ort::KernelInfo* info, void** out) {
  return guarded(api, [&] {
    auto kernel = std::make_unique<Kernel>();
    kernel->api = api;
    kernel->matrix = find_matrix(integer(api, info, "handle"));
    if (!kernel->matrix || !kernel->fits()) fail(api, "tformer-kernels: the handle is of no packed matrix of this operator");
    kernel->read_attributes(info);
    *out = kernel.release();
  });
}

struct Parallel {
  const ort::Api* api;
  ort::KernelContext* context;
};

// A batch for each task: threads take tasks one by one, so that a thread which the system delays leaves its share to the others.
void parallel_for(void* context, void (*function)(void*, size_t), size_t count, void* data) {
  auto* parallel = static_cast<Parallel*>(context);
  check(ort::KernelContext_ParallelFor::call(parallel->api, parallel->context, function, count, count, data));
}

template <class Kernel>
ort::Status* compute(void* state, ort::KernelContext* context) {
  const Kernel& kernel = *static_cast<Kernel*>(state);
  const ort::Api* api = kernel.api;
  return guarded(api, [&] {
    const Matrix& matrix = *kernel.matrix;
    const ort::Value* x = nullptr;
    check(ort::KernelContext_GetInput::call(api, context, 0, &x));
    ort::TypeAndShape* shape = nullptr;
    check(ort::GetTensorTypeAndShape::call(api, x, &shape));
    size_t rank = 0;
    int64_t sizes[MAX_RANK];
    ort::Status* status = ort::GetDimensionsCount::call(api, shape, &rank);
    if (status == nullptr && rank >= 1 && rank <= MAX_RANK) status = ort::GetDimensions::call(api, shape, sizes, rank);
    ort::ReleaseTypeAndShape::call(api, shape);
    check(status);
    if (rank < 1 || rank > MAX_RANK || sizes[rank - 1] != static_cast<int64_t>(matrix.inner))
      fail(api, "tformer-kernels: the input's last axis must have as many numbers as the matrix has rows");
    size_t rows = 1;
    for (size_t i = 0; i + 1 < rank; i++) rows *= static_cast<size_t>(sizes[i]);
    sizes[rank - 1] = static_cast<int64_t>(matrix.columns);
    ort::Value* y = nullptr;
    check(ort::KernelContext_GetOutput::call(api, context, 0, sizes, rank, &y));
    void *in = nullptr, *out = nullptr;
    check(ort::GetTensorMutableData::call(api, const_cast<ort::Value*>(x), &in));
    check(ort::GetTensorMutableData::call(api, y, &out));
    Parallel parallel{api, context};
    kernel.run(static_cast<const float*>(in), static_cast<float*>(out), rows, parallel_for, &parallel);
  });
}

template <class Kernel>
ort::CustomOp describe() {
  ort::CustomOp op{};
  op.version = ort::API_VERSION;
  op.GetName = [](const ort::CustomOp*) { return Kernel::NAME; };
  op.GetExecutionProviderType = [](const ort::CustomOp*) { return "CPUExecutionProvider"; };
  op.GetInputType = op.GetOutputType = [](const ort::CustomOp*, size_t) { return ort::FLOAT; };
  op.GetInputTypeCount = op.GetOutputTypeCount = [](const ort::CustomOp*) -> size_t { return 1; };
  op.GetInputCharacteristic = op.GetOutputCharacteristic = [](const ort::CustomOp*, size_t) { return ort::REQUIRED; };
  op.GetInputMemoryType = [](const ort::CustomOp*, size_t) { return 0; };
  op.GetVariadicInputMinArity = op.GetVariadicInputHomogeneity = [](const ort::CustomOp*) { return 1; };
  op.GetVariadicOutputMinArity = op.GetVariadicOutputHomogeneity = [](const ort::CustomOp*) { return 1; };
  op.CreateKernelV2 = create<Kernel>;
  op.KernelComputeV2 = compute<Kernel>;
  op.KernelDestroy = [](void* state) { delete static_cast<Kernel*>(state); };
  op.GetStartVersion = [](const ort::CustomOp*) { return 1; };
  op.GetEndVersion = [](const ort::CustomOp*) { return 1; };
  return op;
}

std::atomic<bool> registered{false};

// Whether the table's functions are where this library expects them, as far as calls without side effects show.
bool check_api(const ort::Api* api) {
  ort::Status* status = ort::CreateStatus::call(api, ort::INVALID_ARGUMENT, "tformer");
  if (status == nullptr) return false;
  bool same = ort::GetErrorCode::call(api, status) == ort::INVALID_ARGUMENT &&
              std::strcmp(ort::GetErrorMessage::call(api, status), "tformer") == 0;
  ort::ReleaseStatus::call(api, status);
  return same;
}

}  // namespace
}  // namespace tformer

// Adds the operators to a session's options; onnxruntime calls it when it is given this library. It does nothing if the
// table of onnxruntime's functions is another one than expected, because then no error can be made either.
TFORMER_EXPORT tformer::ort::Status* RegisterCustomOps(tformer::ort::SessionOptions* options,
                                                       const tformer::ort::ApiBase* base) {
  using namespace tformer;
  const ort::Api* api = base->GetApi(ort::API_VERSION);
  if (api == nullptr || !check_api(api)) return nullptr;
  static const ort::CustomOp quantized = describe<QuantizedKernel>(), floats = describe<FloatKernel>();
  static ort::CustomOpDomain* const domain = [api]() -> ort::CustomOpDomain* {  // for all sessions of the process
    ort::CustomOpDomain* created = nullptr;
    ort::Status* status = ort::CreateCustomOpDomain::call(api, "ai.tformer", &created);
    for (const ort::CustomOp* op : {&quantized, &floats})
      if (status == nullptr) status = ort::CustomOpDomain_Add::call(api, created, op);
    if (status == nullptr) return created;
    ort::ReleaseStatus::call(api, status);
    return nullptr;
  }();
  if (domain == nullptr) return nullptr;
  registered = true;
  return ort::AddCustomOpDomain::call(api, options, domain);
}

// Whether `RegisterCustomOps` has found the functions of onnxruntime that it expects.
TFORMER_EXPORT int32_t tformer_kernels_registered() { return tformer::registered; }

// The operators of products, in the domain ai.tformer: rows x (…, K) of float32 times a packed matrix (K, N). And the
// registration of all operators.
//
// RowQuantizedMatMul (x) → (y) has integer weights. Attributes: `handle` of the matrix, the activation of the result
// (`activation`, `alpha`), and how rows are scaled (`RowScaling` and `Tile` say what each means): magnitude, zero, reciprocal,
// column_first (integers), floor, step, fixed_scale (floats).
//
// PackedMatMul (x) → (y) has float32 weights. Attributes: handle, activation, alpha.
//
// Both have the attribute `columns`, which the runtime reads when it rewrites a model.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>

#include "attention_op.h"
#include "elementwise_op.h"
#include "export.h"
#include "operator.h"
#include "product.h"
#include "store.h"

namespace tformer {
namespace {

struct QuantizedKernel {
  static constexpr const char* NAME = "RowQuantizedMatMul";
  const ort::Api* api;
  std::shared_ptr<const Matrix> matrix;
  Activation activation;
  RowScaling scaling;
  bool column_first;

  bool fits() const { return matrix->bits != FLOAT_BITS; }
  void read_attributes(const ort::KernelInfo* info);
  void run(const float* x, float* out, size_t rows, ParallelFor parallel_for, void* context) const {
    multiply(Call{matrix.get(), scaling, column_first, x, out, rows, activation}, parallel_for, context);
  }
};

struct FloatKernel {
  static constexpr const char* NAME = "PackedMatMul";
  const ort::Api* api;
  std::shared_ptr<const Matrix> matrix;
  Activation activation;

  bool fits() const { return matrix->bits == FLOAT_BITS; }
  void read_attributes(const ort::KernelInfo*) {}
  void run(const float* x, float* out, size_t rows, ParallelFor parallel_for, void* context) const {
    multiply(FloatCall{matrix.get(), x, out, rows, activation}, parallel_for, context);
  }
};

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
    kernel->activation = read_activation(api, info);
    kernel->read_attributes(info);
    *out = kernel.release();
  });
}

template <class Kernel>
ort::Status* compute(void* state, ort::KernelContext* context) {
  const Kernel& kernel = *static_cast<Kernel*>(state);
  const ort::Api* api = kernel.api;
  return guarded(api, [&] {
    const Matrix& matrix = *kernel.matrix;
    Input x = read_input(api, context, 0);
    if (x.rank < 1 || x.rank > MAX_RANK || x.size(x.rank - 1) != matrix.inner)
      fail(api, "tformer-kernels: the input's last axis must have as many numbers as the matrix has rows");
    const size_t rows = rows_of(x);
    x.sizes[x.rank - 1] = static_cast<int64_t>(matrix.columns);
    float* out = write_output(api, context, 0, x.sizes, x.rank);
    Parallel parallel{api, context};
    kernel.run(x.floats(), out, rows, parallel_for, &parallel);
  });
}

template <class Kernel>
ort::CustomOp describe() {
  ort::CustomOp op = describe_common();
  op.GetName = [](const ort::CustomOp*) { return Kernel::NAME; };
  op.CreateKernelV2 = create<Kernel>;
  op.KernelComputeV2 = compute<Kernel>;
  op.KernelDestroy = [](void* state) { delete static_cast<Kernel*>(state); };
  return op;
}

std::atomic<bool> registered{false};

// The second number of onnxruntime's version, which is the newest version of its API; 0 if there is none. An older
// onnxruntime that is asked for a newer API writes to standard error.
unsigned minor_version(const ort::ApiBase* base) {
  unsigned major = 0, minor = 0;
  return std::sscanf(base->GetVersionString(), "%u.%u", &major, &minor) == 2 && major == 1 ? minor : 0;
}

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
  if (minor_version(base) >= ort::SHAPE_API_VERSION) ort::shape_api = base->GetApi(ort::SHAPE_API_VERSION);
  static const ort::CustomOp quantized = describe<QuantizedKernel>(), floats = describe<FloatKernel>();
  static const ort::CustomOp attention = attention_operator(), context_attention = context_attention_operator();
  static const ort::CustomOp norm = norm_operator(), gate = gate_operator();
  static ort::CustomOpDomain* const domain = [api]() -> ort::CustomOpDomain* {  // for all sessions of the process
    ort::CustomOpDomain* created = nullptr;
    ort::Status* status = ort::CreateCustomOpDomain::call(api, "ai.tformer", &created);
    for (const ort::CustomOp* op : {&quantized, &floats, &attention, &context_attention, &norm, &gate})
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

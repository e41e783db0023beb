// The operators as onnxruntime sees them, in the domain ai.tformer, and their registration.
#include <atomic>
#include <cstring>
#include <iterator>

#include "export.h"
#include "operator.h"

namespace tformer {
namespace {

class ContextOperands final : public Operands {
 public:
  using Operands::Operands;

  Input input(size_t index) override {
    Input input;
    const ort::Value* value = nullptr;
    check(ort::KernelContext_GetInput::call(api, context, index, &value));
    if (value == nullptr) return input;
    check(ort::GetTensorElementTypeAndShapeDataReference::call(api, value, &input.type, &input.sizes, &input.rank));
    void* data = nullptr;
    check(ort::GetTensorMutableData::call(api, const_cast<ort::Value*>(value), &data));
    static const float nothing = 0;  // onnxruntime may give no address for tensors without numbers
    input.data = data == nullptr ? &nothing : data;
    return input;
  }

  float* output(size_t index, const int64_t* sizes, size_t rank) override {
    ort::Value* value = nullptr;
    check(ort::KernelContext_GetOutput::call(api, context, index, sizes, rank, &value));
    if (value == nullptr) return nullptr;
    void* data = nullptr;
    check(ort::GetTensorMutableData::call(api, value, &data));
    static float nothing = 0;  // for tensors without numbers, as above
    return data == nullptr ? &nothing : static_cast<float*>(data);
  }
};

struct CustomOp : ort::CustomOp {
  const OperatorKind* kind;
};

const OperatorKind& kind_of(const ort::CustomOp* op) { return *static_cast<const CustomOp*>(op)->kind; }

// An operator in a session.
struct Kernel {
  const ort::Api* api;
  std::unique_ptr<Operator> op;
};

CustomOp describe(const OperatorKind& kind) {
  CustomOp op{};
  op.kind = &kind;
  op.version = ort::API_VERSION;
  op.GetName = [](const ort::CustomOp* self) { return kind_of(self).name; };
  op.GetExecutionProviderType = [](const ort::CustomOp*) { return "CPUExecutionProvider"; };
  op.GetInputType = [](const ort::CustomOp* self, size_t i) {
    const OperatorKind& own = kind_of(self);
    return own.is_chain ? ort::ANY : own.type(i);
  };
  op.GetOutputType = [](const ort::CustomOp*, size_t) { return ort::FLOAT; };
  op.GetInputTypeCount = [](const ort::CustomOp* self) { return kind_of(self).inputs; };
  op.GetOutputTypeCount = [](const ort::CustomOp* self) { return kind_of(self).outputs; };
  op.GetInputCharacteristic = [](const ort::CustomOp* self, size_t i) {
    const OperatorKind& own = kind_of(self);
    return own.is_chain ? ort::VARIADIC : own.optional >> i & 1 ? ort::OPTIONAL : ort::REQUIRED;
  };
  op.GetOutputCharacteristic = [](const ort::CustomOp* self, size_t i) {
    return kind_of(self).is_chain ? ort::VARIADIC : i > 0 ? ort::OPTIONAL : ort::REQUIRED;
  };
  op.GetInputMemoryType = [](const ort::CustomOp*, size_t) { return 0; };
  op.GetVariadicInputMinArity = op.GetVariadicOutputMinArity = [](const ort::CustomOp*) { return 1; };
  op.GetVariadicInputHomogeneity = [](const ort::CustomOp*) { return 0; };
  op.GetVariadicOutputHomogeneity = [](const ort::CustomOp*) { return 1; };
  op.GetStartVersion = op.GetEndVersion = [](const ort::CustomOp*) { return 1; };
  op.CreateKernelV2 = [](const ort::CustomOp* self, const ort::Api* api, const ort::KernelInfo* info, void** out) {
    return guarded(api, [&] {
      auto kernel = std::make_unique<Kernel>(Kernel{api, kind_of(self).make({api, info, ""})});
      *out = kernel.release();
    });
  };
  op.KernelComputeV2 = [](void* state, ort::KernelContext* context) {
    const Kernel& kernel = *static_cast<Kernel*>(state);
    return guarded(kernel.api, [&] {
      ContextOperands operands(kernel.api, context);
      kernel.op->run(operands);
    });
  };
  op.KernelDestroy = [](void* state) { delete static_cast<Kernel*>(state); };
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

// The domain with all operators, for all sessions of the process; nullptr if it cannot be made.
ort::CustomOpDomain* make_domain(const ort::Api* api) {
  static CustomOp ops[std::size(KINDS)];
  ort::CustomOpDomain* created = nullptr;
  ort::Status* status = ort::CreateCustomOpDomain::call(api, "ai.tformer", &created);
  for (size_t i = 0; i < std::size(KINDS) && status == nullptr; i++) {
    ops[i] = describe(*KINDS[i]);
    status = ort::CustomOpDomain_Add::call(api, created, &ops[i]);
  }
  if (status == nullptr) return created;
  ort::ReleaseStatus::call(api, status);
  return nullptr;
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
  static ort::CustomOpDomain* const domain = make_domain(api);
  if (domain == nullptr) return nullptr;
  registered = true;
  return ort::AddCustomOpDomain::call(api, options, domain);
}

// Whether `RegisterCustomOps` has found the functions of onnxruntime that it expects.
TFORMER_EXPORT int32_t tformer_kernels_registered() { return tformer::registered; }

// The operators of the domain ai.tformer: rows x (…, K) of float32 times a packed matrix (K, N).
//
// RowQuantizedMatMul (x) → (y) has integer weights. Attributes: `handle` of the matrix, and how rows are scaled
// (`RowScaling` and `Tile` say what each means): magnitude, zero, reciprocal, column_first (integers), floor, step,
// fixed_scale (floats).
//
// PackedMatMul (x) → (y) has float32 weights. Attribute: `handle`.
//
// Attention (query, key, value, past_key, past_value, last, total, cosines, sines, bias, sink) → (y, key_cache, value_cache) is
// GroupQueryAttention of onnxruntime for float32, without its position ids. Without keys and values, `query` has all three.
// Attributes: `path`, the place of a path in the list of paths; heads, groups, causal, scale, interleaved.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>

#include "attention.h"
#include "export.h"
#include "ort_abi.h"
#include "paths.h"
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

// An operator of the CPU with one input and one result of float32.
ort::CustomOp describe_common() {
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

constexpr int64_t MAX_HEADS = 1 << 16;

struct AttentionKernel {
  const ort::Api* api;
  const Path* path;
  size_t heads, groups;
  bool causal, interleaved;
  float scale;
};

enum AttentionInput : size_t { QUERY, KEY, VALUE, PAST_KEY, PAST_VALUE, LAST, TOTAL, COSINES, SINES, BIAS, SINK, INPUTS };

// An input; data is nullptr if it is not there.
struct Input {
  const void* data = nullptr;
  size_t rank = 0;
  int64_t sizes[MAX_RANK] = {};

  const float* floats() const { return static_cast<const float*>(data); }
  size_t size(size_t axis) const { return static_cast<size_t>(sizes[axis]); }
};

Input read_input(const ort::Api* api, ort::KernelContext* context, size_t index, size_t rank) {
  Input input;
  const ort::Value* value = nullptr;
  check(ort::KernelContext_GetInput::call(api, context, index, &value));
  if (value == nullptr) return input;
  ort::TypeAndShape* shape = nullptr;
  check(ort::GetTensorTypeAndShape::call(api, value, &shape));
  ort::Status* status = ort::GetDimensionsCount::call(api, shape, &input.rank);
  if (status == nullptr && input.rank <= MAX_RANK) status = ort::GetDimensions::call(api, shape, input.sizes, input.rank);
  ort::ReleaseTypeAndShape::call(api, shape);
  check(status);
  if (input.rank != rank && index != TOTAL) fail(api, "tformer-kernels: an input of attention has another number of axes");
  void* data = nullptr;
  check(ort::GetTensorMutableData::call(api, const_cast<ort::Value*>(value), &data));
  static const float nothing = 0;  // onnxruntime may give no address for tensors without numbers
  input.data = data == nullptr ? &nothing : data;
  return input;
}

float* write_output(const ort::Api* api, ort::KernelContext* context, size_t index, const int64_t* sizes, size_t rank) {
  ort::Value* value = nullptr;
  check(ort::KernelContext_GetOutput::call(api, context, index, sizes, rank, &value));
  if (value == nullptr) return nullptr;
  void* data = nullptr;
  check(ort::GetTensorMutableData::call(api, value, &data));
  return static_cast<float*>(data);
}

ort::Status* create_attention(const ort::CustomOp*, const ort::Api* api, const ort::KernelInfo* info, void** out) {
  return guarded(api, [&] {
    auto kernel = std::make_unique<AttentionKernel>();
    const int64_t place = integer(api, info, "path"), heads = integer(api, info, "heads");
    const int64_t groups = integer(api, info, "groups");
    kernel->api = api;
    kernel->path = place >= 0 && place < 64 ? path_at(static_cast<size_t>(place)) : nullptr;
    if (kernel->path == nullptr || !kernel->path->supported()) fail(api, "tformer-kernels: this processor lacks the path");
    if (heads < 1 || groups < 1 || heads % groups != 0 || heads > MAX_HEADS)
      fail(api, "tformer-kernels: attention must have as many heads, or a multiple, as heads of keys");
    kernel->heads = static_cast<size_t>(heads);
    kernel->groups = static_cast<size_t>(groups);
    kernel->causal = integer(api, info, "causal") != 0;
    kernel->interleaved = integer(api, info, "interleaved") != 0;
    kernel->scale = number(api, info, "scale");
    *out = kernel.release();
  });
}

void run_attention(const AttentionKernel& kernel, ort::KernelContext* context) {
  const ort::Api* api = kernel.api;
  Input in[INPUTS];
  constexpr size_t RANKS[INPUTS] = {3, 3, 3, 4, 4, 1, 0, 2, 2, 4, 1};
  for (size_t i = 0; i < INPUTS; i++) in[i] = read_input(api, context, i, RANKS[i]);
  const auto require = [&](bool holds, const char* message) {
    if (!holds) fail(api, message);
  };
  require(in[QUERY].data && in[LAST].data && in[TOTAL].data, "tformer-kernels: attention lacks an input");
  require(!in[KEY].data == !in[VALUE].data && !in[PAST_KEY].data == !in[PAST_VALUE].data && !in[COSINES].data == !in[SINES].data,
          "tformer-kernels: attention needs keys and values, sines and cosines together");
  AttentionCall call{};
  const bool packed = in[KEY].data == nullptr;
  call.path = kernel.path;
  call.batch = in[QUERY].size(0), call.length = in[QUERY].size(1);
  call.heads = kernel.heads, call.groups = kernel.groups;
  const size_t width = in[QUERY].size(2), all_heads = packed ? call.heads + 2 * call.groups : call.heads;
  require(width % all_heads == 0, "tformer-kernels: the queries must have the same number of numbers for each head");
  call.size = width / all_heads;
  const size_t key_width = call.groups * call.size;
  call.query_stride = width, call.key_stride = call.value_stride = packed ? width : key_width;
  call.queries = in[QUERY].floats();
  if (packed) {
    call.keys = call.queries + call.heads * call.size;
    call.values = call.keys + key_width;
  } else {
    for (size_t i : {KEY, VALUE})
      require(in[i].size(0) == call.batch && in[i].size(1) == call.length && in[i].size(2) == key_width,
              "tformer-kernels: keys and values must have the shape of the queries");
    call.keys = in[KEY].floats();
    call.values = in[VALUE].floats();
  }
  require(in[LAST].size(0) == call.batch, "tformer-kernels: attention needs a last position for each sequence");
  call.last = static_cast<const int32_t*>(in[LAST].data);
  const int32_t total = *static_cast<const int32_t*>(in[TOTAL].data);
  require(total >= 1, "tformer-kernels: sequences must have positions");
  call.total = static_cast<size_t>(total);
  call.causal = kernel.causal, call.scale = kernel.scale, call.interleaved = kernel.interleaved;
  if (in[COSINES].data) {
    require(in[COSINES].size(0) == in[SINES].size(0) && in[COSINES].size(1) == in[SINES].size(1),
            "tformer-kernels: sines and cosines must have the same shape");
    call.cosines = in[COSINES].floats(), call.sines = in[SINES].floats();
    call.rotated = 2 * in[COSINES].size(1), call.rotary_positions = in[COSINES].size(0);
  }
  if (in[BIAS].data) {
    const Input& bias = in[BIAS];
    require((bias.size(0) == 1 || bias.size(0) == call.batch) && (bias.size(1) == 1 || bias.size(1) == call.heads) &&
                bias.size(2) == call.length && bias.size(3) >= call.total,
            "tformer-kernels: the bias must have a number for each query and position");
    call.bias = bias.floats();
    call.bias_row_stride = bias.size(3);
    call.bias_head_stride = bias.size(1) == 1 ? 0 : bias.size(2) * bias.size(3);
    call.bias_batch_stride = bias.size(0) == 1 ? 0 : bias.size(1) * bias.size(2) * bias.size(3);
  }
  if (in[SINK].data) {
    require(in[SINK].size(0) == call.heads, "tformer-kernels: there must be a sink for each head");
    call.sinks = in[SINK].floats();
  }
  if (in[PAST_KEY].data) {
    for (size_t i : {PAST_KEY, PAST_VALUE})
      require(in[i].size(0) == call.batch && in[i].size(1) == call.groups && in[i].size(2) == in[PAST_KEY].size(2) &&
                  in[i].size(3) == call.size,
              "tformer-kernels: a cache must have the shape (batch, heads of keys, slots, head size)");
    call.past_keys = in[PAST_KEY].floats(), call.past_values = in[PAST_VALUE].floats();
    call.past_slots = in[PAST_KEY].size(2);
    call.slots = std::max({call.past_slots, call.total, call.length});
  }
  require(call.slots > 0 || !call.cosines, "tformer-kernels: rotated keys need a cache");
  const char* refusal = attention_refusal(call);
  require(refusal == nullptr, refusal);
  call.out = write_output(api, context, 0, std::array{in[QUERY].sizes[0], in[QUERY].sizes[1],
                                                      static_cast<int64_t>(call.heads * call.size)}.data(), 3);
  if (call.slots > 0) {
    const std::array cache{in[QUERY].sizes[0], static_cast<int64_t>(call.groups), static_cast<int64_t>(call.slots),
                           static_cast<int64_t>(call.size)};
    call.key_cache = write_output(api, context, 1, cache.data(), 4);
    call.value_cache = write_output(api, context, 2, cache.data(), 4);
    require(call.key_cache && call.value_cache, "tformer-kernels: attention with a cache has three results");
  }
  Parallel parallel{api, context};
  attend(call, parallel_for, &parallel);
}

ort::CustomOp describe_attention() {
  ort::CustomOp op = describe_common();
  op.GetName = [](const ort::CustomOp*) { return "Attention"; };
  op.GetInputType = [](const ort::CustomOp*, size_t i) { return i == LAST || i == TOTAL ? ort::INT32 : ort::FLOAT; };
  op.GetInputTypeCount = [](const ort::CustomOp*) -> size_t { return INPUTS; };
  op.GetOutputTypeCount = [](const ort::CustomOp*) -> size_t { return 3; };
  op.GetInputCharacteristic = [](const ort::CustomOp*, size_t i) {
    return i == QUERY || i == LAST || i == TOTAL ? ort::REQUIRED : ort::OPTIONAL;
  };
  op.GetOutputCharacteristic = [](const ort::CustomOp*, size_t i) { return i == 0 ? ort::REQUIRED : ort::OPTIONAL; };
  op.CreateKernelV2 = create_attention;
  op.KernelComputeV2 = [](void* state, ort::KernelContext* context) {
    const AttentionKernel& kernel = *static_cast<AttentionKernel*>(state);
    return guarded(kernel.api, [&] { run_attention(kernel, context); });
  };
  op.KernelDestroy = [](void* state) { delete static_cast<AttentionKernel*>(state); };
  return op;
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
  static const ort::CustomOp attention = describe_attention();
  static ort::CustomOpDomain* const domain = [api]() -> ort::CustomOpDomain* {  // for all sessions of the process
    ort::CustomOpDomain* created = nullptr;
    ort::Status* status = ort::CreateCustomOpDomain::call(api, "ai.tformer", &created);
    for (const ort::CustomOp* op : {&quantized, &floats, &attention})
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

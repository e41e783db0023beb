// The operators of attention, in the domain ai.tformer.
//
// Attention (query, key, value, past_key, past_value, last, total, cosines, sines, bias, sink) → (y, key_cache, value_cache) is
// GroupQueryAttention of onnxruntime for float32, without its position ids. Without keys and values, `query` has all three.
// Attributes: `path`, the place of a path in the list of paths; heads, groups, causal, scale, interleaved.
//
// ContextAttention (query, key, value, bias) → (y) is MultiHeadAttention of onnxruntime for float32, over given keys and values.
// Attributes: path, heads, scale.
#include "attention_op.h"

#include <algorithm>
#include <memory>

#include "attention.h"
#include "operator.h"

namespace tformer {
namespace {

constexpr int64_t MAX_HEADS = 1 << 16;

struct AttentionKernel {
  const ort::Api* api;
  const Path* path;
  size_t heads, groups;
  bool causal = false, interleaved = false;
  float scale;
};

enum AttentionInput : size_t { QUERY, KEY, VALUE, PAST_KEY, PAST_VALUE, LAST, TOTAL, COSINES, SINES, BIAS, SINK, INPUTS };
constexpr size_t CONTEXT_BIAS = 3, CONTEXT_INPUTS = 4;  // of ContextAttention

template <bool CONTEXT>
ort::Status* create_attention(const ort::CustomOp*, const ort::Api* api, const ort::KernelInfo* info, void** out) {
  return guarded(api, [&] {
    auto kernel = std::make_unique<AttentionKernel>();
    const int64_t heads = integer(api, info, "heads");
    const int64_t groups = CONTEXT ? heads : integer(api, info, "groups");
    kernel->api = api;
    kernel->path = path_of(api, info);
    if (heads < 1 || groups < 1 || heads % groups != 0 || heads > MAX_HEADS)
      fail(api, "tformer-kernels: heads must share keys in groups of one size");
    kernel->heads = static_cast<size_t>(heads);
    kernel->groups = static_cast<size_t>(groups);
    kernel->scale = number(api, info, "scale");
    if constexpr (!CONTEXT) {
      kernel->causal = integer(api, info, "causal") != 0;
      kernel->interleaved = integer(api, info, "interleaved") != 0;
    }
    *out = kernel.release();
  });
}

void require(const ort::Api* api, bool holds, const char* message) {
  if (!holds) fail(api, message);
}

template <size_t COUNT>
void read_inputs(const ort::Api* api, ort::KernelContext* context, Input (&in)[COUNT]) {
  for (size_t i = 0; i < COUNT; i++) {
    in[i] = read_input(api, context, i);
    require(api, in[i].rank <= MAX_RANK, "tformer-kernels: an input of attention has too many axes");
  }
}

// What both operators share: the queries, of which a position has `heads` heads, and the bias.
AttentionCall begin_call(const AttentionKernel& kernel, const Input& query, size_t heads) {
  const ort::Api* api = kernel.api;
  require(api, query.data && query.rank == 3 && query.size(2) > 0 && query.size(2) % heads == 0,
          "tformer-kernels: queries must have the shape (batch, positions, numbers of all heads)");
  AttentionCall call{};
  call.path = kernel.path;
  call.batch = query.size(0), call.length = query.size(1);
  call.heads = kernel.heads, call.groups = kernel.groups, call.size = query.size(2) / heads;
  call.queries = query.floats(), call.query_stride = query.size(2);
  call.causal = kernel.causal, call.scale = kernel.scale, call.interleaved = kernel.interleaved;
  return call;
}

void add_bias(const ort::Api* api, AttentionCall& call, const Input& bias) {
  if (!bias.data) return;
  require(api,
          bias.rank == 4 && (bias.size(0) == 1 || bias.size(0) == call.batch) &&
              (bias.size(1) == 1 || bias.size(1) == call.heads) && bias.size(2) == call.length && bias.size(3) == call.total,
          "tformer-kernels: the bias must have a number for each query and position");
  call.bias = bias.floats();
  call.bias_row_stride = bias.size(3);
  call.bias_head_stride = bias.size(1) == 1 ? 0 : bias.size(2) * bias.size(3);
  call.bias_batch_stride = bias.size(0) == 1 ? 0 : bias.size(1) * bias.size(2) * bias.size(3);
}

// Keys or values (B, S, G · D) or (B, G, S, D).
Heads heads_of(const ort::Api* api, const AttentionCall& call, const Input& input, size_t positions) {
  const bool by_head = input.rank == 4;
  const size_t width = call.groups * call.size;
  require(api,
          input.data && input.size(0) == call.batch &&
              (by_head ? input.size(1) == call.groups && input.size(2) == positions && input.size(3) == call.size
                       : input.rank == 3 && input.size(1) == positions && input.size(2) == width),
          "tformer-kernels: keys and values must fit the queries");
  return {input.floats(), positions * width, by_head ? positions * call.size : call.size, by_head ? call.size : width};
}

void finish_call(const ort::Api* api, ort::KernelContext* context, AttentionCall& call) {
  const char* refusal = call.total > 0 ? attention_refusal(call) : nullptr;
  require(api, refusal == nullptr, refusal);
  const int64_t batch = static_cast<int64_t>(call.batch), size = static_cast<int64_t>(call.size);
  const int64_t sizes[] = {batch, static_cast<int64_t>(call.length), static_cast<int64_t>(call.heads) * size};
  call.out = write_output(api, context, 0, sizes, 3);
  if (call.slots > 0) {
    const int64_t cache[] = {batch, static_cast<int64_t>(call.groups), static_cast<int64_t>(call.slots), size};
    call.key_cache = write_output(api, context, 1, cache, 4);
    call.value_cache = write_output(api, context, 2, cache, 4);
    require(api, call.key_cache && call.value_cache, "tformer-kernels: attention with a cache has three results");
  }
  if (call.total == 0) {  // there are no keys
    std::fill(call.out, call.out + call.batch * call.length * call.heads * call.size, 0.0f);
    return;
  }
  Parallel parallel{api, context};
  attend(call, parallel_for, &parallel);
}

void run_attention(const AttentionKernel& kernel, ort::KernelContext* context) {
  const ort::Api* api = kernel.api;
  Input in[INPUTS];
  read_inputs(api, context, in);
  const bool packed = in[KEY].data == nullptr;
  AttentionCall call = begin_call(kernel, in[QUERY], packed ? kernel.heads + 2 * kernel.groups : kernel.heads);
  const size_t width = call.groups * call.size;
  call.positions = call.length;
  if (packed) {
    require(api, !in[VALUE].data, "tformer-kernels: attention needs keys and values together");
    const float* keys = call.queries + call.heads * call.size;
    call.keys = {keys, call.length * call.query_stride, call.size, call.query_stride};
    call.values = {keys + width, call.length * call.query_stride, call.size, call.query_stride};
  } else {
    call.keys = heads_of(api, call, in[KEY], call.length);
    call.values = heads_of(api, call, in[VALUE], call.length);
  }
  size_t lasts = in[LAST].data ? 1 : 0;
  for (size_t axis = 0; axis < in[LAST].rank; axis++) lasts *= in[LAST].size(axis);
  require(api, in[LAST].data && lasts == call.batch && in[TOTAL].data,
          "tformer-kernels: attention needs a last position for each sequence");
  call.last = static_cast<const int32_t*>(in[LAST].data);
  for (size_t axis = 0; axis < in[TOTAL].rank; axis++)
    require(api, in[TOTAL].size(axis) == 1, "tformer-kernels: the number of positions must be one number");
  call.total = static_cast<size_t>(std::max(0, *static_cast<const int32_t*>(in[TOTAL].data)));
  require(api, call.total > 0, "tformer-kernels: a sequence must have 1 to `total` positions");
  if (in[COSINES].data) {
    require(api, in[SINES].data && in[COSINES].rank == 2 && in[SINES].rank == 2 && in[COSINES].size(0) == in[SINES].size(0) &&
                     in[COSINES].size(1) == in[SINES].size(1),
            "tformer-kernels: sines and cosines must have the same shape");
    call.cosines = in[COSINES].floats(), call.sines = in[SINES].floats();
    call.rotated = 2 * in[COSINES].size(1), call.rotary_positions = in[COSINES].size(0);
  }
  if (in[SINK].data) {
    require(api, in[SINK].rank == 1 && in[SINK].size(0) == call.heads, "tformer-kernels: there must be a sink for each head");
    call.sinks = in[SINK].floats();
  }
  if (in[PAST_KEY].data) {
    call.past_slots = in[PAST_KEY].rank == 4 ? in[PAST_KEY].size(2) : 0;
    for (size_t i : {PAST_KEY, PAST_VALUE})
      require(api, in[i].rank == 4, "tformer-kernels: a cache must have the shape (batch, heads of keys, slots, head size)");
    call.past_keys = heads_of(api, call, in[PAST_KEY], call.past_slots).data;
    call.past_values = heads_of(api, call, in[PAST_VALUE], call.past_slots).data;
    call.slots = std::max(call.past_slots, call.total);
  }
  add_bias(api, call, in[BIAS]);
  finish_call(api, context, call);
}

void run_context_attention(const AttentionKernel& kernel, ort::KernelContext* context) {
  const ort::Api* api = kernel.api;
  Input in[CONTEXT_INPUTS];
  read_inputs(api, context, in);
  AttentionCall call = begin_call(kernel, in[QUERY], kernel.heads);
  require(api, in[KEY].rank == 3 || in[KEY].rank == 4, "tformer-kernels: keys must have three or four axes");
  call.total = call.positions = in[KEY].size(in[KEY].rank - 2);
  call.keys = heads_of(api, call, in[KEY], call.total);
  call.values = heads_of(api, call, in[VALUE], call.total);
  add_bias(api, call, in[CONTEXT_BIAS]);
  finish_call(api, context, call);
}

template <bool CONTEXT>
ort::CustomOp describe_attention() {
  ort::CustomOp op = describe_common();
  op.GetName = [](const ort::CustomOp*) { return CONTEXT ? "ContextAttention" : "Attention"; };
  op.GetInputType = [](const ort::CustomOp*, size_t i) {
    return !CONTEXT && (i == LAST || i == TOTAL) ? ort::INT32 : ort::FLOAT;
  };
  op.GetInputTypeCount = [](const ort::CustomOp*) -> size_t { return CONTEXT ? CONTEXT_INPUTS : INPUTS; };
  op.GetOutputTypeCount = [](const ort::CustomOp*) -> size_t { return CONTEXT ? 1 : 3; };
  op.GetInputCharacteristic = [](const ort::CustomOp*, size_t i) {
    const bool required = CONTEXT ? i != CONTEXT_BIAS : i == QUERY || i == LAST || i == TOTAL;
    return required ? ort::REQUIRED : ort::OPTIONAL;
  };
  op.GetOutputCharacteristic = [](const ort::CustomOp*, size_t i) { return i == 0 ? ort::REQUIRED : ort::OPTIONAL; };
  op.CreateKernelV2 = create_attention<CONTEXT>;
  op.KernelComputeV2 = [](void* state, ort::KernelContext* context) {
    const AttentionKernel& kernel = *static_cast<AttentionKernel*>(state);
    return guarded(kernel.api, [&] { (CONTEXT ? run_context_attention : run_attention)(kernel, context); });
  };
  op.KernelDestroy = [](void* state) { delete static_cast<AttentionKernel*>(state); };
  return op;
}

}  // namespace

ort::CustomOp attention_operator() { return describe_attention<false>(); }

ort::CustomOp context_attention_operator() { return describe_attention<true>(); }

}  // namespace tformer

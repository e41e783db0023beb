// The operators of attention, in the domain ai.tformer.
//
// Attention (query, key, value, past_key, past_value, last, total, cosines, sines, bias, sink) → (y, key_cache, value_cache) is
// GroupQueryAttention of onnxruntime for float32, without its position ids. Without keys and values, `query` has all three.
// Attributes: `path`, the place of a path in the list of paths; heads, groups, causal, scale, interleaved.
//
// ContextAttention (query, key, value, bias) → (y) is MultiHeadAttention of onnxruntime for float32, over given keys and values.
// A bias may have one number for all queries. If `shared` is 1, queries have any shape, which is that of the result: as many
// of them as fit read each row of keys and values, so that neighbouring rows may share one. Attributes: path, heads, scale, shared.
#include "attention.h"
#include "operator.h"

namespace tformer {
namespace {

constexpr int64_t MAX_HEADS = 1 << 16;

enum AttentionInput : size_t { QUERY, KEY, VALUE, PAST_KEY, PAST_VALUE, LAST, TOTAL, COSINES, SINES, BIAS, SINK, INPUTS };
constexpr size_t CONTEXT_BIAS = 3, CONTEXT_INPUTS = 4;  // of ContextAttention
constexpr char HEADS_MUST_SHARE[] = "tformer-kernels: heads must share keys in groups of one size";

template <size_t COUNT>
void read_inputs(Operands& operands, Input (&in)[COUNT]) {
  for (size_t i = 0; i < COUNT; i++) {
    in[i] = operands.input(i);
    require(operands.api, in[i].rank <= MAX_RANK, "tformer-kernels: an input of attention has too many axes");
  }
}

size_t count_from(const Attributes& attributes, const char* name) {
  const int64_t count = attributes.integer(name);
  require(attributes.api, count >= 1 && count <= MAX_HEADS, HEADS_MUST_SHARE);
  return static_cast<size_t>(count);
}

// A call that has nothing but the queries, of which a position has `heads` heads.
AttentionCall begin_call(const ort::Api* api, const float* queries, const Shape& query, size_t heads) {
  require(api, queries && query.rank == 3 && query.size(2) > 0 && query.size(2) % heads == 0,
          "tformer-kernels: queries must have the shape (batch, positions, numbers of all heads)");
  AttentionCall call{};
  call.batch = query.size(0), call.length = query.size(1), call.size = query.size(2) / heads;
  call.queries = queries, call.query_stride = query.size(2);
  return call;
}

void add_bias(const ort::Api* api, AttentionCall& call, const Input& input) {
  if (!input.data) return;
  Shape bias(input);
  for (; bias.rank < 4; bias.rank++) {  // missing axes are in front
    std::copy_backward(bias.sizes, bias.sizes + bias.rank, bias.sizes + bias.rank + 1);
    bias.sizes[0] = 1;
  }
  require(api,
          bias.rank == 4 && (bias.size(0) == 1 || bias.size(0) == call.batch) &&
              (bias.size(1) == 1 || bias.size(1) == call.heads) && (bias.size(2) == 1 || bias.size(2) == call.length) &&
              bias.size(3) == call.total,
          "tformer-kernels: the bias must have a number for each query and position");
  call.bias = input.floats();
  call.bias_row_stride = bias.size(2) == 1 ? 0 : bias.size(3);
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

// shape: of the result.
void finish_call(Operands& operands, AttentionCall& call, const Shape& shape) {
  const ort::Api* api = operands.api;
  const char* refusal = call.total > 0 ? attention_refusal(call) : nullptr;
  require(api, refusal == nullptr, refusal);
  call.out = operands.output(0, shape.sizes, shape.rank);
  if (call.slots > 0) {
    const int64_t batch = static_cast<int64_t>(call.batch), groups = static_cast<int64_t>(call.groups);
    const int64_t cache[] = {batch, groups, static_cast<int64_t>(call.slots), static_cast<int64_t>(call.size)};
    call.key_cache = operands.output(1, cache, 4);
    call.value_cache = operands.output(2, cache, 4);
    require(api, call.key_cache && call.value_cache, "tformer-kernels: attention with a cache has three results");
  }
  if (call.total == 0) {  // there are no keys
    std::fill(call.out, call.out + call.batch * call.length * call.heads * call.size, 0.0f);
    return;
  }
  attend(call, parallel_for, &operands);
}

class Attention final : public Operator {
 public:
  explicit Attention(const Attributes& attributes)
      : path(attributes.path()),
        heads(count_from(attributes, "heads")),
        groups(count_from(attributes, "groups")),
        scale(attributes.number("scale")),
        causal(attributes.integer("causal") != 0),
        interleaved(attributes.integer("interleaved") != 0) {
    require(attributes.api, heads % groups == 0, HEADS_MUST_SHARE);
  }

  void run(Operands& operands) const override;

 private:
  const Path* const path;
  const size_t heads, groups;
  const float scale;
  const bool causal, interleaved;
};

void Attention::run(Operands& operands) const {
  const ort::Api* api = operands.api;
  Input in[INPUTS];
  read_inputs(operands, in);
  const bool packed = in[KEY].data == nullptr;
  AttentionCall call = begin_call(api, in[QUERY].floats(), Shape(in[QUERY]), packed ? heads + 2 * groups : heads);
  call.path = path, call.heads = heads, call.groups = groups;
  call.scale = scale, call.causal = causal, call.interleaved = interleaved;
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
  require(api, in[LAST].data && count_of(in[LAST].sizes, in[LAST].rank) == call.batch && in[TOTAL].data,
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
  Shape shape(in[QUERY]);
  shape.sizes[2] = static_cast<int64_t>(heads * call.size);
  finish_call(operands, call, shape);
}

class ContextAttention final : public Operator {
 public:
  explicit ContextAttention(const Attributes& attributes)
      : path(attributes.path()),
        heads(count_from(attributes, "heads")),
        scale(attributes.number("scale")),
        shared(attributes.integer("shared") != 0) {}

  void run(Operands& operands) const override {
    const ort::Api* api = operands.api;
    Input in[CONTEXT_INPUTS];
    read_inputs(operands, in);
    require(api, in[KEY].data && (in[KEY].rank == 3 || in[KEY].rank == 4),
            "tformer-kernels: keys must have three or four axes");
    const Shape queries = shared ? divided(api, in[QUERY], in[KEY]) : Shape(in[QUERY]);
    AttentionCall call = begin_call(api, in[QUERY].floats(), queries, heads);
    call.path = path, call.heads = call.groups = heads, call.scale = scale;
    call.total = call.positions = in[KEY].size(in[KEY].rank - 2);
    call.keys = heads_of(api, call, in[KEY], call.total);
    call.values = heads_of(api, call, in[VALUE], call.total);
    add_bias(api, call, in[CONTEXT_BIAS]);
    finish_call(operands, call, Shape(in[QUERY]));
  }

 private:
  const Path* const path;
  const size_t heads;
  const float scale;
  const bool shared;

  // Queries (…) as (C, N, H · D), with C rows of keys.
  Shape divided(const ort::Api* api, const Input& query, const Input& key) const {
    const size_t rows = key.size(0), width = key.rank == 4 ? heads * key.size(3) : key.size(2);
    const size_t count = count_of(query.sizes, query.rank);
    // Not by rows * width, which may overflow to 0: keys without positions may have any number of rows.
    require(api, query.data && width > 0 && (rows > 0 ? count % rows == 0 && count / rows % width == 0 : count == 0),
            "tformer-kernels: queries must be divided evenly among the rows of keys");
    Shape shape;
    shape.rank = 3;
    shape.sizes[0] = key.sizes[0];
    shape.sizes[1] = rows > 0 ? static_cast<int64_t>(count / rows / width) : 0;
    shape.sizes[2] = static_cast<int64_t>(width);
    return shape;
  }
};

constexpr uint32_t NEEDED = 1 << QUERY | 1 << LAST | 1 << TOTAL;

}  // namespace

const OperatorKind ATTENTION = {"Attention", INPUTS, 3, ~NEEDED, "fffffiiffff", "rbbbbb---m-", false, make_operator<Attention>};
const OperatorKind CONTEXT_ATTENTION = {"ContextAttention", CONTEXT_INPUTS, 1, 1 << CONTEXT_BIAS, "ffff", "rccg", false,
                                        make_operator<ContextAttention>};

}  // namespace tformer

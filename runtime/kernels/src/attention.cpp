#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <new>

namespace tformer {
namespace {

constexpr size_t MAX_ROWS = 48;             // of a task
constexpr size_t MIN_ROWS = 12;             // of a task that is one of several for a head
constexpr size_t MAX_SCORES = 1 << 18;      // of a task, where MIN_ROWS have no more
constexpr size_t TASK_PRODUCTS = 1 << 16;   // multiplications worth a task
constexpr size_t SHARED_PRODUCTS = 1 << 18;  // multiplications worth a second thread
constexpr size_t MAX_TASKS = 256;
// New keys of so many numbers are written by several threads. Fewer are not: pages of a new cache that two threads touch
// for the first time cost both milliseconds.
constexpr size_t COPY_NUMBERS = 1 << 20;

// Memory of a thread.
float* scratch(size_t count) {
  static thread_local Growing<float> memory;
  return memory.reserve(count);
}

constexpr size_t whole_lines(size_t numbers) { return (numbers + PANEL - 1) / PANEL * PANEL; }

struct Job {
  const AttentionCall* call;
  size_t group;              // heads that share keys
  size_t rows, parts;        // rows of a group of heads, and the tasks for them
  size_t tasks;              // together
  size_t tasks_of_a_batch = 1;
  std::atomic<bool> lacks_memory{false};
};

size_t total_of(const AttentionCall& call, size_t b) {
  return call.last == nullptr ? call.total : static_cast<size_t>(call.last[b]) + 1;
}

// The number of positions before the new ones. If no sequence has any, new positions beyond a sequence's end are padding.
size_t past_of(const AttentionCall& call, size_t b) {
  return call.slots == 0 || call.length >= call.total ? 0 : total_of(call, b) - call.length;
}

// Copies the earlier positions of a sequence and a head into a cache that is not extended in place, and zeros behind them.
void begin_cache(const AttentionCall& call, size_t pair, size_t past, const float* from, float* into) {
  if (from == into) return;
  const size_t numbers = past * call.size;
  into += pair * call.slots * call.size;
  if (numbers > 0) std::memcpy(into, from + pair * call.past_slots * call.size, numbers * sizeof(float));
  std::fill(into + numbers, into + call.slots * call.size, 0.0f);
}

// Writes the new keys and values of a sequence and a group of heads into the caches.
void extend(const AttentionCall& call, size_t b, size_t g) {
  const size_t past = past_of(call, b), bytes = call.size * sizeof(float), cache = (b * call.groups + g) * call.slots * call.size;
  float *keys = call.key_cache + cache, *values = call.value_cache + cache;
  begin_cache(call, b * call.groups + g, past, call.past_keys, call.key_cache);
  begin_cache(call, b * call.groups + g, past, call.past_values, call.value_cache);
  for (size_t i = 0; i < call.length; i++) {
    const float* key = call.keys.of(b, g) + i * call.keys.position_stride;
    float* into = keys + (past + i) * call.size;
    if (call.cosines != nullptr)
      call.path->rotate(call, past + i, key, into, 1);
    else
      std::memcpy(into, key, bytes);
    std::memcpy(values + (past + i) * call.size, call.values.of(b, g) + i * call.values.position_stride, bytes);
  }
}

// Rows begin … end of a sequence and a group of heads; a row is (position, head of the group).
void attend_rows(const Job& job, size_t b, size_t g, size_t begin, size_t end) {
  const AttentionCall& call = *job.call;
  const size_t past = past_of(call, b), count = end - begin;
  AttentionRow rows[MAX_ROWS];
  const size_t limit = call.causal ? past + (end - 1) / job.group + 1 : total_of(call, b);  // of the last row
  const size_t stride = (limit + KEY_PANEL - 1) / KEY_PANEL * KEY_PANEL;
  const size_t numbers = whole_lines(count * call.size);
  float *queries = scratch(2 * numbers + call.size * KEY_PANEL + count * stride), *sums = queries + numbers;
  float *panel = sums + numbers, *scores = panel + call.size * KEY_PANEL;
  for (size_t r = 0; r < count; r++) {
    const size_t i = (begin + r) / job.group, head = g * job.group + (begin + r) % job.group;
    AttentionRow& row = rows[r];
    row.end = call.causal ? past + i + 1 : limit;
    row.bias = call.bias == nullptr ? nullptr
                                    : call.bias + b * call.bias_batch_stride + head * call.bias_head_stride +
                                          i * call.bias_row_stride;
    row.sink = call.sinks == nullptr ? -std::numeric_limits<float>::infinity() : call.sinks[head];
    row.out = call.out + ((b * call.length + i) * call.heads + head) * call.size;
    const float* query = call.queries + (b * call.length + i) * call.query_stride + head * call.size;
    float* into = queries + r * call.size;
    if (call.cosines != nullptr)
      call.path->rotate(call, past + i, query, into, call.scale);
    else
      for (size_t d = 0; d < call.size; d++) into[d] = query[d] * call.scale;
  }
  const size_t cache = (b * call.groups + g) * call.slots * call.size;
  const bool cached = call.slots > 0;
  const float* keys = cached ? call.key_cache + cache : call.keys.of(b, g);
  const float* values = cached ? call.value_cache + cache : call.values.of(b, g);
  call.path->attend({queries, rows, count, call.size, keys, values, cached ? call.size : call.keys.position_stride,
                     cached ? call.size : call.values.position_stride, scores, stride, panel, sums});
}

void extend_task(void* data, size_t i) {
  const AttentionCall& call = *static_cast<Job*>(data)->call;
  extend(call, i / call.groups, i % call.groups);
}

void attend_task(void* data, size_t batch) {
  Job& job = *static_cast<Job*>(data);
  const size_t begin = batch * job.tasks_of_a_batch, end = std::min(job.tasks, begin + job.tasks_of_a_batch);
  try {
    for (size_t task = begin; task < end; task++) {
      const size_t part = task % job.parts, pair = task / job.parts;
      attend_rows(job, pair / job.call->groups, pair % job.call->groups, job.rows * part / job.parts,
                  job.rows * (part + 1) / job.parts);
    }
  } catch (const std::bad_alloc&) {
    job.lacks_memory = true;
  }
}

}  // namespace

const char* attention_refusal(const AttentionCall& call) {
  if (call.groups == 0 || call.heads % call.groups != 0) return "tformer-kernels: heads must share keys in groups of one size";
  if (call.size == 0) return "tformer-kernels: a head must have numbers";
  if (call.rotated % 2 != 0 || call.rotated > call.size)
    return "tformer-kernels: the angles must be at most half as many as a head's numbers";
  if (call.slots > 0 && (call.past_keys == call.value_cache || call.past_values == call.key_cache))
    return "tformer-kernels: keys and values must have caches of their own";
  if (call.slots > 0 ? call.total < call.positions || call.positions != call.length : call.total != call.positions)
    return "tformer-kernels: the new positions must be among all positions, and earlier ones in a cache";
  if (call.slots > 0 && call.total > call.past_slots && call.total != call.past_slots + call.length)
    return "tformer-kernels: the given cache must have all earlier positions";
  if (call.slots > 0 && call.slots < call.total) return "tformer-kernels: the cache must have a slot for each position";
  if (call.slots == 0 && (call.cosines != nullptr || (call.causal && call.total != call.length)))
    return "tformer-kernels: rotated keys need a cache, and causal positions keys of their own";
  for (size_t b = 0; b < call.batch; b++) {
    const int64_t total = call.last == nullptr ? static_cast<int64_t>(call.total) : int64_t{call.last[b]} + 1;
    if (total < 1 || total > static_cast<int64_t>(call.total))
      return "tformer-kernels: a sequence must have 1 to `total` positions";
    if (call.slots == 0) continue;
    if (call.length < call.total && total < static_cast<int64_t>(call.length))
      return "tformer-kernels: a sequence must have as many positions as are new";
    const size_t past = past_of(call, b);
    if (past > call.past_slots) return "tformer-kernels: the given cache must have all earlier positions";
    if (call.cosines != nullptr && past + call.length > call.rotary_positions)
      return "tformer-kernels: there must be angles for each position";
  }
  return nullptr;
}

void attend(const AttentionCall& call, ParallelFor parallel_for, void* context) {
  if (call.batch == 0 || (call.length == 0 && call.slots == 0)) return;
  Job job{&call, call.heads / call.groups, call.length * (call.heads / call.groups), 1, 1};
  const size_t pairs = call.batch * call.groups;
  size_t positions = 0;
  for (size_t b = 0; b < call.batch; b++) positions += total_of(call, b);
  const size_t rows = std::clamp(MAX_SCORES / call.total, MIN_ROWS, MAX_ROWS);
  job.parts = (job.rows + rows - 1) / rows;
  job.tasks = pairs * job.parts;
  const size_t products = 2 * job.rows * call.groups * positions * call.size / (call.causal && call.length >= call.total ? 2 : 1);
  const size_t batches = std::clamp<size_t>(products / TASK_PRODUCTS, 1, std::clamp<size_t>(job.tasks, 1, MAX_TASKS));
  job.tasks_of_a_batch = (job.tasks + batches - 1) / batches;
  if (products < SHARED_PRODUCTS) parallel_for = run_alone;
  if (call.slots > 0) {
    const bool in_place = call.past_keys == call.key_cache && call.past_values == call.value_cache;
    const size_t copied = call.batch * (in_place ? call.length : call.slots);
    if (copied * call.groups * call.size > COPY_NUMBERS && pairs > 1)
      parallel_for(context, extend_task, pairs, &job);
    else
      for (size_t i = 0; i < pairs; i++) extend_task(&job, i);
  }
  if (call.length == 0) return;
  const size_t count = (job.tasks + job.tasks_of_a_batch - 1) / job.tasks_of_a_batch;
  run_tasks(parallel_for, context, attend_task, count, &job);
  if (job.lacks_memory) throw std::bad_alloc();
}

}  // namespace tformer

// Chain (values…) → (results…) in the domain ai.tformer: operators of this library that run one after the other, without
// onnxruntime between them, which takes 0.1 to 0.2 µs for each operator.
//
// Attributes: `input_count` and `output_count`, the numbers of the chain's own inputs and results; `program`, a line for each operator:
//
//   Norm 0 - 3 4 > 7 8
//
// This is its kind, its inputs, and its results after the `>`; `-` is none. Values are numbered: the inputs of the chain, then
// its results, then the values between operators. An operator's attributes are attributes of the chain, with the number
// of its line in front: `0.epsilon`. `parts` is the number of threads that may share a batch. `loop`, if it is not empty,
// makes the chain run several times (`greedy_loop.h`).
//
// A value between operators has a buffer, which later values use again once the last reader has run. Buffers grow to what the
// largest run has needed; all chains of the process share them.
//
// Several sequences may be divided among threads: each thread runs all operators for its part of the batch, so that no thread
// waits for another between two operators. A sequence's results do not depend on the others of its batch.
//
// onnxruntime checks the types of an operator's inputs, but those of a chain may have any type. So a chain checks them.
#include <mutex>
#include <numeric>
#include <optional>
#include <vector>

#include "chain_buffers.h"
#include "chain_program.h"
#include "greedy_loop.h"

namespace tformer {
namespace {

// Products of numbers that a batch must have to be divided. Each thread then reads all weights. These must be small enough for
// the caches, or so few for each of its rows that the products take longer (docs/design/native-kernels.md#chains).
constexpr size_t DIVIDED_PRODUCTS = 1 << 22, CACHED_BYTES = 1 << 23, BYTES_OF_ROW = 384 << 10;
constexpr size_t MAX_PARTS = 64;

// Some of the sequences of a batch. A unit is the least number of sequences that can be divided.
struct Part {
  size_t begin = 0, end = 1, units = 1;  // units of this part, and those of the batch

  bool is_whole() const { return end - begin == units; }
};

// The memory of the results of a chain, which onnxruntime allocates once their sizes are known.
class Results {
 public:
  Results(Operands& operands, size_t inputs, size_t count) : operands(operands), inputs(inputs), results(count) {}

  // The memory for a part of a result.
  //
  // value, sizes: of the result, and of the part. steps, step: if the result has the logits of several steps, how many and which.
  float* part(size_t value, const int64_t* sizes, size_t rank, const Part& part, size_t steps, size_t step) {
    int64_t whole[MAX_RANK];
    std::copy_n(sizes, rank, whole);
    size_t offset = 0;
    if (!part.is_whole()) {
      const int64_t unit = sizes[0] / static_cast<int64_t>(part.end - part.begin);
      whole[0] = unit * static_cast<int64_t>(part.units);
      offset = part.begin * static_cast<size_t>(unit) * count_of(sizes + 1, rank - 1);
    }
    if (steps > 1) {
      offset += step * count_of(whole, rank);
      if (__builtin_mul_overflow(whole[0], static_cast<int64_t>(steps), &whole[0])) throw std::bad_alloc();
    }
    const size_t count = count_of(whole, rank);
    const std::lock_guard guard(lock);
    Result& result = results[value - inputs];
    if (result.data == nullptr) {
      result = {operands.output(value - inputs, whole, rank), count};
      require(operands.api, result.data != nullptr, "tformer-kernels: the node of a chain lacks a result of its program");
    }
    require(operands.api, result.count == count, "tformer-kernels: the results of a chain change their size while it runs");
    return result.data + offset;
  }

  float* data(size_t value) const { return results[value - inputs].data; }
  size_t count(size_t value) const { return results[value - inputs].count; }

 private:
  struct Result {
    float* data = nullptr;
    size_t count = 0;
  };

  Operands& operands;
  const size_t inputs;
  std::vector<Result> results;
  std::mutex lock;
};

// The operators of a chain, for a part of the batch.
class PartRun {
 public:
  PartRun(const Program& program, Operands& operands, Results& results, std::vector<Input>& inputs, BufferPool& pool, Part part,
          bool has_threads)
      : program(program), operands(operands), results(results), inputs(inputs), part(part), has_threads(has_threads),
        computed(program.values - program.inputs), buffer_of(program.values), pool(pool), buffers(pool.take()) {}

  // After an error the buffers are freed.
  ~PartRun() {
    if (is_complete) pool.give_back(std::move(buffers));
  }

  // greedy: of a chain that may run several times; nullptr for others.
  void run(const GreedyRun* greedy) {
    is_complete = false;
    for (const Link& link : program.links) {
      LinkOperands link_operands(*this, link, greedy);
      link.op->run(link_operands);
      for (size_t value : link.ended)
        if (computed[value - program.inputs].input.data != nullptr) buffers->give_back(buffer_of[value]);
    }
    is_complete = true;
  }

  // A value that the chain has computed.
  const Input& value(size_t value) const { return computed[value - program.inputs].input; }

 private:
  struct Computed {
    Input input;
    int64_t sizes[MAX_RANK];
  };

  class LinkOperands final : public Operands {
   public:
    LinkOperands(PartRun& own, const Link& link, const GreedyRun* greedy)
        : Operands(own.operands.api, own.operands.context, own.has_threads), own(own), link(link), greedy(greedy) {}

    Input input(size_t index) override {
      const size_t value = index < link.inputs.size() ? link.inputs[index] : NONE;
      if (value == NONE) return {};
      const Input& found = value < own.program.inputs ? own.given(value) : own.computed[value - own.program.inputs].input;
      const ort::ElementType type = link.kind->type(index);
      require(api, type == ort::ANY || found.type == type, "tformer-kernels: an operator of a chain reads a value of another type");
      return found;
    }

    float* output(size_t index, const int64_t* sizes, size_t rank) override {
      const size_t value = index < link.outputs.size() ? link.outputs[index] : NONE;
      if (value == NONE) return nullptr;
      require(api, rank <= MAX_RANK, "tformer-kernels: a result of an operator has too many axes");
      float* data = nullptr;
      if (value < own.program.inputs + own.program.results) {
        const bool is_logits = greedy != nullptr && value == greedy->loop.logits;
        data = own.results.part(value, sizes, rank, own.part, is_logits ? greedy->steps : 1, is_logits ? greedy->step : 0);
      } else {
        own.buffer_of[value] = own.buffers->take(count_of(sizes, rank));
        data = own.buffers->floats(own.buffer_of[value]);
      }
      Computed& result = own.computed[value - own.program.inputs];
      std::copy_n(sizes, rank, result.sizes);
      result.input = {data, ort::FLOAT, rank, result.sizes};
      return data;
    }

   private:
    PartRun& own;
    const Link& link;
    const GreedyRun* greedy;
  };

  // An input of the chain.
  const Input& given(size_t value) {
    Input& found = inputs[value];
    if (found.data == nullptr) found = operands.input(value);
    return found;
  }

  const Program& program;
  Operands& operands;  // of the chain
  Results& results;
  std::vector<Input>& inputs;  // of the part
  const Part part;
  const bool has_threads;
  std::vector<Computed> computed;
  std::vector<size_t> buffer_of;  // of each value between operators
  BufferPool& pool;
  std::unique_ptr<Buffers> buffers;
  bool is_complete = true;
};

class Chain final : public Operator {
 public:
  explicit Chain(const Attributes& attributes)
      : pool(BufferPool::shared()), program(attributes), max_parts(static_cast<size_t>(std::clamp<int64_t>(attributes.integer("parts"), 1, MAX_PARTS))) {
    if (!attributes.text("loop").empty()) loop.emplace(attributes, program.inputs, program.results);
  }

  void run(Operands& operands) const override {
    size_t given = 0, wanted = 0;
    check(ort::KernelContext_GetInputCount::call(operands.api, operands.context, &given));
    check(ort::KernelContext_GetOutputCount::call(operands.api, operands.context, &wanted));
    require(operands.api, given >= program.inputs && wanted >= program.results,
            "tformer-kernels: the node of a chain has fewer inputs or results than its program");
    Results results(operands, program.inputs, program.results);
    std::vector<Input> inputs(program.inputs);
    if (loop) read_inputs(operands, inputs);
    std::optional<GreedyRun> greedy;
    if (loop) greedy.emplace(operands.api, *loop, inputs);
    const std::vector<Part> parts = divide(operands, inputs);
    if (!parts.empty())
      run_parts(operands, results, inputs, parts, greedy);
    else
      run_whole(operands, results, inputs, greedy);
  }

 private:
  const std::shared_ptr<BufferPool> pool;
  const Program program;
  const size_t max_parts;
  std::optional<GreedyLoop> loop;

  static void read_inputs(Operands& operands, std::vector<Input>& inputs) {
    for (size_t value = 0; value < inputs.size(); value++)
      if (inputs[value].data == nullptr) inputs[value] = operands.input(value);
  }

  void run_whole(Operands& operands, Results& results, std::vector<Input>& inputs, std::optional<GreedyRun>& greedy) const {
    PartRun run(program, operands, results, inputs, *pool, {}, true);
    do run.run(greedy ? &*greedy : nullptr);
    while (greedy && next(operands.api, *greedy, results, inputs, run));
  }

  // Chooses the next tokens of a loop. Returns whether there is another step.
  bool next(const ort::Api* api, GreedyRun& greedy, Results& results, const std::vector<Input>& inputs, const PartRun& run) const {
    if (greedy.steps == 1) return false;
    const Input& logits = run.value(loop->logits);
    require(api, logits.rank == 3 && logits.size(1) == 1 && logits.size(2) > 0, "tformer-kernels: a loop needs logits of one position");
    for (const auto& [input, result] : loop->caches)
      require(api, inputs[input].data == results.data(result), "tformer-kernels: the caches of a loop must be written in place");
    const size_t vocabulary = logits.size(2), batch = inputs[loop->tokens].size(0);
    const int64_t whole[] = {static_cast<int64_t>(greedy.steps), static_cast<int64_t>(batch), logits.sizes[2]};
    require(api, results.count(loop->logits) == count_of(whole, 3), "tformer-kernels: a loop needs logits of each sequence");
    return greedy.next(results.data(loop->logits) + greedy.step * batch * vocabulary, vocabulary);
  }

  // Returns the parts of the batch; none if it is not worth dividing, or if it cannot be divided.
  std::vector<Part> divide(Operands& operands, std::vector<Input>& inputs) const {
    if (max_parts < 2 || !program.has_batch || program.weights == 0) return {};
    size_t batch = 0, positions = 0;
    for (size_t value = 0; value < inputs.size() && batch == 0; value++) {
      const char axis = program.axes[value];
      if (axis != 'r' && axis != 'p' && axis != 'a') continue;
      if (inputs[value].data == nullptr) inputs[value] = operands.input(value);
      if (is_divided(inputs[value], axis)) batch = inputs[value].size(0), positions = inputs[value].size(1);
    }
    const size_t rows = batch * positions;
    if (batch < 2 || rows * program.weights < DIVIDED_PRODUCTS) return {};
    if (program.weight_bytes > std::max(CACHED_BYTES, rows / std::min(max_parts, batch) * BYTES_OF_ROW)) return {};
    read_inputs(operands, inputs);
    size_t units = batch, context = program.computes_context ? batch : 0;  // context: its groups, once they are known
    for (size_t value = 0; value < inputs.size() && context == 0; value++)
      if (program.axes[value] == 'c' && is_divided(inputs[value], 'c')) context = inputs[value].size(0);
    for (size_t value = 0; value < inputs.size(); value++) {
      const Input& input = inputs[value];
      const char axis = program.axes[value];
      if (!is_divided(input, axis)) {
        if (axis == 'r' || axis == 'p' || axis == 'b' || axis == 'c' || input.rank > max_rank(axis)) return {};
        if (axis != '-' && input.rank > 0 && input.size(0) == 0) return {};  // a part of one sequence would take it for a batch
        continue;
      }
      if (input.size(0) != (axis == 'c' || axis == 'g' ? context : batch)) return {};
      units = std::gcd(units, input.size(0));
    }
    for (const std::vector<size_t>& addends : program.given_addends)
      if (std::none_of(addends.begin(), addends.end(), [&](size_t value) { return is_divided(inputs[value], program.axes[value]); }))
        return {};
    const size_t count = std::min(max_parts, units);
    if (count < 2) return {};
    std::vector<Part> parts(count);
    for (size_t i = 0; i < count; i++) parts[i] = {units * i / count, units * (i + 1) / count, units};
    return parts;
  }

  // The greatest number of axes of an input that all sequences may share.
  static size_t max_rank(char axis) { return axis == 'a' ? 3 : axis == 'm' || axis == 'g' ? 4 : MAX_RANK; }

  // Whether each part has its own part of an input.
  static bool is_divided(const Input& input, char axis) {
    switch (axis) {
      case 'r': return input.rank == 3 && input.size(0) > 0;
      case 'p': return input.rank == 2 && input.size(0) > 0;
      case 'b':
      case 'c': return input.rank >= 1 && input.rank <= MAX_RANK && input.size(0) > 0;
      case 'a': return input.rank == 3 && input.size(0) > 1;
      case 'm':
      case 'g': return input.rank == 4 && input.size(0) > 1;
      default: return false;
    }
  }

  static size_t bytes_of(ort::ElementType type) { return type == ort::INT64 ? 8 : type == ort::INT8 ? 1 : 4; }

  struct PartInputs {
    std::vector<Input> values;
    std::vector<std::unique_ptr<Shape>> shapes;  // of those that are divided
  };

  struct Job {
    const ort::Api* api;
    const GreedyRun* greedy;
    std::vector<PartInputs> inputs;
    std::vector<std::unique_ptr<PartRun>> runs;
    std::vector<ort::Status*> errors;
  };

  // Returns the inputs of a part: those of its sequences.
  PartInputs take_inputs(const Part& part, const std::vector<Input>& inputs) const {
    PartInputs own{inputs, {}};
    for (size_t value = 0; value < inputs.size(); value++) {
      Input& input = own.values[value];
      if (!is_divided(input, program.axes[value])) continue;
      own.shapes.emplace_back(new Shape(input));
      const size_t unit = input.size(0) / part.units;
      const size_t bytes = count_of(input.sizes + 1, input.rank - 1) * bytes_of(input.type);
      own.shapes.back()->sizes[0] = static_cast<int64_t>((part.end - part.begin) * unit);
      input.data = static_cast<const uint8_t*>(input.data) + part.begin * unit * bytes;
      input.sizes = own.shapes.back()->sizes;
    }
    return own;
  }

  void run_parts(Operands& operands, Results& results, std::vector<Input>& inputs, const std::vector<Part>& parts,
                 std::optional<GreedyRun>& greedy) const {
    const size_t count = parts.size();
    Job job{operands.api, greedy ? &*greedy : nullptr, std::vector<PartInputs>(count), {}, std::vector<ort::Status*>(count)};
    for (size_t i = 0; i < count; i++) {
      job.inputs[i] = take_inputs(parts[i], inputs);
      job.runs.push_back(std::make_unique<PartRun>(program, operands, results, job.inputs[i].values, *pool, parts[i], false));
    }
    auto task = [](void* data, size_t i) {
      Job& job = *static_cast<Job*>(data);
      job.errors[i] = guarded(job.api, [&] { job.runs[i]->run(job.greedy); });
    };
    do {
      parallel_for(&operands, task, count, &job);
      ort::Status* first = nullptr;
      for (ort::Status* error : job.errors) {
        if (error != nullptr && first != nullptr) ort::ReleaseStatus::call(operands.api, error);
        else if (error != nullptr) first = error;
      }
      check(first);
    } while (greedy && next(operands.api, *greedy, results, inputs, *job.runs[0]));
  }
};

}  // namespace

const OperatorKind CHAIN = {"Chain", 1, 1, 0, "*", "-", true, make_operator<Chain>};

}  // namespace tformer

// Chain (values…) → (results…) in the domain ai.tformer: operators of this library that run one after the other, without
// onnxruntime between them, which takes 0.1 to 0.2 µs for each operator.
//
// Attributes: `input_count` and `output_count`, the numbers of the chain's own inputs and results; `program`, a line for each operator:
//
//   Norm 0 - 3 4 > 7 8
//
// This is its kind, its inputs, and its results after the `>`; `-` is none. Values are numbered: the inputs of the chain, then
// its results, then the values between operators. An operator's attributes are attributes of the chain, with the number
// of its line in front: `0.epsilon`.
//
// A value between operators has a buffer, which later values use again once the last reader has run. Buffers grow to what the
// largest run has needed; all chains of the process share them.
//
// onnxruntime checks the types of an operator's inputs, but those of a chain may have any type. So a chain checks them.
#include <charconv>
#include <mutex>
#include <string_view>
#include <vector>

#include "operator.h"

namespace tformer {
namespace {

constexpr size_t MAX_VALUES = 1 << 20;          // of a chain
constexpr size_t MAX_FLOATS = size_t{1} << 60;  // of a value
constexpr size_t NONE = ~size_t{0};             // a value that is not there

// Memory of a chain that runs. There are as many buffers as values that are needed at the same time.
class Buffers {
 public:
  // Takes the smallest buffer that has so many numbers; if none has, the largest grows.
  size_t take(size_t count) {
    auto best = std::min_element(unused.begin(), unused.end(), [&](size_t a, size_t b) {
      const size_t size_a = memory[a].size, size_b = memory[b].size;
      const bool fits_a = size_a >= count, fits_b = size_b >= count;
      if (fits_a != fits_b) return fits_a;
      return fits_a ? size_a < size_b : size_a > size_b;
    });
    if (best == unused.end()) {
      memory.emplace_back();
      unused.reserve(memory.size());  // so that buffers can be given back without new memory
      best = unused.insert(unused.end(), memory.size() - 1);
    }
    const size_t buffer = *best;
    memory[buffer].reserve(std::max<size_t>(count, 1));
    unused.erase(best);
    return buffer;
  }

  float* floats(size_t buffer) { return memory[buffer].memory.get(); }
  void give_back(size_t buffer) { unused.push_back(buffer); }

 private:
  std::vector<Growing<float>> memory;
  std::vector<size_t> unused;
};

// The buffers of the chains that run at the same time.
class BufferPool {
 public:
  std::unique_ptr<Buffers> take() {
    const std::lock_guard guard(lock);
    if (unused.empty()) return std::make_unique<Buffers>();
    std::unique_ptr<Buffers> buffers = std::move(unused.back());
    unused.pop_back();
    return buffers;
  }

  void give_back(std::unique_ptr<Buffers> buffers) {
    const std::lock_guard guard(lock);
    unused.push_back(std::move(buffers));
  }

  // The pool of all chains; its memory is freed with the last chain.
  static std::shared_ptr<BufferPool> shared() {
    static std::mutex lock;
    static auto& pool = *new std::weak_ptr<BufferPool>;  // never destroyed: sessions may outlive static objects
    const std::lock_guard guard(lock);
    std::shared_ptr<BufferPool> found = pool.lock();
    if (!found) pool = found = std::make_shared<BufferPool>();
    return found;
  }

 private:
  std::mutex lock;
  std::vector<std::unique_ptr<Buffers>> unused;
};

struct Link {
  const OperatorKind* kind;
  std::unique_ptr<Operator> op;
  std::vector<size_t> inputs, outputs;  // values
  std::vector<size_t> ended;            // values between operators that no later operator reads
};

class Chain final : public Operator {
 public:
  explicit Chain(const Attributes& attributes) : pool(BufferPool::shared()) {
    const int64_t given_inputs = attributes.integer("input_count"), given_outputs = attributes.integer("output_count");
    const int64_t most = MAX_VALUES / 2;
    require(attributes.api, given_inputs >= 0 && given_inputs <= most && given_outputs >= 0 && given_outputs <= most,
            "tformer-kernels: a chain has too many inputs or results");
    inputs = static_cast<size_t>(given_inputs), results = static_cast<size_t>(given_outputs);
    values = inputs + results;
    const std::string program = attributes.text("program");
    for (std::string_view rest = program; !rest.empty();) {
      const size_t end = std::min(rest.find('\n'), rest.size());
      links.push_back(read_link(attributes, rest.substr(0, end)));
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
    find_ends(attributes.api);
  }

  void run(Operands& operands) const override {
    size_t given = 0, wanted = 0;
    check(ort::KernelContext_GetInputCount::call(operands.api, operands.context, &given));
    check(ort::KernelContext_GetOutputCount::call(operands.api, operands.context, &wanted));
    require(operands.api, given >= inputs && wanted >= results,
            "tformer-kernels: the node of a chain has fewer inputs or results than its program");
    Run run{*this, operands, std::vector<Input>(values), std::vector<size_t>(values), pool->take()};
    for (const Link& link : links) {
      LinkOperands link_operands(run, link);
      link.op->run(link_operands);
      for (size_t value : link.ended)
        if (run.values[value].data != nullptr) run.buffers->give_back(run.buffer_of[value]);
    }
    pool->give_back(std::move(run.buffers));  // after an error they are freed
  }

 private:
  struct Run {
    const Chain& chain;
    Operands& operands;  // of the chain
    std::vector<Input> values;
    std::vector<size_t> buffer_of;  // of each value between operators
    std::unique_ptr<Buffers> buffers;
  };

  class LinkOperands final : public Operands {
   public:
    LinkOperands(Run& run, const Link& link) : Operands(run.operands.api, run.operands.context), own(run), link(link) {}

    Input input(size_t index) override {
      const size_t value = index < link.inputs.size() ? link.inputs[index] : NONE;
      if (value == NONE) return {};
      Input& found = own.values[value];
      if (value < own.chain.inputs && found.data == nullptr) found = own.operands.input(value);
      require(api, found.type == (link.kind->integers >> index & 1 ? ort::INT32 : ort::FLOAT),
              "tformer-kernels: an operator of a chain reads a value of another type");
      return found;
    }

    float* output(size_t index, const int64_t* sizes, size_t rank) override {
      const size_t value = index < link.outputs.size() ? link.outputs[index] : NONE;
      if (value == NONE) return nullptr;
      const size_t place = value - own.chain.inputs;
      float* data = nullptr;
      if (place < own.chain.results) {
        data = own.operands.output(place, sizes, rank);
      } else {
        own.buffer_of[value] = own.buffers->take(count_of(sizes, rank));
        data = own.buffers->floats(own.buffer_of[value]);
      }
      require(api, data != nullptr, "tformer-kernels: the node of a chain lacks a result of its program");
      Input& result = own.values[value];
      result.data = data, result.rank = rank;
      std::copy_n(sizes, rank, result.sizes);
      return data;
    }

   private:
    Run& own;
    const Link& link;
  };

  // The number of floats of a value. Throws bad_alloc if no memory holds as many.
  static size_t count_of(const int64_t* sizes, size_t rank) {
    if (std::find(sizes, sizes + rank, 0) != sizes + rank) return 0;
    size_t count = 1;
    for (size_t axis = 0; axis < rank; axis++)
      if (__builtin_mul_overflow(count, static_cast<size_t>(sizes[axis]), &count) || count > MAX_FLOATS) throw std::bad_alloc();
    return count;
  }

  const std::shared_ptr<BufferPool> pool;
  size_t inputs, results, values;
  std::vector<Link> links;

  Link read_link(const Attributes& attributes, std::string_view line) {
    const ort::Api* api = attributes.api;
    auto next_word = [&] {
      const size_t end = std::min(line.find(' '), line.size());
      const std::string_view word = line.substr(0, end);
      line.remove_prefix(std::min(end + 1, line.size()));
      return word;
    };
    const std::string_view name = next_word();
    const OperatorKind* kind = nullptr;
    for (const OperatorKind* each : KINDS)
      if (!each->is_chain && each->name == name) kind = each;
    require(api, kind != nullptr, "tformer-kernels: a chain has an operator that this library lacks");
    Link link{kind, nullptr, {}, {}, {}};
    std::vector<size_t>* places = &link.inputs;
    while (!line.empty()) {
      const std::string_view word = next_word();
      if (word == ">") {
        places = &link.outputs;
        continue;
      }
      size_t value = NONE;
      const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
      const bool is_number = error == std::errc() && end == word.data() + word.size() && value < MAX_VALUES;
      require(api, is_number || word == "-", "tformer-kernels: a chain has a damaged program");
      places->push_back(is_number ? value : NONE);
      if (is_number) values = std::max(values, value + 1);
    }
    require(api, link.inputs.size() <= kind->inputs && link.outputs.size() <= kind->outputs,
            "tformer-kernels: an operator of a chain has too many operands");
    for (size_t i = 0; i < kind->inputs; i++)
      require(api, (kind->optional >> i & 1) || (i < link.inputs.size() && link.inputs[i] != NONE),
              "tformer-kernels: an operator of a chain lacks an input");
    require(api, !link.outputs.empty() && link.outputs[0] != NONE, "tformer-kernels: an operator of a chain lacks a result");
    link.op = kind->make({api, attributes.info, attributes.prefix + std::to_string(links.size()) + "."});
    return link;
  }

  // Notes after which operator the buffer of each value is free.
  void find_ends(const ort::Api* api) {
    std::vector<bool> is_there(values, false);
    std::fill(is_there.begin(), is_there.begin() + static_cast<ptrdiff_t>(inputs), true);
    std::vector<size_t> last(values, NONE);  // the operator that reads a value last, or computes it
    for (size_t i = 0; i < links.size(); i++) {
      for (size_t value : links[i].inputs) {
        if (value == NONE) continue;
        require(api, is_there[value], "tformer-kernels: a chain reads a value before it is computed");
        last[value] = i;
      }
      for (size_t value : links[i].outputs) {
        if (value == NONE) continue;
        require(api, !is_there[value], "tformer-kernels: a chain computes a value twice");
        is_there[value] = true, last[value] = i;
      }
    }
    for (size_t value = 0; value < inputs + results; value++)
      require(api, is_there[value], "tformer-kernels: a chain lacks a result");
    for (size_t value = inputs + results; value < values; value++)
      if (last[value] != NONE) links[last[value]].ended.push_back(value);
  }
};

}  // namespace

const OperatorKind CHAIN = {"Chain", 1, 1, 0, 0, true, make_operator<Chain>};

}  // namespace tformer

#include "chain_program.h"

#include <algorithm>

#include "words.h"

namespace tformer {

Program::Program(const Attributes& attributes) : weights(0), weight_bytes(0) {
  const int64_t given_inputs = attributes.integer("input_count"), given_outputs = attributes.integer("output_count");
  const int64_t most = MAX_VALUES / 2;
  require(attributes.api, given_inputs >= 0 && given_inputs <= most && given_outputs >= 0 && given_outputs <= most,
          "tformer-kernels: a chain has too many inputs or results");
  inputs = static_cast<size_t>(given_inputs), results = static_cast<size_t>(given_outputs);
  values = inputs + results;
  const std::string program = attributes.text("program");
  for (std::string_view rest = program; !rest.empty();) links.push_back(read_link(attributes, take_until('\n', rest)));
  find_ends(attributes.api);
  find_axes();
  for (const Link& link : links)
    if (const Matrix* matrix = link.op->weights()) {
      weights += matrix->inner * matrix->columns;
      weight_bytes += matrix->panels * matrix->panel_bytes();
    }
}

Link Program::read_link(const Attributes& attributes, std::string_view line) {
  const ort::Api* api = attributes.api;
  const std::string_view name = take_until(' ', line);
  const OperatorKind* kind = nullptr;
  for (const OperatorKind* each : KINDS)
    if (!each->is_chain && each->name == name) kind = each;
  require(api, kind != nullptr, "tformer-kernels: a chain has an operator that this library lacks");
  Link link{kind, nullptr, {}, {}, {}};
  std::vector<size_t>* places = &link.inputs;
  while (!line.empty()) {
    const std::string_view word = take_until(' ', line);
    if (word == ">") {
      places = &link.outputs;
      continue;
    }
    const std::optional<size_t> value = number_of(word);
    require(api, value ? *value < MAX_VALUES : word == "-", "tformer-kernels: a chain has a damaged program");
    places->push_back(value.value_or(NONE));
    if (value) values = std::max(values, *value + 1);
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
void Program::find_ends(const ort::Api* api) {
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

// A value that an operator computes has the batch on axis 0 if the operator's inputs have. The first result of an operator has
// three axes then, and the other results of attention, which are caches, four.
void Program::find_axes() {
  constexpr char UNKNOWN = 0;
  axes.assign(inputs, UNKNOWN);
  has_batch = true, computes_context = false;
  std::vector<bool> is_cache(values, false);
  for (const Link& link : links) {
    std::vector<size_t> addends;
    bool adds_computed = false;
    for (size_t i = 0; i < link.inputs.size(); i++) {
      const size_t value = link.inputs[i];
      const char axis = link.kind->axes[i];
      if (value == NONE) continue;
      if (value >= inputs) {
        // What all sequences share is not computed from the batch.
        if (axis == '-' || axis == 'm' || axis == 'g' || axis == 'p' || (is_cache[value] && axis != 'b' && axis != 'c'))
          has_batch = false;
        computes_context |= axis == 'c';
        adds_computed |= axis == 'a';
        continue;
      }
      if (axis == 'a') addends.push_back(value);
      const char before = axes[value];
      if (before == UNKNOWN || (axis == 'r' && (before == 'a' || before == 'b')))
        axes[value] = axis;
      else if (before != axis && !(before == 'r' && (axis == 'a' || axis == 'b')))
        has_batch = false;
    }
    if (!addends.empty() && !adds_computed) given_addends.push_back(std::move(addends));
    for (size_t i = 1; i < link.outputs.size(); i++)
      if (link.outputs[i] != NONE && link.kind == &ATTENTION) is_cache[link.outputs[i]] = true;
  }
  std::replace(axes.begin(), axes.end(), UNKNOWN, '-');
}

}  // namespace tformer

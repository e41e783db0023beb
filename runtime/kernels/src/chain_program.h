// The program of a chain: its operators, and the values that they read and compute.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "operator.h"

namespace tformer {

constexpr size_t MAX_VALUES = 1 << 20;  // of a chain

struct Link {
  const OperatorKind* kind;
  std::unique_ptr<Operator> op;
  std::vector<size_t> inputs, outputs;  // values
  std::vector<size_t> ended;            // values between operators that no later operator reads
};

struct Program {
  size_t inputs, results, values;  // values are numbered: the inputs of the chain, its results, those between operators
  std::vector<Link> links;
  std::vector<char> axes;          // of each input, by the operators that read it (`OperatorKind::axes`)
  bool has_batch;                  // whether all values that are computed may have the batch on axis 0
  bool computes_context;           // whether it computes keys or values of a context
  std::vector<std::vector<size_t>> given_addends;  // inputs (axes a) of each operator that adds inputs alone
  size_t weights, weight_bytes;    // of all matrices

  // Reads the attributes `input_count`, `output_count` and `program`.
  explicit Program(const Attributes& attributes);

 private:
  Link read_link(const Attributes& attributes, std::string_view line);
  void find_ends(const ort::Api* api);
  void find_axes();
};

}  // namespace tformer

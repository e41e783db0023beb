// Greedy decoding within a chain that is a whole decode stage: it feeds the likeliest tokens to itself.
//
// The attribute `loop` of a chain has a line for each role of a value, with its number:
//
//   tokens 3           input (batch, 1) int64
//   logits 40          result (batch, 1, vocabulary)
//   plan 5             input (n) int64: the greatest number of steps, the number of end tokens, these tokens, and tokens that
//                      are never chosen; an empty one is for one step
//   counts 6           input of int64 or int32 that grows by 1 at each step; any number of lines
//   cache 7 41         input and result that share their memory; any number of lines
//
// With a plan for n steps, the logits have the shape (n * batch, 1, vocabulary). The first step reads the given tokens, and
// each later step the likeliest tokens of the step before. Of equal logits the first counts, and a NaN is likelier than
// any number, as for NumPy. The loop stops after the first step at which a sequence's token is an end token; the logits of
// steps after it are not written.
#pragma once

#include <utility>
#include <vector>

#include "operator.h"

namespace tformer {

struct GreedyLoop {
  size_t tokens, logits, plan;                      // values
  std::vector<size_t> counts;
  std::vector<std::pair<size_t, size_t>> caches;    // inputs and results

  // Reads the attribute `loop`. inputs, results: how many the chain has.
  GreedyLoop(const Attributes& attributes, size_t inputs, size_t results);
};

// A run of a loop.
class GreedyRun {
 public:
  const GreedyLoop& loop;
  size_t step = 0, steps = 1;  // the number of this step, and the greatest number of steps

  // values: the inputs of the chain; those that change become references to memory of this object.
  GreedyRun(const ort::Api* api, const GreedyLoop& loop, std::vector<Input>& values);

  // Chooses the next tokens. Returns whether there is another step, which reads them.
  // logits: (batch, vocabulary) of this step, the same after the call.
  bool next(float* logits, size_t vocabulary);

 private:
  std::vector<int64_t> ends, forbidden, tokens;
  std::vector<std::vector<int64_t>> long_counts;
  std::vector<std::vector<int32_t>> short_counts;
};

}  // namespace tformer

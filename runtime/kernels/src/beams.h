// The best continuations of beams.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tformer {

// Logits of a step, and the beams (groups, beams) that continue. A beam reads one row of the logits.
struct BeamStep {
  const float* logits;    // rows of `vocabulary` numbers, each `row_stride` numbers after the one before
  const float* norms;     // of each row of logits; a logit minus the norm of its row is a log-probability
  const int64_t* rows;    // of each beam
  const float* scores;    // of each beam: the log-probabilities so far
  size_t row_stride, vocabulary, groups, beams;
};

// The `width` best continuations of each group, all (groups, width), the best first; of equal ones the first beam's, then
// the likeliest, then the first token. Where there are fewer, `top` is -inf and the rest 0.
struct RankedBeams {
  float *top, *gains;         // summed scores, and the log-probabilities of the tokens
  int64_t *parents, *tokens;  // the beam in its group, and the token
  size_t width;
};

// Memory is allocated for one group. Logits that are -inf or NaN are never among the best.
void rank_beams(const BeamStep& step, const RankedBeams& ranked);

}  // namespace tformer

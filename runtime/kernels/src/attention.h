// Attention of new positions over their own sequence, over a cache that is extended by them, or over another sequence.
//
// Shapes: B batch, H heads, G key-value heads, N new positions, S slots of the cache, D head size. A group is the H / G
// heads that share keys and values.
#pragma once

#include <cstddef>
#include <cstdint>

#include "matrix.h"
#include "product.h"

namespace tformer {

constexpr size_t KEY_PANEL = 64;   // keys whose scores are computed together
constexpr size_t SCORE_LANES = 16;  // the sum of a row's weights has so many parts, each of every 16th position

// One row of queries: a new position and a head. It attends to the positions of its sequence before `end`.
struct AttentionRow {
  size_t end;
  const float* bias;  // added to the scores, one number a position; nullptr for none
  float sink;         // a score without a value; −∞ for none
  float* out;         // D numbers
};

// Some rows of one sequence that share keys and values.
struct AttentionTile {
  const float* queries;       // (rows, D), scaled
  const AttentionRow* rows;
  size_t row_count, size;     // size: D
  const float *keys, *values;  // of position 0
  size_t key_stride, value_stride;  // numbers between positions
  float* scores;              // (rows, score_stride)
  size_t score_stride;        // the greatest `end`, rounded up to a multiple of KEY_PANEL
  float* panel;               // (D, KEY_PANEL)
  float* sums;                // (rows, D)
};

// Keys or values: numbers between sequences, heads and positions.
struct Heads {
  const float* data;
  size_t batch_stride, head_stride, position_stride;

  const float* of(size_t b, size_t g) const { return data + b * batch_stride + g * head_stride; }
};

struct AttentionCall {
  const Path* path;
  size_t batch, heads, groups, length, size;  // B, H, G, N, D
  size_t slots;                 // S of the caches; 0 for none
  const float* queries;         // of the new positions; heads are next to each other
  size_t query_stride;          // numbers between positions
  Heads keys, values;           // of the new positions, or of all positions if there is no cache
  size_t positions;             // the number of these
  const float *past_keys, *past_values;  // (B, G, past_slots, D); may be the caches
  size_t past_slots;
  float *key_cache, *value_cache;  // (B, G, S, D)
  const int32_t* last;          // (B), the last position of each sequence; nullptr if all have `total` positions
  size_t total;                 // the greatest number of positions of a sequence, of keys and values
  bool causal;                  // whether a position attends to no later ones
  float scale;                  // of the scores
  const float *cosines, *sines;  // (positions, rotated / 2): queries and keys are rotated; nullptr for none
  size_t rotated, rotary_positions;
  bool interleaved;             // whether 2i and 2i + 1 are rotated together, instead of i and i + rotated / 2
  const float* bias;            // (B or 1, H or 1, N, positions); nullptr for none
  size_t bias_batch_stride, bias_head_stride, bias_row_stride;
  const float* sinks;           // (H); nullptr for none
  float* out;                   // (B, N, H · D)
};

// Why a call is refused; nullptr if it is not.
const char* attention_refusal(const AttentionCall& call);

// Throws std::bad_alloc. A row's result depends on its own sequence alone, not on the batch, the number of positions of
// a call, or the division of the work. The time grows with the positions that rows attend to; a thread holds the scores
// of at most 48 rows.
void attend(const AttentionCall& call, ParallelFor parallel_for, void* context);

}  // namespace tformer

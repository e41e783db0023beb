#include "greedy_loop.h"

#include <algorithm>
#include <limits>

#include "words.h"

namespace tformer {
namespace {

constexpr int64_t MAX_STEPS = 1 << 16;

// The place of the first of the greatest numbers; a NaN is greater than all others.
size_t likeliest(const float* logits, size_t count) {
  size_t best = 0;
  for (size_t i = 1; i < count; i++)
    if (!(logits[i] <= logits[best]) && logits[best] == logits[best]) best = i;
  return best;
}

}  // namespace

GreedyLoop::GreedyLoop(const Attributes& attributes, size_t inputs, size_t results) : tokens(NONE), logits(NONE), plan(NONE) {
  auto require_that = [&](bool holds) { require(attributes.api, holds, "tformer-kernels: a chain has a damaged loop"); };
  const std::string text = attributes.text("loop");
  for (std::string_view rest = text; !rest.empty();) {
    std::string_view line = take_until('\n', rest);
    auto next_value = [&](size_t first, size_t end) {
      const size_t value = number_of(take_until(' ', line)).value_or(NONE);
      require_that(value >= first && value < end);
      return value;
    };
    auto next_input = [&] { return next_value(0, inputs); };
    auto next_result = [&] { return next_value(inputs, inputs + results); };
    const std::string_view role = take_until(' ', line);
    if (role == "tokens") {
      tokens = next_input();
    } else if (role == "logits") {
      logits = next_result();
    } else if (role == "plan") {
      plan = next_input();
    } else if (role == "counts") {
      counts.push_back(next_input());
    } else {
      require_that(role == "cache");
      const size_t input = next_input();
      caches.emplace_back(input, next_result());
    }
    require_that(line.empty());
  }
  require_that(tokens != NONE && logits != NONE && plan != NONE);
}

GreedyRun::GreedyRun(const ort::Api* api, const GreedyLoop& loop, std::vector<Input>& values) : loop(loop) {
  const Input& plan = values[loop.plan];
  require(api, plan.type == ort::INT64 && plan.rank == 1, "tformer-kernels: the plan of a loop must be a list of integers");
  const size_t size = plan.size(0);
  if (size == 0) return;
  const int64_t* numbers = static_cast<const int64_t*>(plan.data);
  require(api, size >= 2 && numbers[0] >= 1 && numbers[0] <= MAX_STEPS && numbers[1] >= 0 &&
                   static_cast<uint64_t>(numbers[1]) <= size - 2,
          "tformer-kernels: the plan of a loop is damaged");
  steps = static_cast<size_t>(numbers[0]);
  if (steps == 1) return;
  ends.assign(numbers + 2, numbers + 2 + numbers[1]);
  forbidden.assign(numbers + 2 + numbers[1], numbers + size);
  Input& input = values[loop.tokens];
  require(api, input.type == ort::INT64 && input.rank == 2 && input.size(1) == 1 && input.size(0) > 0,
          "tformer-kernels: a loop reads one token of each sequence");
  tokens.assign(static_cast<const int64_t*>(input.data), static_cast<const int64_t*>(input.data) + input.size(0));
  input.data = tokens.data();
  long_counts.resize(loop.counts.size()), short_counts.resize(loop.counts.size());
  for (size_t i = 0; i < loop.counts.size(); i++) {
    Input& count = values[loop.counts[i]];
    const size_t numbers_of_count = count_of(count.sizes, count.rank);
    if (count.type == ort::INT64) {
      const int64_t* data = static_cast<const int64_t*>(count.data);
      long_counts[i].assign(data, data + numbers_of_count);
      count.data = long_counts[i].data();
    } else {
      require(api, count.type == ort::INT32, "tformer-kernels: the counts of a loop must be integers");
      const int32_t* data = static_cast<const int32_t*>(count.data);
      short_counts[i].assign(data, data + numbers_of_count);
      count.data = short_counts[i].data();
    }
  }
}

bool GreedyRun::next(float* logits, size_t vocabulary) {
  if (++step == steps) return false;
  bool has_ended = false;
  std::vector<float> saved(forbidden.size());
  for (size_t row = 0; row < tokens.size(); row++, logits += vocabulary) {
    auto is_there = [&](int64_t token) { return token >= 0 && static_cast<uint64_t>(token) < vocabulary; };
    for (size_t i = 0; i < forbidden.size(); i++)
      if (is_there(forbidden[i])) {
        saved[i] = logits[forbidden[i]];
        logits[forbidden[i]] = -std::numeric_limits<float>::infinity();
      }
    tokens[row] = static_cast<int64_t>(likeliest(logits, vocabulary));
    for (size_t i = forbidden.size(); i-- > 0;)  // backwards, as a token may be there twice
      if (is_there(forbidden[i])) logits[forbidden[i]] = saved[i];
    has_ended |= std::find(ends.begin(), ends.end(), tokens[row]) != ends.end();
  }
  if (has_ended) return false;
  for (std::vector<int64_t>& numbers : long_counts)
    for (int64_t& number : numbers) number++;
  for (std::vector<int32_t>& numbers : short_counts)
    for (int32_t& number : numbers) number++;
  return true;
}

}  // namespace tformer

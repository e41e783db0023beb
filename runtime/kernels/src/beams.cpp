#include "beams.h"

#include <cmath>
#include <vector>

namespace tformer {
namespace {

constexpr size_t BLOCK = 32;  // numbers that are compared at once

// The best of several numbers that come one after the other, the best first, and of equal ones the earlier first.
class Best {
 public:
  explicit Best(size_t width) : width_(width), numbers_(width), places_(width) {}

  void clear() { count_ = 0, least_ = -INFINITY; }
  size_t count() const { return count_; }
  float least() const { return least_; }  // that a number must exceed to be among them
  float number(size_t i) const { return numbers_[i]; }
  size_t place(size_t i) const { return places_[i]; }

  // A number that exceeds `least`.
  void add(float number, size_t place) {
    size_t i = count_ < width_ ? count_++ : width_ - 1;
    for (; i > 0 && numbers_[i - 1] < number; i--) numbers_[i] = numbers_[i - 1], places_[i] = places_[i - 1];
    numbers_[i] = number, places_[i] = place;
    if (count_ == width_) least_ = numbers_[width_ - 1];
  }

 private:
  size_t width_, count_ = 0;
  float least_ = -INFINITY;
  std::vector<float> numbers_;
  std::vector<size_t> places_;
};

void find_best(const float* numbers, size_t count, Best& best) {
  best.clear();
  size_t first = 0;
  for (; first + BLOCK <= count; first += BLOCK) {
    const float* block = numbers + first;
    const float least = best.least();
    int exceed = 0;
    for (size_t i = 0; i < BLOCK; i++) exceed |= block[i] > least;
    if (!exceed) continue;
    for (size_t i = 0; i < BLOCK; i++)
      if (block[i] > best.least()) best.add(block[i], first + i);
  }
  for (; first < count; first++)
    if (numbers[first] > best.least()) best.add(numbers[first], first);
}

}  // namespace

void rank_beams(const BeamStep& step, const RankedBeams& ranked) {
  Best of_row(ranked.width), of_group(ranked.width);
  // Of the numbers that are added to `of_group`: place b · width + i is the i-th best of beam b.
  std::vector<float> gains(step.beams * ranked.width);
  std::vector<size_t> tokens(step.beams * ranked.width);
  for (size_t g = 0; g < step.groups; g++) {
    of_group.clear();
    for (size_t b = 0; b < step.beams; b++) {
      const size_t beam = g * step.beams + b, row = static_cast<size_t>(step.rows[beam]);
      find_best(step.logits + row * step.row_stride, step.vocabulary, of_row);
      for (size_t i = 0; i < of_row.count(); i++) {
        const float gain = of_row.number(i) - step.norms[row], score = gain + step.scores[beam];
        if (!(score > of_group.least())) continue;
        gains[b * ranked.width + i] = gain, tokens[b * ranked.width + i] = of_row.place(i);
        of_group.add(score, b * ranked.width + i);
      }
    }
    for (size_t i = 0; i < ranked.width; i++) {
      const bool exists = i < of_group.count();
      const size_t place = exists ? of_group.place(i) : 0, out = g * ranked.width + i;
      ranked.top[out] = exists ? of_group.number(i) : -INFINITY;
      ranked.gains[out] = exists ? gains[place] : 0;
      ranked.parents[out] = static_cast<int64_t>(place / ranked.width);
      ranked.tokens[out] = exists ? static_cast<int64_t>(tokens[place]) : 0;
    }
  }
}

}  // namespace tformer

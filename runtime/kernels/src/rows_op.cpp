// The operators that read rows of tables and combine rows, in the domain ai.tformer. They are for chains of whole stages: alone
// they gain nothing next to those of onnxruntime.
//
// Lookup (table, indices, scale) → (y) is the rows of a table, of float32 or int8; of int8 they are multiplied by the numbers
// of the same rows of the scale, of shape (rows, 1). Negative indices count from the end.
//
// Arithmetic (a, b) → (y) is their sum, or their product if the attribute `multiplies` is 1.
//
// Select (x, positions) → (y) is the numbers of some positions of each sequence: y[b, i] = x[b, positions[b, i]].
#include <cstring>

#include "broadcast.h"
#include "operator.h"

namespace tformer {
namespace {

enum LookupInput : size_t { TABLE, INDICES, SCALE, LOOKUP_INPUTS };

// An index as a place of `count`.
size_t place_of(const ort::Api* api, int64_t index, size_t count) {
  const int64_t size = static_cast<int64_t>(count), place = index < 0 ? index + size : index;
  if (place < 0 || place >= size) {
    // The runtime reads these words, which are onnxruntime's (`backend/session.py`).
    const std::string message = "tformer-kernels: indices element out of data bounds, idx=" + std::to_string(index) +
                                " must be within the inclusive range [" + std::to_string(-size) + "," +
                                std::to_string(size - 1) + "]";
    fail(api, message.c_str());
  }
  return static_cast<size_t>(place);
}

class Lookup final : public Operator {
 public:
  explicit Lookup(const Attributes&) {}

  void run(Operands& operands) const override {
    const ort::Api* api = operands.api;
    const Input table = operands.input(TABLE), indices = operands.input(INDICES), scale = operands.input(SCALE);
    const bool is_integer = table.type == ort::INT8;
    require(api, table.data && table.rank == 2 && (is_integer || table.type == ort::FLOAT) && indices.data && indices.rank < MAX_RANK,
            "tformer-kernels: a table must have two axes, of float32 or int8");
    require(api, is_integer == (scale.data != nullptr) &&
                     (!is_integer || (scale.rank == 2 && scale.size(0) == table.size(0) && scale.size(1) == 1)),
            "tformer-kernels: a table of int8 must have a scale for each row");
    const size_t rows = table.size(0), size = table.size(1), count = count_of(indices.sizes, indices.rank);
    int64_t sizes[MAX_RANK];
    *std::copy_n(indices.sizes, indices.rank, sizes) = table.sizes[1];
    float* out = operands.output(0, sizes, indices.rank + 1);
    for (size_t i = 0; i < count; i++, out += size) {
      const size_t row = place_of(api, static_cast<const int64_t*>(indices.data)[i], rows);
      if (is_integer) {
        const int8_t* numbers = static_cast<const int8_t*>(table.data) + row * size;
        const float factor = scale.floats()[row];
        for (size_t j = 0; j < size; j++) out[j] = static_cast<float>(numbers[j]) * factor;
      } else {
        std::memcpy(out, table.floats() + row * size, size * sizeof(float));
      }
    }
  }
};

class Arithmetic final : public Operator {
 public:
  explicit Arithmetic(const Attributes& attributes) : multiplies(attributes.integer("multiplies") != 0) {}

  void run(Operands& operands) const override {
    const ort::Api* api = operands.api;
    const Input a = operands.input(0), b = operands.input(1);
    require(api, a.data && b.data && a.rank <= MAX_RANK && b.rank <= MAX_RANK && std::max(a.rank, b.rank) > 0,
            "tformer-kernels: a sum or a product needs arrays of 1 to 32 axes");
    const Shape shape = broadcast_shape(api, a, b);
    float* out = operands.output(0, shape.sizes, shape.rank);
    if (multiplies)
      combine(a, b, shape, out, [](float x, float y) { return x * y; });
    else
      combine(a, b, shape, out, [](float x, float y) { return x + y; });
  }

 private:
  const bool multiplies;
};

class Select final : public Operator {
 public:
  explicit Select(const Attributes&) {}

  void run(Operands& operands) const override {
    const ort::Api* api = operands.api;
    const Input x = operands.input(0), positions = operands.input(1);
    require(api, x.data && x.rank == 3 && positions.data && positions.rank == 2 && positions.size(0) == x.size(0),
            "tformer-kernels: there must be positions for each sequence");
    const size_t batch = x.size(0), length = x.size(1), size = x.size(2), count = positions.size(1);
    const int64_t sizes[] = {x.sizes[0], positions.sizes[1], x.sizes[2]};
    float* out = operands.output(0, sizes, 3);
    for (size_t i = 0; i < batch * count; i++, out += size) {
      const size_t place = place_of(api, static_cast<const int64_t*>(positions.data)[i], length);
      std::memcpy(out, x.floats() + (i / count * length + place) * size, size * sizeof(float));
    }
  }
};

}  // namespace

const OperatorKind LOOKUP = {"Lookup", LOOKUP_INPUTS, 1, 1 << SCALE, "*lf", "-p-", false, make_operator<Lookup>};
const OperatorKind ARITHMETIC = {"Arithmetic", 2, 1, 0, "ff", "aa", false, make_operator<Arithmetic>};
const OperatorKind SELECT = {"Select", 2, 1, 0, "fl", "rp", false, make_operator<Select>};

}  // namespace tformer

// The operators of products, in the domain ai.tformer: rows x (…, K) of float32 times a packed matrix (K, N).
//
// RowQuantizedMatMul (x) → (y) has integer weights. Attributes: `handle` of the matrix, the activation of the result
// (`activation`, `alpha`), and how rows are scaled (`RowScaling` and `Tile` say what each means): magnitude, zero, reciprocal,
// column_first (integers), floor, step, fixed_scale (floats).
//
// PackedMatMul (x) → (y) has float32 weights. Attributes: handle, activation, alpha.
//
// Both have the attribute `columns`, which the runtime reads when it rewrites a model.
#include "operator.h"
#include "product.h"
#include "store.h"

namespace tformer {
namespace {

class Product : public Operator {
 public:
  Product(const Attributes& attributes, bool is_float) : matrix(find_matrix(attributes.integer("handle"))) {
    require(attributes.api, matrix && (matrix->bits == FLOAT_BITS) == is_float,
            "tformer-kernels: the handle is of no packed matrix of this operator");
    activation = attributes.activation();
  }

  void run(Operands& operands) const override {
    const Input x = operands.input(0);
    require(operands.api, x.rank >= 1 && x.rank <= MAX_RANK && x.size(x.rank - 1) == matrix->inner,
            "tformer-kernels: the input's last axis must have as many numbers as the matrix has rows");
    const size_t rows = rows_of(x);
    Shape shape(x);
    shape.sizes[x.rank - 1] = static_cast<int64_t>(matrix->columns);
    multiply_rows(x.floats(), operands.output(0, shape.sizes, x.rank), rows, &operands);
  }

  const Matrix* weights() const override { return matrix.get(); }

 protected:
  const std::shared_ptr<const Matrix> matrix;
  Activation activation;

  virtual void multiply_rows(const float* x, float* out, size_t rows, Operands* operands) const = 0;
};

class QuantizedProduct final : public Product {
 public:
  explicit QuantizedProduct(const Attributes& attributes) : Product(attributes, false) {
    const int64_t zero = attributes.integer("zero");
    require(attributes.api, zero >= 0 && zero <= 255, "tformer-kernels: zero must be 0 to 255");
    scaling.zero = static_cast<int>(zero);
    scaling.magnitude = attributes.integer("magnitude") != 0;
    scaling.reciprocal = attributes.integer("reciprocal") != 0;
    scaling.floor = attributes.number("floor");
    scaling.step = attributes.number("step");
    scaling.fixed_scale = attributes.number("fixed_scale");
    column_first = attributes.integer("column_first") != 0;
  }

 private:
  RowScaling scaling;
  bool column_first;

  void multiply_rows(const float* x, float* out, size_t rows, Operands* operands) const override {
    multiply(Call{matrix.get(), scaling, column_first, x, out, rows, activation}, parallel_for, operands);
  }
};

class FloatProduct final : public Product {
 public:
  explicit FloatProduct(const Attributes& attributes) : Product(attributes, true) {}

 private:
  void multiply_rows(const float* x, float* out, size_t rows, Operands* operands) const override {
    multiply(FloatCall{matrix.get(), x, out, rows, activation}, parallel_for, operands);
  }
};

}  // namespace

const OperatorKind ROW_QUANTIZED_MATMUL = {"RowQuantizedMatMul", 1, 1, 0, "f", "r", false, make_operator<QuantizedProduct>};
const OperatorKind PACKED_MATMUL = {"PackedMatMul", 1, 1, 0, "f", "r", false, make_operator<FloatProduct>};

}  // namespace tformer

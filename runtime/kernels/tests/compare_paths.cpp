// Compares all paths of this processor with the scalar one, bit by bit, over random sizes, and gives the library sizes and
// handles that do not fit. Tests of the runtime compare with onnxruntime; this needs neither Python nor onnxruntime, so that
// it runs under sanitizers and in an emulator of another processor.
//
//     compare_paths [ROUNDS] [SEED]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "../src/attention.h"
#include "../src/elementwise.h"
#include "../src/paths.h"

extern "C" {
const char* tformer_kernels_path(uint32_t index);
int32_t tformer_kernels_supports(const char* path);
int64_t tformer_kernels_pack8(const char* path, const uint8_t* weights, int64_t row_stride, int64_t column_stride,
                              uint8_t flip, uint64_t inner, uint64_t columns, const float* scale, const float* bias,
                              void* packer, uint64_t mapped);
int64_t tformer_kernels_pack4(const char* path, const uint8_t* nibbles, const uint8_t* codes, uint64_t block,
                              uint64_t inner, uint64_t columns, const float* scale, const float* bias,
                              void* packer, uint64_t mapped);
int64_t tformer_kernels_pack_float(const char* path, const float* weights, int64_t row_stride, int64_t column_stride,
                                   uint64_t inner, uint64_t columns, const float* bias, void* packer, uint64_t mapped);
int64_t tformer_kernels_multiply_float(int64_t handle, const float* x, uint64_t rows, float* out);
int32_t tformer_kernels_release(int64_t handle);
int32_t tformer_kernels_matrices();
int64_t tformer_kernels_multiply(int64_t handle, const float* x, uint64_t rows, float* out, int32_t magnitude,
                                 float floor, float step, int32_t zero, int32_t reciprocal, float fixed_scale,
                                 int32_t column_first);
int64_t tformer_kernels_rank_beams(const float* logits, uint64_t row_stride, uint64_t vocabulary, const float* norms,
                                   const int64_t* rows, const float* scores, uint64_t groups, uint64_t beams,
                                   uint64_t width, float* numbers, int64_t* places);
}

namespace {

std::mt19937 random_bits;

size_t below(size_t limit) { return random_bits() % limit; }

// Whole vectors, so that reading beyond an end is noticed by a sanitizer.
template <class T>
std::vector<T> numbers(size_t count, T (*make)()) {
  std::vector<T> result(count);
  for (auto& number : result) number = make();
  return result;
}

float uniform() { return static_cast<float>(static_cast<int32_t>(random_bits())) * 0x1p-31f; }
float positive() { return std::fabs(uniform()) + 0.01f; }
uint8_t weight() { return static_cast<uint8_t>(static_cast<int8_t>(static_cast<int>(below(129)) - 64)); }
uint8_t byte() { return static_cast<uint8_t>(below(256)); }

struct Case {
  size_t inner, columns, rows, block;
  bool four_bits, by_columns, has_bias, column_first;
  int mode;  // magnitude, Relu, Gelu, the same with reciprocals, one scale
  std::vector<uint8_t> weights, codes;
  std::vector<float> scale, bias, x;
};

Case draw() {
  Case test;
  test.inner = 1 + below(below(4) ? 200 : 1500);
  test.columns = 1 + below(below(4) ? 70 : 700);
  test.rows = 1 + below(below(8) ? 60 : below(16) ? 500 : 1200);
  if (!below(150)) {  // so many weights are packed by two threads
    test.inner += 1000;
    test.columns += 1000;
    test.rows = 2;
  }
  test.block = size_t{16} << below(4);
  test.four_bits = below(2);
  test.by_columns = below(2);
  test.has_bias = below(2);
  test.column_first = below(2);
  test.mode = static_cast<int>(below(7));
  const size_t blocks = (test.inner + test.block - 1) / test.block;
  test.weights = test.four_bits ? numbers(test.columns * blocks * test.block / 2, byte)
                                : numbers(test.inner * test.columns, weight);
  test.codes = numbers(test.columns * blocks, byte);
  test.scale = numbers(test.columns, positive);
  test.bias = numbers(test.columns, uniform);
  test.x = numbers(test.rows * test.inner, uniform);
  for (size_t r = 0; r < test.rows; r++) {
    const float factor = std::exp2(static_cast<float>(below(20)) - 10);
    const bool is_zero = below(12) == 0;  // without negative zeros: which of both is the maximum depends on the order
    for (size_t i = r * test.inner; i < (r + 1) * test.inner; i++) test.x[i] = is_zero ? 0 : test.x[i] * factor;
  }
  return test;
}

int64_t pack(const Case& test, const char* path) {
  const float* bias = test.has_bias ? test.bias.data() : nullptr;
  if (test.four_bits)
    return tformer_kernels_pack4(path, test.weights.data(), test.codes.data(), test.block, test.inner,
                                 test.columns, test.scale.data(), bias, nullptr, 0);
  const int64_t inner = static_cast<int64_t>(test.inner), columns = static_cast<int64_t>(test.columns);
  return tformer_kernels_pack8(path, test.weights.data(), test.by_columns ? 1 : columns, test.by_columns ? inner : 1,
                               0, test.inner, test.columns, test.scale.data(), bias, nullptr, 0);
}

bool multiply(const Case& test, const char* path, std::vector<float>& out) {
  const int64_t handle = pack(test, path);
  if (handle <= 0) return false;
  out.assign(test.rows * test.columns, NAN);
  const bool relu = test.mode % 3 == 1, gelu = test.mode % 3 == 2;
  const int64_t status = tformer_kernels_multiply(
      handle, test.x.data(), test.rows, out.data(), !relu && !gelu, gelu ? 0.1701f : 0, 1.0f / (relu ? 255.0f : 127.0f),
      relu ? 0 : 128, test.mode >= 3 && test.mode < 6, test.mode == 6 ? 0.03f : 0, test.column_first);
  return tformer_kernels_release(handle) && status == 0;
}

void compare(const Case& test, const std::vector<std::string>& paths) {
  std::vector<float> expected, actual;
  if (!multiply(test, "scalar", expected)) std::abort();
  for (const auto& path : paths) {
    const bool same = multiply(test, path.c_str(), actual) &&
                      std::memcmp(actual.data(), expected.data(), actual.size() * sizeof(float)) == 0;
    if (same) continue;
    std::printf("%s differs: inner %zu, columns %zu, rows %zu, bits %d, block %zu, mode %d\n", path.c_str(), test.inner,
                test.columns, test.rows, test.four_bits ? 4 : 8, test.block, test.mode);
    std::exit(1);
  }
}

int64_t pack_floats(const Case& test, const char* path, const std::vector<float>& weights) {
  const int64_t inner = static_cast<int64_t>(test.inner), columns = static_cast<int64_t>(test.columns);
  return tformer_kernels_pack_float(path, weights.data(), test.by_columns ? 1 : columns, test.by_columns ? inner : 1,
                                    test.inner, test.columns, test.has_bias ? test.bias.data() : nullptr, nullptr, 0);
}

bool is_same(const float* actual, const float* expected, size_t count) {
  return count == 0 || std::memcmp(actual, expected, count * sizeof(float)) == 0;
}

// Products of float32: all paths agree, and a row that is alone agrees with itself among others.
void compare_floats(const Case& test, const std::vector<std::string>& paths) {
  const std::vector<float> weights = numbers(test.inner * test.columns, uniform);
  const size_t size = test.rows * test.columns, row = below(test.rows);
  std::vector<float> expected(size);
  for (const auto& path : paths) {
    std::vector<float> actual(size, NAN), alone(test.columns, NAN);
    const int64_t handle = pack_floats(test, path.c_str(), weights);
    if (handle <= 0 || tformer_kernels_multiply_float(handle, test.x.data(), test.rows, actual.data()) != 0 ||
        tformer_kernels_multiply_float(handle, test.x.data() + row * test.inner, 1, alone.data()) != 0 ||
        !tformer_kernels_release(handle))
      std::abort();
    if (path == paths.front()) expected = actual;
    if (is_same(actual.data(), expected.data(), size) &&
        is_same(alone.data(), expected.data() + row * test.columns, test.columns))
      continue;
    std::printf("%s differs: float32, inner %zu, columns %zu, rows %zu\n", path.c_str(), test.inner, test.columns, test.rows);
    std::exit(1);
  }
}

void one_by_one(void*, void (*function)(void*, size_t), size_t count, void* data) {
  for (size_t i = count; i-- > 0;) function(data, i);  // the last first: tasks do not depend on each other
}

struct AttentionCase {
  size_t batch, heads, groups, length, size, slots, total, rotated, positions;
  bool cached, causal, has_bias, has_sinks, interleaved;
  std::vector<float> queries, keys, values, past_keys, past_values, cosines, sines, bias, sinks;
  std::vector<int32_t> last;
};

AttentionCase draw_attention() {
  AttentionCase test;
  test.cached = below(3);
  test.groups = 1 + below(3);
  test.heads = test.groups * (1 + below(4));
  test.batch = 1 + below(3);
  test.length = 1 + below(below(2) ? 4 : 90);
  test.size = 1 + below(80);
  if (below(2)) test.size = (test.size + 7) / 8 * 8;
  test.causal = test.cached && below(4);
  test.has_bias = below(3) == 0;
  test.has_sinks = below(3) == 0;
  test.interleaved = below(2);
  const size_t past = test.cached && below(2) ? 1 + below(200) : 0;
  test.total = test.cached ? past + test.length : 1 + below(150);
  for (size_t b = 0; b < test.batch; b++) {
    const size_t fewest = past > 0 ? test.length : test.cached ? 1 : test.total;
    test.last.push_back(static_cast<int32_t>((b == 0 ? test.total : fewest + below(test.total - fewest + 1)) - 1));
  }
  test.slots = test.cached ? test.total + below(5) : 0;
  test.rotated = test.cached && below(2) ? 2 * below(test.size / 2 + 1) : 0;
  test.positions = test.cached ? test.length : test.total;  // of the given keys
  test.queries = numbers(test.batch * test.length * test.heads * test.size, uniform);
  test.keys = numbers(test.batch * test.positions * test.groups * test.size, uniform);
  test.values = numbers(test.batch * test.positions * test.groups * test.size, uniform);
  test.past_keys = numbers(test.batch * test.groups * test.slots * test.size, uniform);
  test.past_values = numbers(test.batch * test.groups * test.slots * test.size, uniform);
  test.cosines = numbers(test.total * (test.rotated / 2), uniform);
  test.sines = numbers(test.total * (test.rotated / 2), uniform);
  test.bias = numbers(test.batch * test.length * test.total, uniform);
  test.sinks = numbers(test.heads, uniform);
  return test;
}

struct AttentionResult {
  std::vector<float> out, keys, values;

  bool operator==(const AttentionResult& other) const {
    return out.size() == other.out.size() && is_same(out.data(), other.out.data(), out.size()) &&
           is_same(keys.data(), other.keys.data(), keys.size()) && is_same(values.data(), other.values.data(), values.size());
  }
};

AttentionResult attend_with(const AttentionCase& test, const std::string& path) {
  using namespace tformer;
  AttentionResult result{std::vector<float>(test.queries.size(), NAN), test.past_keys, test.past_values};
  AttentionCall call{};
  call.path = find_path(path.c_str());
  call.batch = test.batch, call.heads = test.heads, call.groups = test.groups;
  call.length = test.length, call.size = test.size, call.slots = test.slots, call.total = test.total;
  call.queries = test.queries.data(), call.query_stride = test.heads * test.size;
  const size_t width = test.groups * test.size;
  call.positions = test.positions;
  call.keys = {test.keys.data(), test.positions * width, test.size, width};
  call.values = {test.values.data(), test.positions * width, test.size, width};
  call.last = test.last.data(), call.causal = test.causal, call.scale = 0.5f;
  if (test.cached) {
    call.past_keys = call.key_cache = result.keys.data();
    call.past_values = call.value_cache = result.values.data();
    call.past_slots = test.slots;
  }
  if (test.rotated > 0) {
    call.cosines = test.cosines.data(), call.sines = test.sines.data();
    call.rotated = test.rotated, call.rotary_positions = test.total, call.interleaved = test.interleaved;
  }
  if (test.has_bias) {
    call.bias = test.bias.data(), call.bias_row_stride = test.total, call.bias_batch_stride = test.length * test.total;
  }
  if (test.has_sinks) call.sinks = test.sinks.data();
  call.out = result.out.data();
  if (attention_refusal(call) != nullptr) {
    std::printf("%s\n", attention_refusal(call));
    std::abort();
  }
  attend(call, one_by_one, nullptr);
  return result;
}

void compare_attention(const std::vector<std::string>& paths) {
  const AttentionCase test = draw_attention();
  const AttentionResult expected = attend_with(test, "scalar");
  for (const auto& path : paths) {
    if (attend_with(test, path) == expected) continue;
    std::printf("%s differs: attention, batch %zu, heads %zu of %zu, groups %zu, new %zu, total %zu\n", path.c_str(),
                test.batch, test.heads, test.size, test.groups, test.length, test.total);
    std::exit(1);
  }
}

// Activations, gates and norms: all paths agree, and a row that is alone agrees with itself among others.
void compare_elementwise(const std::vector<std::string>& paths) {
  using namespace tformer;
  const size_t rows = 1 + below(below(4) ? 20 : 300), size = 1 + below(below(2) ? 70 : 900), row = below(rows);
  const std::vector<float> x = numbers(rows * 2 * size, +[] { return 12 * uniform(); }), residual = numbers(rows * size, uniform);
  const std::vector<float> weight = numbers(size, uniform), bias = numbers(size, uniform);
  const Activation activation{static_cast<Activation::Kind>(below(Activation::SWISH + 1)), positive()};
  const bool has_residual = below(2), has_bias = below(2), keeps_sum = below(2);
  const NormTile norm{x.data(), has_residual ? residual.data() : nullptr, weight.data(), has_bias ? bias.data() : nullptr,
                      nullptr, nullptr, rows, size, 1e-5f, below(2) != 0};
  const GateTile gated{x.data(), nullptr, rows, size, below(2) != 0, activation};
  std::vector<float> expected[4];
  for (const auto& name : paths) {
    const Path& path = *find_path(name.c_str());
    std::vector<float> actual[4] = {std::vector<float>(rows * size, NAN), std::vector<float>(rows * size, NAN),
                                    std::vector<float>(rows * size, NAN), x};
    NormTile all = norm, one = norm;
    all.out = actual[0].data(), all.sum = keeps_sum ? actual[1].data() : nullptr;
    normalise(path, all, one_by_one, nullptr);
    GateTile gates = gated;
    gates.out = actual[2].data();
    gate(path, gates, one_by_one, nullptr);
    path.elementwise->activate(actual[3].data(), rows, 2 * size, size, activation);
    std::vector<float> alone(size);
    one.x += row * size, one.out = alone.data(), one.rows = 1;
    if (has_residual) one.residual += row * size;
    normalise(path, one, one_by_one, nullptr);
    bool same = is_same(alone.data(), actual[0].data() + row * size, size);
    if (name == paths.front())
      for (size_t i = 0; i < 4; i++) expected[i] = actual[i];
    for (size_t i = 0; i < 4; i++) same = same && is_same(actual[i].data(), expected[i].data(), actual[i].size());
    if (same) continue;
    std::printf("%s differs: rows %zu of %zu, activation %d, norm with residual %d, bias %d\n", name.c_str(), rows, size,
                activation.kind, has_residual, has_bias);
    std::exit(1);
  }
}

// The best continuations of a group of beams are those of a stable sort.
void compare_beams() {
  const size_t beams = 1 + below(5), width = 1 + below(10), vocabulary = 1 + below(200);
  std::vector<float> logits = numbers(beams * vocabulary, uniform), norms = numbers(beams, uniform);
  std::vector<float> scores = numbers(beams, uniform), top(2 * width);
  for (float& logit : logits) logit = below(4) ? std::round(logit * 8) : -INFINITY;
  std::vector<int64_t> rows(beams), places(2 * width);
  for (size_t b = 0; b < beams; b++) rows[b] = static_cast<int64_t>(beams - 1 - b);
  struct Continuation {
    float score, gain;
    size_t beam, token;
  };
  std::vector<Continuation> all;
  for (size_t b = 0; b < beams; b++) {
    const float* row = logits.data() + (beams - 1 - b) * vocabulary;
    std::vector<size_t> tokens(vocabulary);
    std::iota(tokens.begin(), tokens.end(), 0);
    std::stable_sort(tokens.begin(), tokens.end(), [&](size_t i, size_t j) { return row[i] > row[j]; });
    for (size_t i = 0; i < std::min(width, vocabulary) && row[tokens[i]] > -INFINITY; i++) {
      const float gain = row[tokens[i]] - norms[beams - 1 - b];
      all.push_back({gain + scores[b], gain, b, tokens[i]});
    }
  }
  std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.score > b.score; });
  if (tformer_kernels_rank_beams(logits.data(), vocabulary, vocabulary, norms.data(), rows.data(), scores.data(), 1, beams,
                                 width, top.data(), places.data()) != 0)
    std::abort();
  for (size_t i = 0; i < width; i++) {
    const bool exists = i < all.size();
    if (exists ? top[i] != all[i].score || top[width + i] != all[i].gain ||
                     places[i] != static_cast<int64_t>(all[i].beam) ||
                     places[width + i] != static_cast<int64_t>(all[i].token)
               : top[i] != -INFINITY) {
      std::fprintf(stderr, "beams: %zu beams, width %zu, vocabulary %zu, place %zu\n", beams, width, vocabulary, i);
      std::abort();
    }
  }
}

// Sizes and handles that must be refused before anything is read.
void give_nonsense(const std::vector<std::string>& paths) {
  const uint64_t sizes[] = {0, 65536, uint64_t{1} << 25, uint64_t{1} << 63, ~uint64_t{0}};
  uint8_t nothing[1] = {};
  float scale[1] = {};
  for (const auto& path : paths)
    for (uint64_t size : sizes) {
      if (tformer_kernels_pack8(path.c_str(), nothing, 1, 1, 0, size, 1, scale, nullptr, nullptr, 0) > 0 && size != 1)
        std::abort();
      if (size != 65536 && tformer_kernels_pack8(path.c_str(), nothing, 1, 1, 0, 1, size, scale, nullptr, nullptr, 0) > 0)
        std::abort();
      if (tformer_kernels_pack_float(path.c_str(), scale, 1, 1, size, 1, nullptr, nullptr, 0) > 0) std::abort();
      if (size != 65536 && tformer_kernels_pack_float(path.c_str(), scale, 1, 1, 1, size, nullptr, nullptr, 0) > 0)
        std::abort();
      if (tformer_kernels_pack4(path.c_str(), nothing, nothing, size, 1, 1, scale, nullptr, nullptr, 0) > 0) std::abort();
    }
  float x[1] = {}, out[1] = {};
  for (int i = 0; i < 1000; i++) {
    const int64_t handle = static_cast<int64_t>(static_cast<uint64_t>(random_bits()) << below(33));
    if (tformer_kernels_multiply(handle, x, 1, out, 1, 0, 1, 128, 0, 0, 0) == 0 ||
        tformer_kernels_multiply_float(handle, x, 1, out) == 0 || tformer_kernels_release(handle))
      std::abort();
  }
  const std::vector<uint8_t> bytes(64);
  const int64_t integers =
      tformer_kernels_pack8("scalar", bytes.data(), 8, 1, 0, 8, 8, numbers(8, positive).data(), nullptr, nullptr, 0);
  const int64_t floats =
      tformer_kernels_pack_float("scalar", numbers(64, uniform).data(), 8, 1, 8, 8, nullptr, nullptr, 0);
  if (integers <= 0 || floats <= 0 || tformer_kernels_multiply_float(integers, x, 0, out) == 0 ||
      tformer_kernels_multiply(floats, x, 0, out, 1, 0, 1, 128, 0, 0, 0) == 0 || !tformer_kernels_release(integers) ||
      !tformer_kernels_release(floats))
    std::abort();
}

}  // namespace

int main(int count, char** arguments) {
  const int rounds = count > 1 ? std::atoi(arguments[1]) : 200;
  random_bits.seed(count > 2 ? static_cast<unsigned>(std::atoi(arguments[2])) : 0);
  std::vector<std::string> paths;
  for (uint32_t i = 0; const char* path = tformer_kernels_path(i); i++)
    if (tformer_kernels_supports(path)) paths.emplace_back(path);
  give_nonsense(paths);
  for (int i = 0; i < rounds; i++) {
    const Case test = draw();
    compare(test, paths);
    compare_floats(test, paths);
    compare_attention(paths);
    compare_elementwise(paths);
    compare_beams();
  }
  if (tformer_kernels_matrices() != 0) std::abort();
  std::printf("%d products, attentions, activations, gates and norms are the same on", rounds);
  for (const auto& path : paths) std::printf(" %s", path.c_str());
  std::printf("\n");
}

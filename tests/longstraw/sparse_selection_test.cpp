#include "longstraw/sparse_selection.h"

#include "core/base/errors.h"
#include "core/device/memory_meter.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>

namespace longstraw {
namespace {

class CountAllocations : public testing::Environment {
 public:
  void SetUp() override { core::device::install_counting_allocator(); }
};
const auto* const kCounting = testing::AddGlobalTestEnvironment(new CountAllocations);

std::vector<Span> spans_of(const std::vector<int64_t>& lengths) {
  std::vector<Span> spans;
  int64_t begin = 0;
  for (const int64_t length : lengths) {
    spans.push_back({begin, begin + length});
    begin += length;
  }
  return spans;
}

// One query at a time, in the words of the definition: all scores in float64, sorted so that equal ones keep their order.
at::Tensor naive(const SelectionInput& input) {
  const int64_t past = input.past_key_Nd.defined() ? input.past_key_Nd.size(0) : 0;
  int64_t longest = 0;
  for (const Span& span : input.spans) longest = std::max(longest, span.end - span.begin);
  at::Tensor result = at::full({input.query_Shd.size(0), std::min(input.top_k, past + longest)}, -1, at::kInt);
  for (const Span& span : input.spans) {
    for (int64_t row = span.begin; row < span.end; ++row) {
      at::Tensor keys = input.own_key_Sd.slice(0, span.begin, row + 1).to(at::kDouble);
      if (past > 0) keys = at::cat({input.past_key_Nd.to(at::kDouble), keys}, 0);
      const at::Tensor products = at::relu(at::matmul(keys, input.query_Shd[row].to(at::kDouble).t()));
      const at::Tensor score = at::mv(products, input.weight_Sh[row].to(at::kDouble));
      std::vector<int64_t> order(static_cast<size_t>(keys.size(0)));
      std::iota(order.begin(), order.end(), 0);
      const double* const s = score.const_data_ptr<double>();
      std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return s[a] > s[b]; });
      order.resize(std::min(order.size(), static_cast<size_t>(input.top_k)));
      std::sort(order.begin(), order.end());
      result[row].slice(0, 0, static_cast<int64_t>(order.size())).copy_(at::tensor(order));
    }
  }
  return result;
}

// Products and sums of small integers are exact in every dtype and order: many scores are equal, most of all 0.
SelectionInput integer_input(int64_t past, const std::vector<int64_t>& lengths, int64_t heads, int64_t d, int64_t top_k,
                             at::ScalarType keys = at::kFloat, at::ScalarType wide = at::kFloat) {
  const int64_t rows = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  const auto draw = [](at::IntArrayRef shape, at::ScalarType dtype) { return at::randint(-2, 3, shape, at::kDouble).to(dtype); };
  SelectionInput input{draw({rows, heads, d}, keys), draw({rows, d}, keys), {},
                       draw({rows, heads}, wide),    spans_of(lengths),     top_k};
  if (past > 0) input.past_key_Nd = draw({past, d}, keys);
  return input;
}

std::vector<int64_t> draw_lengths(int64_t most) {
  std::vector<int64_t> lengths(static_cast<size_t>(*rc::gen::inRange<int64_t>(1, 5)));
  for (auto& length : lengths) length = *rc::gen::inRange<int64_t>(1, most);
  return lengths;
}

RC_GTEST_PROP(SparseSelection, TakesTheLargestScoresAndOfEqualOnesTheFirst, ()) {
  at::manual_seed(*rc::gen::inRange(0, 100000));
  const auto dtype = *rc::gen::elementOf(std::vector<at::ScalarType>{at::kBFloat16, at::kFloat, at::kDouble});
  const auto wide = *rc::gen::elementOf(std::vector<at::ScalarType>{at::kFloat, at::kDouble});
  const SelectionInput input = integer_input(*rc::gen::inRange<int64_t>(0, 40), draw_lengths(20), *rc::gen::inRange<int64_t>(1, 5),
                                             *rc::gen::inRange<int64_t>(1, 6), *rc::gen::inRange<int64_t>(1, 50), dtype, wide);
  const at::Tensor wanted = naive(input);
  RC_ASSERT(at::equal(select_top_keys(input), wanted));
  const SelectionTiling tiling{.key_block = *rc::gen::inRange<int64_t>(1, 30), .query_tile = *rc::gen::inRange<int64_t>(1, 30)};
  RC_ASSERT(at::equal(select_top_keys(input, tiling), wanted));
}

RC_GTEST_PROP(SparseSelection, AgreesWithFloat64SortingOnScoresWithoutTies, ()) {
  at::manual_seed(*rc::gen::inRange(0, 100000));
  const auto lengths = draw_lengths(20);
  SelectionInput input =
      integer_input(*rc::gen::inRange<int64_t>(0, 40), lengths, 17, 8, *rc::gen::inRange<int64_t>(1, 50), at::kDouble, at::kDouble);
  for (at::Tensor* x : {&input.query_Shd, &input.own_key_Sd, &input.weight_Sh}) x->normal_();
  if (input.past_key_Nd.defined()) input.past_key_Nd.normal_();
  RC_ASSERT(at::equal(select_top_keys(input, {.key_block = 7, .query_tile = 5}), naive(input)));
}

RC_GTEST_PROP(SparseSelection, WhereThePastEndsDoesNotMatter, ()) {
  at::manual_seed(*rc::gen::inRange(0, 100000));
  const int64_t tokens = *rc::gen::inRange<int64_t>(2, 60), cut = *rc::gen::inRange<int64_t>(1, tokens);
  const SelectionInput whole = integer_input(0, {tokens}, 3, 4, *rc::gen::inRange<int64_t>(1, 30));
  SelectionInput rest = whole;
  rest.query_Shd = whole.query_Shd.slice(0, cut);
  rest.own_key_Sd = whole.own_key_Sd.slice(0, cut);
  rest.past_key_Nd = whole.own_key_Sd.slice(0, 0, cut);
  rest.weight_Sh = whole.weight_Sh.slice(0, cut);
  rest.spans = {{0, tokens - cut}};
  RC_ASSERT(at::equal(select_top_keys(rest), select_top_keys(whole).slice(0, cut)));
}

TEST(SparseSelection, AllScoresEqualTakesTheFirstKeysOverManyBlocks) {
  SelectionInput input = integer_input(9000, {3}, 2, 4, 2048);
  input.weight_Sh.zero_();
  const at::Tensor first = at::arange(2048, at::kInt).expand({3, 2048});
  EXPECT_TRUE(at::equal(select_top_keys(input), first));
  // -0 equals 0.
  input.weight_Sh.fill_(-0.0);
  input.weight_Sh[0].fill_(0.0);
  EXPECT_TRUE(at::equal(select_top_keys(input), first));
}

TEST(SparseSelection, RealScoresDoNotDependOnTheBlocksAndRepeatBitForBit) {
  at::manual_seed(3);
  SelectionInput input = integer_input(9000, {40, 1}, 8, 32, 1024);
  for (at::Tensor* x : {&input.query_Shd, &input.own_key_Sd, &input.past_key_Nd, &input.weight_Sh}) x->normal_();
  const at::Tensor positions = select_top_keys(input);
  EXPECT_EQ(selection_hash(select_top_keys(input)), selection_hash(positions));
  // Scores of neighbours in rank are about 1e-3 apart here, roundings 1e-6: no choice hangs on the last bit.
  EXPECT_TRUE(at::equal(select_top_keys(input, {.key_block = 1000, .query_tile = 64}), positions));
  EXPECT_TRUE(at::equal(select_top_keys(input, {.key_block = 333, .query_tile = 7}), positions));
  EXPECT_TRUE(at::equal(positions, naive(input)));
}

TEST(SparseSelection, AScoreThatIsNotANumberIsChosen) {
  SelectionInput input = integer_input(50, {4}, 2, 4, 3);
  input.past_key_Nd[17].fill_(std::numeric_limits<double>::quiet_NaN());
  const at::Tensor positions = select_top_keys(input, {.key_block = 8});
  EXPECT_TRUE(positions.eq(17).any(1).all().item<bool>());
  // All of them: still a valid choice.
  input.query_Shd.fill_(std::numeric_limits<double>::quiet_NaN());
  EXPECT_TRUE(at::equal(select_top_keys(input, {.key_block = 8}), at::arange(3, at::kInt).expand({4, 3})));
}

TEST(SparseSelection, AnInfinitelyLowScoreComesBeforeAKeyThatIsNotVisible) {
  SelectionInput input = integer_input(0, {5}, 1, 2, 4);
  input.query_Shd.fill_(1.0);
  input.own_key_Sd.fill_(1.0);
  input.weight_Sh.fill_(-std::numeric_limits<double>::infinity());
  EXPECT_TRUE(at::equal(select_top_keys(input)[1], at::tensor({0, 1, -1, -1}, at::kInt)));
  EXPECT_TRUE(at::equal(select_top_keys(input)[4], at::tensor({0, 1, 2, 3}, at::kInt)));
}

TEST(SparseSelection, TheHashTellsSelectionsApart) {
  const at::Tensor positions = at::arange(24, at::kInt).view({4, 6});
  at::Tensor other = positions.clone();
  EXPECT_EQ(selection_hash(other), selection_hash(positions));
  EXPECT_EQ(selection_hash(other.to(at::kLong)), selection_hash(positions));
  other[3][5] = 24;
  EXPECT_NE(selection_hash(other), selection_hash(positions));
  EXPECT_NE(selection_hash(positions.view({6, 4})), selection_hash(positions));
}

// The plan is a sum of the large tensors; 5 % are left for small ones and for rounding to the allocator's granule.
TEST(SparseSelection, HoldsTheBytesItPlansWhateverTheLengthOfThePast) {
  const core::device::MemoryMeter meter(at::kCPU);
  for (const int64_t past : {20000, 40000}) {
    const SelectionInput input = integer_input(past, {150}, 4, 32, 1024);
    const int64_t before = meter.live_bytes();
    meter.reset_peak();
    const at::Tensor positions = select_top_keys(input);
    const auto held = static_cast<double>(meter.peak_bytes() - before - static_cast<int64_t>(positions.nbytes()));
    const auto planned = static_cast<double>(
        selection_bytes({.rows = 150, .heads = 4, .head_dim = 32, .keys = past + 150, .top_k = 1024, .dtype = at::kFloat}));
    EXPECT_NEAR(held, planned, 0.05 * planned);
  }
}

TEST(SparseSelection, RefusesWhatDoesNotFitTogether) {
  const SelectionInput good = integer_input(5, {3, 2}, 2, 4, 3);
  EXPECT_NO_THROW(select_top_keys(good));
  const auto refuses = [&](auto change) {
    SelectionInput bad = good;
    change(bad);
    EXPECT_THROW(select_top_keys(bad), ConfigError);
  };
  refuses([](SelectionInput& in) { in.top_k = 0; });
  refuses([](SelectionInput& in) { in.spans.pop_back(); });
  refuses([](SelectionInput& in) { in.spans[1].begin = 2; });
  refuses([](SelectionInput& in) { in.past_key_Nd = in.past_key_Nd.slice(1, 1); });
  refuses([](SelectionInput& in) { in.own_key_Sd = in.own_key_Sd.slice(0, 1); });
  refuses([](SelectionInput& in) { in.weight_Sh = in.weight_Sh.to(at::kBFloat16); });
  refuses([](SelectionInput& in) { in.query_Shd = in.query_Shd.flatten(1); });
}

}  // namespace
}  // namespace longstraw

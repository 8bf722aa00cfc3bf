// read(write(batch)) == batch, in both layouts, for any batch.

#include "core/data/rollouts.h"
#include "tests/data/scratch.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <bit>
#include <cmath>

namespace longstraw::core::data {
namespace {

rc::Gen<double> any_finite() {
  return rc::gen::suchThat(
      rc::gen::map(rc::gen::arbitrary<std::uint64_t>(), [](std::uint64_t bits) { return std::bit_cast<double>(bits); }),
      [](double x) { return std::isfinite(x); });
}

rc::Gen<std::vector<std::int64_t>> ids() {
  return rc::gen::nonEmpty(rc::gen::container<std::vector<std::int64_t>>(
      rc::gen::map(rc::gen::arbitrary<std::int64_t>(), [](std::int64_t x) { return x & INT64_MAX; })));
}

struct GroupColumns {
  bool advantage, old_logprobs, ref_logprobs, sampling_logprobs;
  std::size_t reward_parts;
};

Response any_response(const GroupColumns& has, bool has_reward) {
  Response r;
  r.completion_ids = *ids();
  const auto logprobs = [&] { return *rc::gen::container<std::vector<double>>(r.completion_ids.size(), any_finite()); };
  if (has_reward) r.reward = *any_finite();
  for (std::size_t k = 0; k < has.reward_parts; ++k) {
    r.reward_parts.push_back(*rc::gen::arbitrary<bool>() ? std::optional(*any_finite()) : std::nullopt);
  }
  if (has.advantage) r.advantage = *any_finite();
  if (has.old_logprobs) r.old_logprobs = logprobs();
  if (has.ref_logprobs) r.ref_logprobs = logprobs();
  if (has.sampling_logprobs) r.sampling_logprobs = logprobs();
  if (*rc::gen::arbitrary<bool>()) {
    r.completion_mask =
        *rc::gen::container<std::vector<std::uint8_t>>(r.completion_ids.size(), rc::gen::inRange<std::uint8_t>(0, 2));
    r.completion_mask->front() = 1;  // a group with nothing but masked tokens is refused
  }
  return r;
}

Batch any_batch() {
  Batch batch;
  const int prompts = *rc::gen::inRange(1, 4);
  for (int p = 0; p < prompts; ++p) {
    const GroupColumns has = {*rc::gen::arbitrary<bool>(), *rc::gen::arbitrary<bool>(), *rc::gen::arbitrary<bool>(),
                              *rc::gen::arbitrary<bool>(), *rc::gen::inRange<std::size_t>(0, 4)};
    PromptGroup group{std::to_string(p) + *rc::gen::container<std::string>(rc::gen::inRange<char>(0, 127)), *ids(), {}};
    const int members = *rc::gen::inRange(1, 5);
    for (int m = 0; m < members; ++m) group.responses.push_back(any_response(has, m == 0 || *rc::gen::arbitrary<bool>()));
    batch.push_back(std::move(group));
  }
  return batch;
}

RC_GTEST_PROP(RolloutsRoundTrip, both_layouts_give_back_the_batch_and_its_hash, ()) {
  const testing_support::Scratch scratch;
  const Batch batch = any_batch();
  for (const RolloutLayout layout : {RolloutLayout::kCompletions, RolloutLayout::kGroups}) {
    write_rollouts(scratch.path("r.jsonl"), batch, layout);
    const Batch read = read_rollouts(scratch.path("r.jsonl"));
    RC_ASSERT(read == batch);
    RC_ASSERT(data_sha256(read) == data_sha256(batch));
  }
}

}  // namespace
}  // namespace longstraw::core::data

// Whatever is done to a file, reading it gives a batch or says what is wrong; nothing else.

#include "app/config.h"
#include "core/config/load.h"
#include "core/data/describe.h"
#include "core/data/prompts.h"
#include "core/data/rollouts.h"
#include "tests/data/scratch.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

namespace longstraw::core::data {
namespace {

const std::string kRollouts =
    R"({"prompt_id": "q", "prompt_ids": [1, 2, 3], "completion_ids": [4, 5], "reward": 0.5, "old_logprobs": [-1, -2.5], "completion_mask": [1, 0]})"
    "\n"
    R"({"prompt_id": "r", "prompt_ids": [1], "completion_ids": [[4], [5, 6]], "reward": [1, null], "ref_logprobs": [[-1e-3], [0, -7]], "text": "é\n"})"
    "\n";
const std::string kPrompts = R"({"prompt_id": "a", "prompt": [{"role": "user", "content": "Hi"}], "answer": {"x": [1, null]}})"
                             "\n"
                             R"({"prompt_ids": [1, 2], "prompt": "text"})"
                             "\n";
const std::string kConfig =
    "model: {path: m, dtype: float64}\nrollout:\n  temperature: 0.7\n  stop_token_ids: [1, 2]\nlongstraw:\n  memory_budget: 8GiB\n";

// A few edits: bytes changed, cut out, doubled, or put in from a list of troublesome pieces.
std::string mutated(std::string text) {
  const int edits = *rc::gen::inRange(1, 4);
  for (int i = 0; i < edits && !text.empty(); ++i) {
    const auto at = *rc::gen::inRange<std::size_t>(0, text.size());
    const auto count = std::min(*rc::gen::inRange<std::size_t>(1, 12), text.size() - at);
    switch (*rc::gen::inRange(0, 4)) {
      case 0: text[at] = static_cast<char>(*rc::gen::inRange(0, 256)); break;
      case 1: text.erase(at, count); break;
      case 2: text.insert(at, text.substr(at, count)); break;
      default:
        text.replace(
            at, count,
            *rc::gen::element<std::string>("null", "NaN", "-Infinity", "[]", "{}", "[[", "}}", "\"", "\\", "\n", "1e999", "-1",
                                           "18446744073709551616", "\\ud800", ",", ":", "true", "&a", "*a", "---\n", "  ", "\t"));
    }
  }
  return text;
}

template <class Expected, class Action>
void gives_a_result_or(Action action) {
  try {
    action();
    RC_CLASSIFY(true, "read");
  } catch (const Expected& error) {
    RC_CLASSIFY(true, "refused");
    RC_ASSERT(std::string(error.what()).size() > 5u);
  }
}

RC_GTEST_PROP(Mutated, rollouts_are_read_or_refused, ()) {
  const testing_support::Scratch scratch;
  const std::string text = mutated(kRollouts);
  RC_LOG(text);
  const auto path = scratch.file("r.jsonl", text);
  gives_a_result_or<FormatError>([&] {
    const Batch batch = read_rollouts(path, {.vocab_size = 100});
    // What was accepted is a batch that keeps its promises: it can be written, and is then the same.
    write_rollouts(scratch.path("again.jsonl"), batch, RolloutLayout::kGroups);
    RC_ASSERT(read_rollouts(scratch.path("again.jsonl"), {.vocab_size = 100}) == batch);
  });
  gives_a_result_or<FormatError>([&] { describe_rollouts(path); });
}

RC_GTEST_PROP(Mutated, prompts_are_read_or_refused, ()) {
  const testing_support::Scratch scratch;
  const std::string text = mutated(kPrompts);
  RC_LOG(text);
  gives_a_result_or<FormatError>([&] { read_prompts(scratch.file("p.jsonl", text)); });
}

RC_GTEST_PROP(Mutated, configurations_are_loaded_or_refused, ()) {
  const std::string text = mutated(kConfig);
  RC_LOG(text);
  gives_a_result_or<ConfigError>([&] {
    const auto config = config::load_text<app::RunConfig>(text, "run.yaml");
    RC_ASSERT(config::load_text<app::RunConfig>(config::dump(config), "dump") == config);
  });
}

}  // namespace
}  // namespace longstraw::core::data

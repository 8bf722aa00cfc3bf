// Loading the whole run configuration: defaults, every kind of fault, all of them at once, overrides.

#include "app/config.h"
#include "core/base/errors.h"
#include "core/config/load.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace longstraw::core::config {
namespace {

using app::RunConfig;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

std::string message_of(const std::string& yaml) {
  try {
    load_text<RunConfig>(yaml, "run.yaml");
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "(no error)";
}

std::string message_of_overrides(std::vector<std::string> overrides) {
  try {
    load<RunConfig>({.file = std::nullopt, .overrides = std::move(overrides)});
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "(no error)";
}

TEST(Load, an_empty_file_gives_the_defaults) {
  EXPECT_EQ(load_text<RunConfig>("", "run.yaml"), RunConfig{});
  EXPECT_EQ(load_text<RunConfig>("# only a comment\n", "run.yaml"), RunConfig{});
  EXPECT_EQ(load_text<RunConfig>("model:\n", "run.yaml"), RunConfig{});  // a section with all its keys commented out
  EXPECT_EQ(load<RunConfig>({}), RunConfig{});
}

TEST(Load, reads_the_configuration_of_the_contract) {
  const RunConfig config = load_text<RunConfig>(R"(
model:     {path: checkpoints/smol, dtype: bfloat16, device: "cuda:1", threads: 2}
data:      {prompts: p.jsonl, reward: rewards.py:graded, reward_timeout: 5}
rollout:   {num_generations: 4, max_completion_length: 32, temperature: 0.7, top_k: 50, top_p: 0.9, seed: 7, stop_token_ids: [2, 0]}
objective: {loss_type: dr_grpo, scale_rewards: none, beta: 0.04, kl: k1, epsilon: 0.1, epsilon_high: 0.28, delta: 4}
longstraw: {prompt_gradient: tail, tail_tokens: 64, segment_tokens: 512, replay_batch: 4, memory_budget: 512MiB, self_check: first_step}
reference: {attention: sdpa}
compare:   {gate: [exact, tail]}
)",
                                                "run.yaml");
  EXPECT_EQ(config.model.path, "checkpoints/smol");
  EXPECT_EQ(config.model.dtype, model::Dtype::kBfloat16);
  EXPECT_EQ(config.model.device, "cuda:1");
  EXPECT_EQ(config.model.threads, 2);
  EXPECT_EQ(config.data.rollouts, std::nullopt);
  EXPECT_EQ(config.data.prompts, "p.jsonl");
  EXPECT_EQ(config.data.reward, (std::vector<std::string>{"rewards.py:graded"}));
  EXPECT_EQ(config.data.reward_timeout, 5.0);
  EXPECT_EQ(config.rollout.num_generations, 4);
  EXPECT_EQ(config.rollout.max_completion_length, 32);
  EXPECT_EQ(config.rollout.temperature, 0.7);
  EXPECT_EQ(config.rollout.top_k, 50);
  EXPECT_EQ(config.rollout.top_p, 0.9);
  EXPECT_EQ(config.rollout.seed, 7u);
  EXPECT_EQ(config.rollout.stop_token_ids, (std::vector<std::int64_t>{2, 0}));
  EXPECT_EQ(config.objective.loss_type, objective::LossType::kDrGrpo);
  EXPECT_EQ(config.objective.scale_rewards, objective::ScaleRewards::kNone);
  EXPECT_EQ(config.objective.beta, 0.04);
  EXPECT_EQ(config.objective.kl, objective::Kl::kK1);
  EXPECT_EQ(config.objective.epsilon, 0.1);
  EXPECT_EQ(config.objective.epsilon_high, 0.28);
  EXPECT_EQ(config.objective.delta, 4.0);
  EXPECT_EQ(config.longstraw.prompt_gradient, PromptGradient::kTail);
  EXPECT_EQ(config.longstraw.tail_tokens, 64);
  EXPECT_EQ(config.longstraw.segment_tokens, 512);
  EXPECT_EQ(config.longstraw.replay_batch, 4);
  EXPECT_EQ(config.longstraw.memory_budget, 512LL << 20);
  EXPECT_EQ(config.longstraw.self_check, SelfCheck::kFirstStep);
  EXPECT_EQ(config.reference.attention, reference::Attention::kSdpa);
  EXPECT_EQ(config.compare.gate, (std::vector<std::string>{"exact", "tail"}));
}

TEST(Load, the_defaults_are_those_of_the_contract) {
  const RunConfig config;
  EXPECT_EQ(config.model.dtype, model::Dtype::kFloat32);
  EXPECT_EQ(config.model.device, "cpu");
  EXPECT_EQ(config.rollout.num_generations, 8);
  EXPECT_EQ(config.rollout.max_completion_length, 64);
  EXPECT_EQ(config.rollout.temperature, 1.0);
  EXPECT_EQ(config.rollout.top_k, 0);
  EXPECT_EQ(config.rollout.top_p, 1.0);
  EXPECT_EQ(config.rollout.seed, 0u);
  EXPECT_EQ(config.objective.loss_type, objective::LossType::kGrpo);
  EXPECT_EQ(config.objective.scale_rewards, objective::ScaleRewards::kGroup);
  EXPECT_EQ(config.objective.beta, 0.0);
  EXPECT_EQ(config.objective.kl, objective::Kl::kK3);
  EXPECT_EQ(config.objective.epsilon, 0.2);
  EXPECT_EQ(config.objective.epsilon_high, std::nullopt);
  EXPECT_EQ(config.objective.delta, std::nullopt);
  EXPECT_EQ(config.objective.advantage_epsilon, 1e-4);
  EXPECT_EQ(config.longstraw.prompt_gradient, PromptGradient::kExact);
  EXPECT_EQ(config.longstraw.tail_tokens, 0);
  EXPECT_EQ(config.longstraw.segment_tokens, 2048);
  EXPECT_EQ(config.longstraw.replay_batch, 1);
  EXPECT_EQ(config.longstraw.memory_budget, 8LL << 30);
  EXPECT_EQ(config.longstraw.self_check, SelfCheck::kOff);
  EXPECT_EQ(config.reference.attention, reference::Attention::kTextbook);
  EXPECT_EQ(config.compare.gate, std::vector<std::string>{"exact"});
}

TEST(Load, a_fault_names_file_line_key_value_and_what_was_wanted) {
  EXPECT_EQ(message_of("model: {path: m}\nlongstraw:\n  segment_tokens: 0\n"),
            "run.yaml:3: longstraw.segment_tokens: got 0, wanted an integer >= 1");
}

TEST(Load, reports_all_faults_at_once) {
  EXPECT_EQ(message_of("objective:\n  lsos_type: grpo\n  beta: -1\nlongstraw: {segment_tokens: many}\nmodell: 3\n"),
            "configuration: 4 faults\n"
            "  run.yaml:2: objective.lsos_type: unknown key; did you mean objective.loss_type?\n"
            "  run.yaml:3: objective.beta: got -1, wanted a number >= 0\n"
            "  run.yaml:4: longstraw.segment_tokens: got many, wanted an integer >= 1\n"
            "  run.yaml:5: modell: unknown key; did you mean model?");
}

TEST(Load, an_unknown_key_in_the_wrong_section_is_sent_to_the_right_one) {
  EXPECT_THAT(message_of("model: {segment_tokens: 5}"), HasSubstr("did you mean longstraw.segment_tokens?"));
  EXPECT_THAT(message_of("loss_type: dapo"), HasSubstr("did you mean objective.loss_type?"));
}

TEST(Load, an_unknown_key_like_no_other_gets_no_suggestion) {
  EXPECT_EQ(message_of("zebra_crossing: 1"), "run.yaml:1: zebra_crossing: unknown key");
}

TEST(Load, a_misspelt_name_of_a_choice_gets_the_nearest) {
  EXPECT_EQ(
      message_of("objective: {loss_type: dr-grpo}"),
      "run.yaml:1: objective.loss_type: got dr-grpo, wanted one of grpo, dr_grpo, dapo, bnpo, gspo, cispo, sapo, gmpo, rloo, reinforce; did you mean dr_grpo?");
}

TEST(Load, keys_that_occur_twice_are_faults) {
  EXPECT_EQ(message_of("model: {path: a}\nrollout: {seed: 1}\nmodel: {path: b}\n"),
            "run.yaml:3: model: the key occurs twice, first in line 1");
  EXPECT_EQ(message_of("rollout:\n  seed: 1\n  seed: 1\n"), "run.yaml:3: rollout.seed: the key occurs twice, first in line 2");
}

TEST(Load, values_out_of_range_or_of_another_type_are_faults) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"rollout: {temperature: 0}", "wanted a number > 0"},
      {"rollout: {temperature: .nan}", "wanted a number > 0"},
      {"rollout: {temperature: nan}", "wanted a number > 0"},
      {"rollout: {temperature: 1e999}", "wanted a number > 0"},
      {"rollout: {top_p: 1.5}", "wanted a number > 0 and <= 1"},
      {"rollout: {seed: -1}", "wanted an integer >= 0"},
      {"rollout: {num_generations: 2.5}", "wanted an integer >= 1"},
      {"rollout: {num_generations: 99999999999999999999}", "wanted an integer >= 1"},
      {"rollout: {num_generations: \"8\"}", "got \"8\", wanted an integer >= 1"},
      {"rollout: {num_generations: null}", "got null, wanted an integer >= 1"},
      {"rollout: {num_generations: [8]}", "got a list, wanted an integer >= 1"},
      {"rollout: {stop_token_ids: [1, -2]}", "element 1: got -2, wanted an integer >= 0"},
      {"rollout: {stop_token_ids: {a: 1}}", "got a mapping, wanted a list, each an integer >= 0"},
      {"rollout: {stop_token_ids: -3}", "got -3, wanted an integer >= 0"},
      {"model: {device: gpu}", "wanted cpu, cuda or cuda:N"},
      {"model: {device: 'cuda:'}", "wanted cpu, cuda or cuda:N"},
      {"model: {path: {a: b}}", "got a mapping, wanted a text"},
      {"data: {reward: rewards.py}", "wanted FILE.py:FUNCTION"},
      {"data: {reward_errors: none}", "wanted one of stop, null"},
      {"data: {reward_timeout: 0}", "wanted a number > 0"},
      {"longstraw: {memory_budget: -1}", "wanted a size such as 512MiB or 8GiB"},
      {"longstraw: {memory_budget: 8 elephants}", "wanted a size such as 512MiB or 8GiB"},
      {"objective: {epsilon: -0.1}", "wanted a number >= 0"},
      {"model: cpu", "got cpu, wanted a section with keys"},
      {"[1, 2]", "got a list, wanted sections with keys"},
      {"{[a]: 1}", "got a list as a key"},
  };
  for (const auto& [yaml, wanted] : cases) EXPECT_THAT(message_of(yaml), HasSubstr(wanted)) << yaml;
}

TEST(Load, text_that_is_no_usable_yaml_is_a_fault_with_its_line) {
  EXPECT_THAT(message_of("model:\n  path: [unclosed\n"), HasSubstr("run.yaml:"));
  EXPECT_THAT(message_of("model:\n  path: [unclosed\n"), HasSubstr("not YAML"));
  EXPECT_THAT(message_of("model: {path: a}\n---\nmodel: {path: b}\n"), HasSubstr("more than one YAML document"));
  EXPECT_THAT(message_of("model: &m {path: a}\n"), HasSubstr("run.yaml:1: anchors (&name) are not supported"));
  EXPECT_THAT(message_of("model: {path: *m}\n"), HasSubstr("run.yaml:1"));
  EXPECT_THAT(message_of(std::string(200'000, '[')), HasSubstr("not YAML"));
  EXPECT_THAT(message_of(std::string("\0\1\2\xff\xfe binary", 14)), Not(HasSubstr("(no error)")));
}

TEST(Load, a_file_that_cannot_be_read_is_named) {
  const auto load_file = [](const std::filesystem::path& path) -> std::string {
    try {
      load<RunConfig>({.file = path, .overrides = {}});
    } catch (const ConfigError& error) {
      EXPECT_EQ(error.exit_status(), ExitStatus::kUnusable);
      return error.what();
    }
    return "(no error)";
  };
  EXPECT_EQ(load_file("no/such/run.yaml"), "no/such/run.yaml: can't be read: No such file or directory");
  EXPECT_THAT(load_file(testing::TempDir()), HasSubstr("is a folder"));

  const std::filesystem::path large = std::filesystem::path(testing::TempDir()) / "large.yaml";
  std::ofstream(large) << std::string((1 << 20) + 1, '#');
  EXPECT_THAT(load_file(large), HasSubstr("more than 1 MiB"));
}

TEST(Load, overrides_win_over_the_file_and_later_ones_over_earlier) {
  const std::filesystem::path file = std::filesystem::path(testing::TempDir()) / "overrides.yaml";
  std::ofstream(file) << "rollout: {seed: 1, top_k: 5}\n";
  const RunConfig config = load<RunConfig>(
      {.file = file,
       .overrides = {"rollout.seed=2", "rollout.seed=3", "compare.gate=[exact, tail]", "model.path=a=b",
                     "longstraw={tail_tokens: 9}", "data.rollouts=r.jsonl", "data.rollouts=null", "model.device='cuda:0'"}});
  EXPECT_EQ(config.rollout.seed, 3u);
  EXPECT_EQ(config.rollout.top_k, 5);
  EXPECT_EQ(config.compare.gate, (std::vector<std::string>{"exact", "tail"}));
  EXPECT_EQ(config.model.path, "a=b");
  EXPECT_EQ(config.longstraw.tail_tokens, 9);
  EXPECT_EQ(config.data.rollouts, std::nullopt);
  EXPECT_EQ(config.model.device, "cuda:0");
}

TEST(Load, faults_of_overrides_name_the_override) {
  EXPECT_EQ(message_of_overrides({"objective.lsos_type=grpo"}),
            "--set objective.lsos_type=grpo: objective.lsos_type: unknown key; did you mean objective.loss_type?");
  EXPECT_EQ(message_of_overrides({"objective.beta=-1"}), "--set objective.beta=-1: objective.beta: got -1, wanted a number >= 0");
  EXPECT_EQ(message_of_overrides({"objective.beta"}), "--set objective.beta: wanted key.path=value");
  EXPECT_THAT(message_of_overrides({"objective.beta.more=1"}), HasSubstr("unknown key"));
  EXPECT_THAT(message_of_overrides({"objective=1"}), HasSubstr("wanted a section with keys"));
  EXPECT_THAT(message_of_overrides({"a=[", "b=1"}), AllOf(HasSubstr("2 faults"), HasSubstr("not YAML")));
}

TEST(Load, a_list_may_be_given_as_its_only_element) {
  const auto rewards = [](const std::string& yaml) {
    return load_text<RunConfig>("data: {reward: " + yaml + "}", "x").data.reward;
  };
  EXPECT_EQ(rewards("r.py:f"), rewards("[r.py:f]"));
  EXPECT_EQ(rewards("[r.py:f, 'command:grade --x']"), (std::vector<std::string>{"r.py:f", "command:grade --x"}));
  EXPECT_THAT(message_of("data: {reward: [r.py:f, g]}"), HasSubstr("data.reward: element 1: got g, wanted FILE.py:FUNCTION"));
}

TEST(Load, null_may_be_the_name_of_a_choice) {
  const auto errors = [](const std::string& yaml) {
    return load_text<RunConfig>("data: {reward_errors: " + yaml + "}", "x").data.reward_errors;
  };
  EXPECT_EQ(errors("null"), data::RewardErrors::kNull);
  EXPECT_EQ(errors("'null'"), data::RewardErrors::kNull);
  EXPECT_EQ(errors("stop"), data::RewardErrors::kStop);
  EXPECT_THAT(message_of("objective: {kl: null}"), HasSubstr("objective.kl: got null, wanted one of k1, k2, k3"));
}

TEST(Load, rules_across_fields) {
  EXPECT_THAT(message_of("data: {rollouts: a.jsonl, prompts: b.jsonl, reward: r.py:f}"),
              HasSubstr("data.prompts: data.rollouts is given too"));
  EXPECT_THAT(message_of("data: {prompts: b.jsonl}"), HasSubstr("data.reward: data.prompts needs a reward function"));
  EXPECT_THAT(message_of("data: {prompts: b.jsonl, reward: []}"), HasSubstr("data.reward: data.prompts needs a reward function"));
  EXPECT_EQ(message_of("data: {rollouts: a.jsonl}"), "(no error)");
}

TEST(Load, a_rule_across_fields_is_silent_about_a_field_that_is_at_fault_already) {
  EXPECT_EQ(message_of("data: {prompts: b.jsonl, reward: nonsense}"),
            "run.yaml:1: data.reward: got nonsense, wanted FILE.py:FUNCTION or command:PROGRAM ARGUMENTS");
}

TEST(Diff, lists_the_keys_that_differ) {
  RunConfig other;
  other.objective.epsilon_high = 0.28;
  other.longstraw.memory_budget = gibibytes(2);
  EXPECT_EQ(diff(RunConfig{}, other),
            (std::vector<Difference>{{"objective.epsilon_high", "null", "0.28"}, {"longstraw.memory_budget", "8GiB", "2GiB"}}));
  EXPECT_TRUE(diff(other, other).empty());
}

TEST(Help, explains_every_key_and_loads_to_the_defaults) {
  const std::string text = help<RunConfig>();
  EXPECT_EQ(load_text<RunConfig>(text, "help"), RunConfig{});
  EXPECT_THAT(text, HasSubstr("  segment_tokens: 2048"));
  EXPECT_THAT(text, HasSubstr("# tokens run as one graph (an integer >= 1)"));
  EXPECT_THAT(text, HasSubstr("(one of grpo, dr_grpo, dapo, bnpo, gspo, cispo, sapo, gmpo, rloo, reinforce)"));
  std::size_t lines = 0, comments = 0;
  for (std::size_t at = 0; at < text.size(); at = text.find('\n', at) + 1) {
    ++lines;
    comments += text.substr(at, text.find('\n', at) - at).find("# ") != std::string::npos;
  }
  EXPECT_EQ(comments, lines);
}

}  // namespace
}  // namespace longstraw::core::config

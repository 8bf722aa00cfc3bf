#include "compare/reward_command.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <nlohmann/json.hpp>

#include "compare/command.h"
#include "core/record/reader.h"

namespace longstraw::compare {
namespace {

struct Side {
  std::string arm;
  std::vector<std::string> paths;
};

// By arm, in the order of their first records.
std::vector<Side> by_arm(const std::vector<std::string>& records) {
  std::vector<Side> sides;
  for (const auto& path : records) {
    const std::string arm = core::record::RecordReader(path).header().arm;
    auto side = std::find_if(sides.begin(), sides.end(), [&](const auto& s) { return s.arm == arm; });
    if (side == sides.end()) side = sides.insert(sides.end(), Side{arm, {}});
    side->paths.push_back(path);
  }
  return sides;
}

std::vector<Side> sides_of(const RewardArguments& arguments) {
  const bool named = !arguments.a.empty() || !arguments.b.empty();
  if (named && !arguments.records.empty()) {
    throw ConfigError(
        fmt::format("{}: neither of --a nor of --b; wanted either these two, or records alone", fmt::join(arguments.records, " ")));
  }
  if (named) {
    if (arguments.a.empty() || arguments.b.empty()) throw ConfigError("--a and --b: one is missing, wanted both");
    return {{"", arguments.a}, {"", arguments.b}};
  }
  if (arguments.records.empty()) throw ConfigError("no records; wanted those of two arms, or --a and --b");
  std::vector<Side> sides = by_arm(arguments.records);
  if (sides.size() == 2) return sides;
  std::vector<std::string> arms;
  for (const auto& side : sides) arms.push_back(side.arm);
  throw ConfigError(fmt::format("records of {} arm{} ({}), wanted two; or say with --a and --b what is compared with what",
                                sides.size(), sides.size() == 1 ? "" : "s", fmt::join(arms, ", ")));
}

}  // namespace

void declare_rewards(CLI::App& app, RewardArguments& a) {
  app.add_option("records", a.records, "records of two arms, one a seed; A is the arm of the first record")->type_name("FILE.h5…");
  app.add_option("--a", a.a, "instead: records of side A, the way of training taken as right")->type_name("FILE.h5…");
  app.add_option("--b", a.b, "records of side B, the way in question")->type_name("FILE.h5…");
  app.add_option("--margin", a.policy.margin, "difference that does not matter, as a share of A's mean reward")
      ->capture_default_str();
  app.add_option("--absolute-margin", a.policy.absolute_margin, "the same in units of reward, instead");
  app.add_option("--level", a.policy.level, "probability of error of each test")->capture_default_str();
  app.add_option("--tail-share", a.policy.tail_share, "share of the training steps that counts, for runs without evaluations")
      ->capture_default_str();
  app.add_option("--step-from", a.policy.step_from,
                 "all evaluations (or training steps) from this one on count, instead of the last");
  app.add_option("--resamples", a.policy.resamples, "of the bootstrap over seeds")->capture_default_str();
  app.add_option("--seed", a.policy.seed, "of the bootstrap")->capture_default_str();
  app.add_flag("--partial", a.policy.accept_unclosed, "accept records of interrupted runs: compare the steps that all have");
  app.add_flag("--json", a.json, "report as JSON instead of a table");
  app.add_option("--out", a.out, "write the report to this file instead of the terminal");
  app.footer("Exit status: 0 equivalent, 1 different or undecided, 2 wrong use or unusable input, 3 failure while running.");
}

ExitStatus run_rewards(const RewardArguments& arguments) {
  const std::vector<Side> sides = sides_of(arguments);
  const RewardReport report = compare_rewards(sides[0].paths, sides[1].paths, arguments.policy);
  put_report(arguments.json ? reward_report_json(report).dump(2) + "\n" : reward_report_text(report), arguments.out);
  return report.exit_status();
}

int rewards_main(int argc, char** argv) {
  CLI::App app("Says whether one way of training earns the same rewards as another.", "longstraw-compare rewards");
  RewardArguments arguments;
  declare_rewards(app, arguments);
  return parse_and_run(app, argc, argv, [&] { return run_rewards(arguments); });
}

}  // namespace longstraw::compare

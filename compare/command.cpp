#include "compare/command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string_view>

#include "compare/report.h"
#include "compare/reward_command.h"
#include "core/base/atomic_file.h"

namespace longstraw::compare {
namespace {

struct Arguments {
  std::string reference, candidate, noise, out;
  bool json = false;
  bool all_parameters = false;
  Policy policy;
};

void declare(CLI::App& app, Arguments& a) {
  app.add_option("reference", a.reference, "record of the gradient taken as right")->required();
  app.add_option("candidate", a.candidate, "record of the gradient in question")->required();
  app.add_option("--noise", a.noise, "record of the reference arm in a wider dtype: measures the noise floor");
  app.add_option("--out", a.out, "write the report to this file instead of the terminal");
  app.add_flag("--json", a.json, "report as JSON instead of a table");
  app.add_flag("--parameters", a.all_parameters, "list every parameter, not only the worst");
  app.add_flag("--partial", a.policy.accept_unclosed, "accept records of interrupted runs: compare the steps they have");
  app.add_option("--whole-bound", a.policy.config.whole_bound,
                 "relative L2 allowed over all parameters, in place of the dtype's bound");
  app.add_option("--parameter-bound", a.policy.config.parameter_bound,
                 "relative L2 allowed on each parameter, in place of the dtype's bound");
  app.add_option("--noise-factor", a.policy.config.noise_factor, "float32: allowed multiple of the noise floor")
      ->capture_default_str();
  app.add_option("--bfloat16-factor", a.policy.config.bfloat16_factor, "bfloat16: allowed multiple of the reference's own error")
      ->capture_default_str();
  app.footer("Exit status: 0 within bounds, 1 beyond bounds, 2 wrong use or unusable input, 3 failure while running.");
}

ExitStatus run(const Arguments& a) {
  const Report report =
      compare_records(a.reference, a.candidate, a.noise.empty() ? std::nullopt : std::optional(a.noise), a.policy);
  put_report(a.json ? report_json(report).dump(2) + "\n" : report_text(report, {.all_parameters = a.all_parameters}), a.out);
  return report.exit_status();
}

}  // namespace

void put_report(const std::string& text, const std::string& out) {
  if (out.empty()) {
    if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
      throw IoError("standard output: the report could not be written");
    }
  } else {
    AtomicFile file(out);
    file.write(text);
    file.commit();
  }
}

int parse_and_run(CLI::App& app, int argc, char** argv, const std::function<ExitStatus()>& run) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // CLI11 has exit statuses of its own; here only asking for help is no wrong use.
    return app.exit(error) == 0 ? 0 : static_cast<int>(ExitStatus::kUnusable);
  }
  try {
    return static_cast<int>(run());
  } catch (const Error& error) {
    fmt::print(stderr, "longstraw-compare: {}\n", error.what());
    return static_cast<int>(error.exit_status());
  } catch (const std::exception& error) {
    fmt::print(stderr, "longstraw-compare: {}\n", error.what());
    return static_cast<int>(ExitStatus::kFailedRunning);
  }
}

int compare_main(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == "rewards") return rewards_main(argc - 1, argv + 1);
  CLI::App app("Says how far two records' gradients are apart, whether that is more than rounding, and why.", "longstraw-compare");
  Arguments arguments;
  declare(app, arguments);
  app.footer(app.get_footer() + "\n`longstraw-compare rewards --help`: whether two ways of training earn the same rewards.");
  return parse_and_run(app, argc, argv, [&] { return run(arguments); });
}

}  // namespace longstraw::compare

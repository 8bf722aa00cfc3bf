// longstraw: gradients of GRPO for very long prompts, and the comparison that proves them right. One file a verb.

#include "app/build_info.h"
#include "app/command_line.h"
#include "app/interrupt.h"
#include "app/output.h"

#include "core/base/errors.h"
#include "core/device/memory_meter.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/version.h>

#include <cstdio>
#include <exception>
#include <new>
#include <string_view>

namespace longstraw::app {
namespace {

ExitStatus run(int argc, char** argv) {
  CLI::App program{"GRPO gradients by capture and replay of a long shared prompt, and the proof that they are right"};
  program.name("longstraw");
  program.require_subcommand(1);
  program.set_version_flag("--version", fmt::format("longstraw {} (commit {}, LibTorch {})", kVersion, kGitCommit, TORCH_VERSION));
  program.footer(
      "longstraw VERB --help says all about a verb. Status: 0 within bounds or done, 1 beyond bounds, 2 wrong use or\n"
      "unusable input, 3 failure while running.");
  Action chosen;
  add_verify(program, chosen);
  add_gradients(program, chosen);
  add_generate(program, chosen);
  add_train(program, chosen);
  add_prepare(program, chosen);
  add_compare(program, chosen);
  add_rewards(program, chosen);
  add_inspect(program, chosen);
  add_study(program, chosen, fmt::format("longstraw {}", fmt::join(argv + 1, argv + argc, " ")));
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return program.exit(error) == 0 ? ExitStatus::kWithinBounds : ExitStatus::kUnusable;
  }
  const ExitStatus status = chosen();
  flush_standard_output();
  return status;
}

// LibTorch's messages go on with a stack trace.
std::string first_line(std::string_view text) { return std::string(text.substr(0, text.find('\n'))); }

ExitStatus report(ExitStatus status, std::string_view message) {
  std::fflush(stdout);
  fmt::print(stderr, "longstraw: {}\n", message);
  return status;
}

}  // namespace
}  // namespace longstraw::app

int main(int argc, char** argv) {
  using namespace longstraw;
  using app::report;
  core::device::install_counting_allocator();
  ExitStatus status = ExitStatus::kFailedRunning;
  try {
    app::stop_on_signals();
    status = app::run(argc, argv);
  } catch (const Error& error) {
    status = report(error.exit_status(), error.what());
  } catch (const c10::Error& error) {
    status = report(ExitStatus::kFailedRunning, "LibTorch: " + app::first_line(error.what_without_backtrace()));
  } catch (const std::bad_alloc&) {
    status = report(ExitStatus::kFailedRunning, "out of memory");
  } catch (const std::exception& error) {
    status = report(ExitStatus::kFailedRunning, error.what());
  }
  return static_cast<int>(status);
}

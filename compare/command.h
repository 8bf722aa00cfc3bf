#pragma once
// The command `longstraw-compare A.h5 B.h5`, also reached as `longstraw compare`. With `rewards` as its first word it is the
// comparison of rewards (reward_command.h).

#include "core/base/errors.h"

#include <functional>
#include <string>

namespace CLI {
class App;
}

namespace longstraw::compare {

// Parses, runs, prints. Returns the exit status (core/base/errors.h); throws nothing.
int compare_main(int argc, char** argv);

// Writes a report to the file, or to standard output when `out` is empty. IoError.
void put_report(const std::string& text, const std::string& out);

// The exit status of a command of its own: parses, runs, and says errors on standard error.
int parse_and_run(CLI::App& app, int argc, char** argv, const std::function<ExitStatus()>& run);

}  // namespace longstraw::compare

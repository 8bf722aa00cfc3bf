#pragma once
// The command line of the comparison of rewards: `longstraw rewards`, and `longstraw-compare rewards`.

#include "compare/rewards.h"

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace longstraw::compare {

struct RewardArguments {
  std::vector<std::string> records;  // of both sides, told apart by their arms; the first one's is A
  std::vector<std::string> a, b;     // or the sides themselves
  std::string out;
  bool json = false;
  RewardPolicy policy;
};

void declare_rewards(CLI::App& app, RewardArguments& arguments);

// Compares, and prints or writes the report. ConfigError when the command line names no two sides.
ExitStatus run_rewards(const RewardArguments& arguments);

// As compare_main.
int rewards_main(int argc, char** argv);

}  // namespace longstraw::compare

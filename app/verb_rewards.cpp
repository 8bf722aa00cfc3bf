// longstraw rewards: do two ways of training earn the same rewards, over seeds?

#include "app/command_line.h"

#include "compare/reward_command.h"

namespace longstraw::app {

void add_rewards(CLI::App& program, Action& chosen) {
  CLI::App& verb =
      *program.add_subcommand("rewards", "whether two ways of training earn the same rewards, over several seeds a side");
  const auto arguments = std::make_shared<compare::RewardArguments>();
  compare::declare_rewards(verb, *arguments);
  verb.callback([&chosen, arguments] { chosen = [arguments] { return compare::run_rewards(*arguments); }; });
}

}  // namespace longstraw::app

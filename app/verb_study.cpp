// longstraw study: how much of the gradient is lost by cutting it at the prompt, over a grid of sizes, tails and models?

#include "app/arms.h"
#include "app/command_line.h"
#include "app/interrupt.h"
#include "app/output.h"
#include "app/study_data.h"
#include "app/study_grid.h"
#include "app/study_run.h"

#include "core/base/atomic_file.h"
#include "core/config/load.h"
#include "core/model/architecture.h"
#include "longstraw/objective.h"

#include <fmt/format.h>
#include <torch/version.h>

#include <algorithm>
#include <set>
#include <utility>

namespace longstraw::app {
namespace {

namespace fs = std::filesystem;

struct StudyOptions {
  ConfigOptions config;
  std::string command;
  std::vector<std::string> models;
  StudyGrid grid{.prompt_tokens = {64, 256, 1024},
                 .group_sizes = {4},
                 .response_tokens = {32},
                 .seeds = {},
                 .tails = {"0", "16", "64", "256", "1024", "all"}};
  int64_t check_tokens = 256;
  bool no_layer_and_kind = false;
  std::string out = "out/study.h5";
  std::string markdown;
};

// A checkpoint of the study.
struct StudyModel {
  StudyRunOptions run;
  std::string family;
  double bytes = 0;  // of its weights: what one token's work is proportional to
};

double weight_bytes(const fs::path& folder) {
  double bytes = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() == ".safetensors") bytes += double(entry.file_size());
  }
  return std::max(bytes, 1.0);
}

std::string folder_name(const fs::path& folder) {
  const fs::path path = fs::weakly_canonical(folder);
  return path.filename().string();
}

std::vector<StudyModel> models_of(const StudyOptions& options, const RunConfig& config) {
  std::vector<std::string> folders = options.models;
  if (folders.empty()) folders.push_back(config.model.path);
  std::vector<StudyModel> models;
  std::set<std::string> names;
  for (const auto& folder : folders) {
    if (folder.empty()) throw ConfigError("--models: not given, nor model.path; wanted checkpoint folders");
    StudyModel model{.run = {.config = config, .model_name = folder_name(folder)}, .family = {}, .bytes = 0};
    model.run.config.model.path = folder;
    model.run.check_tokens = options.check_tokens;
    model.run.layer_and_kind = !options.no_layer_and_kind;
    model.family = core::model::read_architecture(folder).model_type;
    model.bytes = weight_bytes(folder);
    if (!names.insert(model.run.model_name).second) {
      throw ConfigError(fmt::format("--models: two folders are named {}, which names a cell's model", model.run.model_name));
    }
    models.push_back(std::move(model));
  }
  return models;
}

// What decides a gradient besides model and batch must be the same in all cells of a file.
void require_same_settings(const fs::path& path, const RunConfig& config) {
  if (!fs::exists(path)) return;
  RunConfig earlier;
  core::config::Faults faults;
  std::vector<core::config::Binding> bindings = core::config::bind(earlier);
  core::config::apply_text(core::record::StudyReader(path.string()).header().config_yaml, path.string(), bindings, faults);
  faults.raise_if_any();
  for (const auto& difference : core::config::diff(earlier, config)) {
    const bool decides = difference.key.starts_with("objective.") || difference.key == "rollout.temperature" ||
                         difference.key == "rollout.top_k" || difference.key == "rollout.top_p" || difference.key == "data.reward";
    if (decides) {
      throw ConfigError(fmt::format("{}: its cells were made with {} {}, got {}; write to another --out", path.string(),
                                    difference.key, difference.first, difference.second));
    }
  }
}

// Says what is done and how much is left.
class Account {
 public:
  Account(const std::vector<StudyModel>& models, const std::vector<StudyPoint>& points, const core::record::StudyWriter& writer,
          Progress& progress)
      : progress_(progress) {
    for (const auto& model : models) {
      for (const auto& point : points) left_.add(add_missing(model, point, writer));
    }
    progress.say(cells_ == 0 ? "all cells of the grid are there" : fmt::format("{} cells to compute", cells_));
  }

  void begin(const StudyModel& model, const StudyPoint& point) {
    model_ = &model;
    shared_work_ = point_work(model, point);
    progress_.say(fmt::format("{}: P={} G={} R={} seed={}", model.run.model_name, point.prompt_tokens, point.group_size,
                              point.response_tokens, point.seed));
  }

  void finished(const StudyPoint& point, const core::record::StudyCell& cell) {
    left_.done(std::exchange(shared_work_, 0.0) + model_->bytes * sweep_work(point, cell.key.tail_tokens));
    const auto* whole = core::record::find_row(cell, core::record::StudyScope::kWhole);
    progress_.say(fmt::format("  W={}: cosine {:.4f}, relative L2 {:.3g}; cell {} of {}, {}", cell.key.tail_tokens, whole->cosine,
                              whole->relative_l2, ++done_, cells_, left_.text()));
  }

 private:
  // Of sampling, the whole gradient and its check: done once for all tails.
  static double point_work(const StudyModel& model, const StudyPoint& point) {
    const bool checked = point.prompt_tokens <= model.run.check_tokens;
    return model.bytes * (sampling_work(point) + sweep_work(point, point.prompt_tokens) + (checked ? reference_work(point) : 0.0));
  }

  double add_missing(const StudyModel& model, const StudyPoint& point, const core::record::StudyWriter& writer) {
    double work = 0;
    for (const int64_t tail : point.tails) {
      if (writer.has(study_key(model.run.config, model.family, model.run.model_name, point, tail))) continue;
      work += model.bytes * sweep_work(point, tail);
      ++cells_;
    }
    return work > 0 ? work + point_work(model, point) : 0;
  }

  Progress& progress_;
  TimeLeft left_;
  int64_t cells_ = 0, done_ = 0;
  const StudyModel* model_ = nullptr;
  double shared_work_ = 0;  // that the next finished cell brings with it
};

core::record::StudyHeader header_of(const StudyOptions& options, const RunConfig& config) {
  return {.command = options.command,
          .config_yaml = core::config::dump(config),
          .torch_version = TORCH_VERSION,
          .device = config.model.device.substr(0, config.model.device.find(':'))};
}

bool run_model(const StudyModel& model, const std::vector<StudyPoint>& points, const fs::path& folder,
               core::record::StudyWriter& writer, Account& account, Progress& progress) {
  const auto decoder = open_model(model.run.config.model, model.run.config.lora, progress);
  StudyData data(model.run.config, *decoder, folder, model.run.model_name, progress);
  bool trusted = true;
  for (const auto& point : points) {
    account.begin(model, point);
    StudyRunner runner(model.run, *decoder, data, writer, progress,
                       [&](const core::record::StudyCell& cell) { account.finished(point, cell); });
    trusted = runner.run(point) && trusted;
  }
  return trusted;
}

void write_tables(const StudyOptions& options) {
  const auto cells = core::record::StudyReader(options.out).cells();
  fmt::print("{}", compare::study_table(cells));
  if (options.markdown.empty()) return;
  const WritingResults signals_wait;
  AtomicFile file(options.markdown);
  file.write(compare::study_table(cells, compare::TableStyle::kMarkdown));
  file.commit();
}

ExitStatus run_study(const StudyOptions& options, const RunConfig& config) {
  check_objective(config.objective);
  StudyGrid grid = options.grid;
  if (grid.seeds.empty()) grid.seeds = {int64_t(config.rollout.seed)};
  const std::vector<StudyPoint> points = points_of(grid, /*smallest_group=*/2);  // one response has no advantage
  const std::vector<StudyModel> models = models_of(options, config);
  const fs::path out = options.out;
  if (out.has_parent_path()) require_writable_folder(out.parent_path());
  require_writable_record(out);
  if (!options.markdown.empty()) require_writable_file(options.markdown);
  require_same_settings(out, config);
  const fs::path folder = out.string() + ".data";
  require_writable_folder(folder);

  bool trusted = true;
  {
    Progress progress;
    core::record::StudyWriter writer(out.string(), header_of(options, config));
    Account account(models, points, writer, progress);
    for (const auto& model : models) trusted = run_model(model, points, folder, writer, account, progress) && trusted;
    const WritingResults signals_wait;
    writer.close();
  }
  write_tables(options);
  return trusted ? ExitStatus::kWithinBounds : ExitStatus::kBeyondBounds;
}

void add_grid_options(CLI::App& verb, StudyOptions& options) {
  const auto list = [&](const char* name, auto& values, const char* help) {
    return verb.add_option(name, values, help)->delimiter(',')->type_name("N,…");
  };
  list("--prompt-tokens", options.grid.prompt_tokens, "prompt lengths P")->capture_default_str();
  list("--group-sizes", options.grid.group_sizes, "responses a group, G")->capture_default_str();
  list("--response-tokens", options.grid.response_tokens, "tokens of each response, R")->capture_default_str();
  list("--tails", options.grid.tails,
       "how many of the last prompt tokens keep their gradient, W; 0: none (detached); all, or a number from P - 1: the whole "
       "gradient once more with other segment borders, that is the size of rounding")
      ->capture_default_str();
  list("--seeds", options.grid.seeds,
       "seeds of the sampler; the seed also picks one of the prompts that are long enough; "
       "default: rollout.seed");
}

}  // namespace

void add_study(CLI::App& program, Action& chosen, const std::string& command) {
  CLI::App& verb = *program.add_subcommand("study", "how much of the gradient is lost by cutting it at the prompt, over a grid");
  const auto options = std::make_shared<StudyOptions>();
  options->command = command;
  options->config.unscored = true;
  verb.add_option("--models", options->models, "checkpoint folders; default: model.path")->delimiter(',')->type_name("DIR…");
  add_shortcut(verb, options->config, "--prompts", "data.prompts",
               "JSONL of prompts, or of one long text; a cell takes the last P tokens", {"data.rollouts"});
  add_shortcut(verb, options->config, "--reward", "data.reward",
               "reward function, FILE.py:FUNCTION; without it rewards are 1 and 0 in turn");
  add_grid_options(verb, *options);
  verb.add_option("--check-tokens", options->check_tokens,
                  "run the full-graph reference too for prompts of up to N tokens; 0: never")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str()
      ->type_name("N");
  verb.add_flag("--no-layer-and-kind", options->no_layer_and_kind,
                "keep rows by layer and by kind, but not by kind in each layer: a smaller file");
  verb.add_option("--out", options->out,
                  "the study (HDF5); cells that are there are not computed again. Its batches are kept in "
                  "FILE.data/")
      ->capture_default_str()
      ->type_name("FILE.h5");
  verb.add_option("--markdown", options->markdown, "write the table as Markdown, too")->type_name("FILE.md");
  add_config_options(verb, options->config);
  RunConfig defaults;
  defaults.longstraw.replay_batch = 8;
  choose(verb, chosen, options, run_study, defaults);
}

}  // namespace longstraw::app

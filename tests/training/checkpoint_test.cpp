// Checkpoints restore bit for bit, and a process that dies, or whose disk fills, at any moment leaves a whole newest one.
#include "training/checkpoint.h"

#include "core/base/errors.h"
#include "core/device/device.h"
#include "core/model/lora.h"
#include "core/model/save.h"
#include "tests/support/fixture.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <set>
#include <thread>

namespace longstraw::training {
namespace {

namespace fs = std::filesystem;
using core::model::Decoder;
using core::optim::OptimConfig;
using core::optim::Optimizer;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int kStopped = 77;

// A folder in memory where there is one: these tests sync to the disk hundreds of times.
class Folder {
 public:
  Folder() {
    const fs::path memory = "/dev/shm";
    std::string name = ((::access(memory.c_str(), W_OK) == 0 ? memory : fs::temp_directory_path()) / "checkpoints-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no folder " + name);
    path_ = name;
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

struct Kind {
  std::string variant = "llama_bias", dtype = "float32";
  OptimConfig optim = {.learning_rate = 1e-2};
  bool lora = false, reference = false;
};

// A run of what a checkpoint keeps, without what makes gradients: step s has the gradient of its number.
struct SmallRun {
  Kind kind = {};

  std::unique_ptr<Decoder> decoder = nullptr;
  std::unique_ptr<Optimizer> optimizer = nullptr;
  std::unique_ptr<Decoder> reference_model = nullptr;

  void begin() {
    const auto load = [&] { return core::model::load_decoder(source(), core::device::parse_dtype(kind.dtype), at::kCPU); };
    decoder = load();
    if (kind.lora) core::model::add_lora(*decoder, {.r = 2});
    optimizer = std::make_unique<Optimizer>(*decoder, kind.optim, 20);
    if (kind.reference) reference_model = load();
  }
  fs::path source() const { return test::golden_folder(kind.variant); }

  void step() {
    const int64_t n = optimizer->steps();
    std::vector<at::Tensor> gradients;
    for (const auto& parameter : decoder->parameters()) {
      const auto wide = core::device::accumulation_dtype(parameter->value.scalar_type());
      gradients.push_back((at::arange(parameter->value.numel(), at::kLong) * 7919 + 104729 * n)
                              .remainder(20011)
                              .sub(10005)
                              .to(wide)
                              .div_(1 << 14)
                              .reshape(parameter->value.sizes()));
    }
    optimizer->step(gradients);
    if (reference_model) core::model::mix_into(*reference_model, *decoder, 0.25);
  }

  CheckpointContents contents(int64_t best = -1, bool merged = false) const {
    TrainerState state{.step = optimizer->steps(), .position = 3 * optimizer->steps(), .metrics_bytes = 12, .best_step = best};
    if (best >= 0) state.best_eval = 0.1;
    state.extra["unlogged"] = {{{"loss", 0.1}}};
    return {.decoder = *decoder,
            .model_source = source(),
            .adapters = kind.lora,
            .merged = merged,
            .optimizer = *optimizer,
            .reference_model = reference_model.get(),
            .state = state};
  }
};

std::map<std::string, at::Tensor> bits(const SmallRun& run) {
  std::map<std::string, at::Tensor> all = run.optimizer->state();
  for (const auto& parameter : run.decoder->parameters()) all["weights/" + parameter->name] = parameter->value.detach();
  if (run.reference_model) {
    for (const auto& weight : run.reference_model->weights()) all["reference/" + weight->name] = weight->value.detach();
  }
  for (auto& [name, value] : all) value = value.clone();
  return all;
}

// Names of what differs; empty: nothing.
std::string differences(const SmallRun& got, const std::map<std::string, at::Tensor>& wanted) {
  const auto have = bits(got);
  std::string result = have.size() == wanted.size() ? "" : "other entries; ";
  for (const auto& [name, value] : wanted) {
    const auto found = have.find(name);
    if (found == have.end() || !at::equal(found->second, value)) result += name + "; ";
  }
  return result;
}

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename().string());
  return names;
}

TEST(Checkpoint, RestoresBitForBitAndGoesOnAsIfNeverStopped) {
  const OptimConfig adam{.learning_rate = 1e-2}, sgd{.optim = core::optim::OptimizerName::kSgd, .sgd_momentum = 0.9};
  const std::vector<Kind> kinds{
      {.dtype = "float64", .optim = adam},
      {.dtype = "float32", .optim = sgd, .reference = true},
      {.variant = "qwen3_bfloat16", .dtype = "bfloat16", .optim = adam, .reference = true},
      {.variant = "qwen3_5_moe_fused", .dtype = "float32", .optim = adam},
      {.dtype = "float32", .optim = adam, .lora = true},
      {.variant = "qwen3_bfloat16", .dtype = "bfloat16", .optim = adam, .lora = true},
  };
  for (const Kind& kind : kinds) {
    SCOPED_TRACE(fmt::format("{} {} lora {}", kind.variant, kind.dtype, kind.lora));
    const auto begun = [&] {
      SmallRun run{kind};
      run.begin();
      return run;
    };
    const Folder folder;
    SmallRun straight = begun();
    for (int i = 0; i < 3; ++i) straight.step();
    const auto at_three = bits(straight);
    const fs::path saved = CheckpointStore(folder.path(), 0, false).save(straight.contents(2));
    EXPECT_EQ(saved, folder.path() / "checkpoint-3");
    EXPECT_EQ(differences(straight, at_three), "") << "saving changed the run";
    for (int i = 0; i < 2; ++i) straight.step();

    SmallRun resumed = begun();
    resumed.step();
    restore(saved, *resumed.decoder, *resumed.optimizer, resumed.reference_model.get());
    EXPECT_EQ(differences(resumed, at_three), "");
    EXPECT_NE(differences(straight, at_three), "") << "this test can't fail";
    const TrainerState state = read_trainer_state(saved);
    EXPECT_EQ(state.step, 3);
    EXPECT_EQ(state.position, 9);
    EXPECT_EQ(state.metrics_bytes, 12);
    EXPECT_EQ(state.best_eval, 0.1);
    EXPECT_EQ(state.best_step, 2);
    EXPECT_EQ(state.extra["unlogged"][0]["loss"], 0.1);
    for (int i = 0; i < 2; ++i) resumed.step();
    EXPECT_EQ(differences(resumed, bits(straight)), "");
  }
}

TEST(Checkpoint, MergedWeightsLieBesideTheAdapterOnRequest) {
  const Folder folder;
  SmallRun run{{.lora = true}};
  run.begin();
  run.step();
  const fs::path saved = CheckpointStore(folder.path(), 0, false).save(run.contents(-1, true));
  EXPECT_TRUE(fs::exists(saved / "adapter_model.safetensors"));
  const auto merged = core::model::load_decoder(saved / "merged", at::kFloat, at::kCPU);
  core::model::merge_lora(*run.decoder);
  for (size_t i = 0; i < merged->parameters().size(); ++i) {
    EXPECT_TRUE(at::equal(merged->parameters()[i]->value, run.decoder->parameters()[i]->value));
  }
}

TEST(Checkpoint, KeepsTheLastAndTheBest) {
  const Folder folder;
  SmallRun run;
  run.begin();
  const auto names = [](std::initializer_list<int> steps) {
    std::set<std::string> all;
    for (const int step : steps) all.insert(fmt::format("checkpoint-{}", step));
    return all;
  };
  {
    CheckpointStore store(folder.path(), 2, true);
    EXPECT_EQ(store.newest(), std::nullopt);
    const auto save = [&](int64_t best) {
      run.step();
      store.save(run.contents(best));
      return names_in(folder.path());
    };
    EXPECT_EQ(save(-1), names({1}));
    EXPECT_EQ(save(2), names({1, 2}));
    EXPECT_EQ(save(2), names({2, 3}));
    EXPECT_EQ(save(2), names({2, 3, 4}));
    EXPECT_EQ(save(5), names({4, 5}));
    EXPECT_EQ(save(5), names({5, 6}));
    EXPECT_EQ(store.newest(), folder.path() / "checkpoint-6");
  }
  {
    run.step();
    CheckpointStore(folder.path(), 0, true).save(run.contents(5));  // 0: all
    EXPECT_EQ(names_in(folder.path()), names({5, 6, 7}));
  }
  // Not ours: left alone, and no checkpoint.
  for (const char* other : {"checkpoint-99", "checkpoint-x.partial", "checkpoint-08", "notes"})
    fs::create_directory(folder.path() / other);
  run.step();
  CheckpointStore store(folder.path(), 1, false);
  store.save(run.contents(5));
  EXPECT_EQ(store.newest(), folder.path() / "checkpoint-8");
  EXPECT_EQ(names_in(folder.path()),
            (std::set<std::string>{"checkpoint-8", "checkpoint-99", "checkpoint-x.partial", "checkpoint-08", "notes"}));
}

TEST(Checkpoint, TheFolderBelongsToOneRun) {
  const Folder folder;
  const CheckpointStore first(folder.path(), 0, false);
  EXPECT_THAT([&] { CheckpointStore(folder.path(), 0, false); },
              ThrowsMessage<IoError>(HasSubstr("another run works in this folder")));
}

// --- a process that dies

constexpr int64_t kSteps = 4;
constexpr int64_t kBest = 1;

// What each step looks like; [0] is the start.
std::vector<std::map<std::string, at::Tensor>> expected_steps() {
  SmallRun run;
  run.begin();
  std::vector<std::map<std::string, at::Tensor>> steps{bits(run)};
  while (run.optimizer->steps() < kSteps) {
    run.step();
    steps.push_back(bits(run));
  }
  return steps;
}

// Saves each step, step 3 twice, with `before_write`; keeps the last two and the best.
void save_all(const fs::path& folder, const std::function<void()>& before_write) {
  SmallRun run;
  run.begin();
  CheckpointStore store(folder, 2, true);
  while (run.optimizer->steps() < kSteps) {
    run.step();
    store.save(run.contents(kBest), before_write);
    if (run.optimizer->steps() == 3) store.save(run.contents(kBest), before_write);
  }
}

// LibTorch's threads do not survive a fork: a child computes in one.
int in_child(const std::function<void()>& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      work();
    } catch (const IoError&) {
      ::_exit(kStopped);
    } catch (const std::exception& error) {
      ::fprintf(stderr, "child: %s\n", error.what());
      ::_exit(1);
    }
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// The step of the newest checkpoint, 0: none, after checking that it is whole and that nothing half-made is left.
int64_t whole_newest(const fs::path& folder, const std::vector<std::map<std::string, at::Tensor>>& expected) {
  const CheckpointStore store(folder, 2, true);
  const auto newest = store.newest();
  for (const std::string& name : names_in(folder)) {
    EXPECT_EQ(name.find('.'), std::string::npos) << name;
    EXPECT_NO_THROW(read_trainer_state(folder / name)) << name;
  }
  if (!newest) return 0;
  const int64_t step = read_trainer_state(*newest).step;
  SmallRun run;
  run.begin();
  EXPECT_NO_THROW(restore(*newest, *run.decoder, *run.optimizer, nullptr));
  EXPECT_EQ(differences(run, expected[step]), "") << newest->string();
  if (step > kBest) {
    EXPECT_TRUE(fs::exists(folder / fmt::format("checkpoint-{}", kBest)));
  }
  return step;
}

class DyingProcess : public testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

TEST_F(DyingProcess, BeforeAnyChangeOfTheDiskLeavesAWholeNewestCheckpoint) {
  const auto expected = expected_steps();
  int64_t last = 0;
  std::map<std::string, int> left;  // kinds of what the dead left half-made
  bool finished = false;
  for (int64_t stop_at = 0; !finished; ++stop_at) {
    SCOPED_TRACE(fmt::format("stopped before change {}", stop_at));
    const Folder folder;
    int64_t changes = 0;
    const int status = in_child([&] {
      save_all(folder.path(), [&] {
        if (changes++ == stop_at) ::_exit(kStopped);
      });
    });
    ASSERT_TRUE(status == kStopped || status == 0) << status;
    finished = status == 0;
    for (const std::string& name : names_in(folder.path())) {
      if (name.find('.') != std::string::npos) ++left[name.substr(name.find('.'))];
    }
    const int64_t step = whole_newest(folder.path(), expected);
    EXPECT_GE(step, last);
    last = step;
  }
  EXPECT_EQ(last, kSteps);
  EXPECT_GT(left[".partial"], 10);
  EXPECT_GT(left[".replaced"], 2) << "no stop fell between the two renames";
}

TEST_F(DyingProcess, KilledAtRandomMomentsLeavesAWholeNewestCheckpoint) {
  const auto expected = expected_steps();
  int64_t with_one = 0;
  for (int trial = 0; trial < 15; ++trial) {
    const Folder folder;
    const pid_t child = ::fork();
    if (child == 0) {
      save_all(folder.path(), {});
      ::_exit(0);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(4000 + 3777 * trial));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    if (whole_newest(folder.path(), expected) > 0) ++with_one;
  }
  EXPECT_GT(with_one, 0);
}

TEST_F(DyingProcess, AFullDiskIsAnErrorAndLeavesTheOlderOnes) {
  const auto expected = expected_steps();
  int64_t last = 0, full = 0;
  bool finished = false;
  for (int64_t fill_at = 0; !finished; ++fill_at) {
    SCOPED_TRACE(fmt::format("full from change {} on", fill_at));
    const Folder folder;
    int64_t changes = 0;
    const int status = in_child([&] {
      std::signal(SIGXFSZ, SIG_IGN);
      save_all(folder.path(), [&] {
        if (changes++ != fill_at) return;
        const rlimit nothing{.rlim_cur = 0, .rlim_max = 0};
        ::setrlimit(RLIMIT_FSIZE, &nothing);
      });
    });
    ASSERT_TRUE(status == kStopped || status == 0) << status;
    full += status == kStopped ? 1 : 0;
    for (const std::string& name : names_in(folder.path())) EXPECT_EQ(name.find('.'), std::string::npos) << name;
    const int64_t step = whole_newest(folder.path(), expected);
    EXPECT_GE(step, last);
    last = step;
    finished = status == 0;  // full from the last removals on: nobody notices
  }
  EXPECT_EQ(last, kSteps);
  EXPECT_GT(full, 10);
}

// --- a checkpoint that is damaged, or another run's

class Damaged : public testing::Test {
 protected:
  void SetUp() override {
    run_.kind.reference = true;
    run_.begin();
    run_.step();
    saved_ = CheckpointStore(folder_.path(), 0, false).save(run_.contents());
  }
  void resume(SmallRun& run) { restore(saved_, *run.decoder, *run.optimizer, run.reference_model.get()); }
  // As it was, but ending after `bytes`.
  void cut(const std::string& file, uintmax_t bytes) { fs::resize_file(saved_ / file, bytes); }

  Folder folder_;
  SmallRun run_;
  fs::path saved_;
};

TEST_F(Damaged, AFileCutShortIsNamed) {
  for (const std::string file :
       {"model.safetensors", "training_state/optimizer.safetensors", "training_state/reference_model.safetensors", "config.json"}) {
    const auto size = fs::file_size(saved_ / file);
    fs::copy_file(saved_ / file, folder_.path() / "copy");
    for (const uintmax_t bytes : {uintmax_t{0}, uintmax_t{5}, size / 2, size - 1}) {
      if (file == "config.json" && bytes == size - 1) continue;  // a newline
      cut(file, bytes);
      EXPECT_THAT([&] { resume(run_); }, ThrowsMessage<FormatError>(HasSubstr((saved_ / file).string()))) << bytes;
    }
    fs::remove(saved_ / file);
    EXPECT_THROW(resume(run_), FormatError) << file;
    fs::rename(folder_.path() / "copy", saved_ / file);
  }
  EXPECT_NO_THROW(resume(run_));
  const std::string state = "training_state/state.json";
  for (const uintmax_t bytes : {uintmax_t{0}, uintmax_t{5}, fs::file_size(saved_ / state) / 2}) {
    const auto whole = fs::file_size(saved_ / state);
    fs::copy_file(saved_ / state, folder_.path() / "copy");
    cut(state, std::min(bytes, whole));
    EXPECT_THAT([&] { read_trainer_state(saved_); }, ThrowsMessage<FormatError>(HasSubstr((saved_ / state).string()))) << bytes;
    fs::rename(folder_.path() / "copy", saved_ / state);
  }
}

TEST_F(Damaged, AStateOfOtherContentsIsNamed) {
  const fs::path file = saved_ / "training_state" / "state.json";
  const auto refuses = [&](const char* key, const nlohmann::json& value) {
    nlohmann::json state = nlohmann::json::parse(std::ifstream(file));
    const nlohmann::json old = state;
    state[key] = value;
    test::write_json(file, state);
    EXPECT_THAT([&] { read_trainer_state(saved_); },
                ThrowsMessage<FormatError>(testing::AllOf(HasSubstr(file.string()), HasSubstr(key))));
    test::write_json(file, old);
  };
  refuses("format", "another");
  refuses("format_version", 2);
  refuses("step", -1);
  refuses("step", "three");
  refuses("position", 1.5);
  refuses("extra", nlohmann::json::array());
  EXPECT_NO_THROW(read_trainer_state(saved_));
  EXPECT_THROW(read_trainer_state(folder_.path()), FormatError);
}

TEST_F(Damaged, AnotherRunsIsRefused) {
  SmallRun other{{.variant = "qwen3"}};
  other.begin();
  EXPECT_THAT([&] { resume(other); }, ThrowsMessage<FormatError>(HasSubstr("of another model")));
  SmallRun lora{{.lora = true}};
  lora.begin();
  EXPECT_THAT([&] { resume(lora); }, ThrowsMessage<FormatError>(HasSubstr("holds weights, this run trains adapters")));
  SmallRun wide{{.dtype = "float64"}};
  wide.begin();
  EXPECT_THAT([&] { resume(wide); }, ThrowsMessage<FormatError>(HasSubstr("optimizer.safetensors: optimizer state: exp_avg/")));
  SmallRun sgd{{.optim = {.optim = core::optim::OptimizerName::kSgd}}};
  sgd.begin();
  EXPECT_THAT([&] { resume(sgd); }, ThrowsMessage<FormatError>(HasSubstr("optimizer.safetensors")));
}

}  // namespace
}  // namespace longstraw::training

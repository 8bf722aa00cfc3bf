// Sampling by a server that runs the checkpoint with transformers, and by servers that fail.

#include "training/server_sampler.h"

#include "core/base/errors.h"
#include "core/data/reward_process.h"
#include "core/model/save.h"
#include "reference/gradient.h"
#include "tests/support/fixture.h"
#include "training/server_weights.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>

namespace longstraw::training {
namespace {

namespace fs = std::filesystem;
using core::model::Decoder;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

const core::data::RolloutConfig kRollout{.num_generations = 3, .max_completion_length = 5, .temperature = 0.7, .seed = 11};

// A random llama, written where the server finds it, and the server.
class Server {
 public:
  Server()
      : process_({.command = {core::data::find_python().string(), "tests/training/sampling_server.py", model(), "float64"},
                  .environment = {},
                  .echo_errors = false}),
        url_("http://127.0.0.1:" + say("port").dump()) {}
  std::string model() {
    if (!fs::exists(folder_.path() / "config.json")) test::write_checkpoint(folder_.path(), test::tiny_config());
    return folder_.path().string();
  }
  const std::string& url() const { return url_; }
  void reset(const std::string& way) { say("reset " + way); }
  nlohmann::json asked() { return say("asked"); }

 private:
  nlohmann::json say(const std::string& line) { return nlohmann::json::parse(process_.exchange(line, std::chrono::seconds(300))); }

  test::TemporaryFolder folder_;
  core::data::ChildProcess process_;
  std::string url_;
};

class ServerSampling : public testing::Test {
 protected:
  // One for all of them: it takes seconds to start.
  static void SetUpTestSuite() {
    ::setenv("NO_PROXY", "127.0.0.1", 1);
    server_ = std::make_unique<Server>();
  }
  static void TearDownTestSuite() { server_.reset(); }
  void SetUp() override { server_->reset(""); }

  ServerSamplerOptions options(int64_t retries = 0, double timeout = 300.0) const {
    return {.server = {.url = server_->url(), .timeout = timeout, .retries = retries, .sync_steps = 2},
            .stop_token_ids = {3},
            .vocab = decoder_->architecture().vocab,
            .write_weights = {},
            .echo_errors = false};
  }
  EncodedPrompt prompt() const { return {&row_, {5, 9, 2, 17}}; }

  // The largest distance of a log-prob that the server reported from the reference's, with the decoder's weights.
  double largest_error(const RolloutGroup& sampled) const {
    double largest = 0.0;
    const at::NoGradGuard no_grad;
    for (const auto& response : sampled.group.responses) {
      const auto length = int64_t(prompt().ids.size() + response.completion_ids.size());
      const at::Tensor logits =
          reference::response_logits(*decoder_, prompt().ids, response.completion_ids, {length, length}, {}) / kRollout.temperature;
      const at::Tensor wanted =
          at::log_softmax(logits, -1).gather(1, at::tensor(response.completion_ids, at::kLong).unsqueeze(1)).squeeze(1);
      const double error = at::tensor(*response.sampling_logprobs, at::kDouble).sub(wanted).abs().max().item<double>();
      largest = std::isfinite(error) ? std::max(largest, error) : INFINITY;
    }
    return largest;
  }

  template <class E = CommunicationError>
  std::string refused(const std::string& way, int64_t retries = 0, double timeout = 300.0) {
    server_->reset(way);
    ServerSampler sampler(options(retries, timeout));
    for (int request = 0; request < 3; ++request) {
      try {
        sampler.sample(prompt(), kRollout, 1);
      } catch (const E& error) {
        return error.what();
      }
    }
    return "(no error)";
  }

  core::data::PromptRow row_{.prompt_id = "q", .prompt = nullptr, .prompt_ids = {}};
  std::unique_ptr<Decoder> decoder_ = core::model::load_decoder(server_->model(), at::kDouble, at::kCPU);
  static std::unique_ptr<Server> server_;
};
std::unique_ptr<Server> ServerSampling::server_;

TEST_F(ServerSampling, gives_token_ids_and_log_probs_and_says_which_were_cut_off) {
  ServerSampler sampler(options());
  const RolloutGroup sampled = sampler.sample(prompt(), kRollout, 1);
  EXPECT_EQ(sampled.group.prompt_id, "q");
  EXPECT_EQ(sampled.group.prompt_ids, prompt().ids);
  ASSERT_EQ(sampled.group.responses.size(), 3u);
  for (size_t m = 0; m < 3; ++m) {
    const auto& ids = sampled.group.responses[m].completion_ids;
    EXPECT_EQ(sampled.truncated[m], ids.back() == 3 ? 0 : 1);
    EXPECT_LE(ids.size(), 5u);
  }
  // Two implementations of one model in float64: 1e-10 is what the sampler's own log-probs are held to.
  EXPECT_LE(largest_error(sampled), 1e-10);

  const RolloutGroup again = sampler.sample(prompt(), kRollout, 1), other = sampler.sample(prompt(), kRollout, 2);
  EXPECT_EQ(again.group, sampled.group);
  EXPECT_NE(other.group, sampled.group);
}

TEST_F(ServerSampling, new_weights_reach_the_server_every_sync_steps) {
  const test::TemporaryFolder folder;
  auto with_weights = options();
  with_weights.write_weights = ServerWeights(*decoder_, server_->model(), folder.path() / "weights");
  ServerSampler sampler(with_weights);
  const auto scale = [&](double factor) {
    const at::NoGradGuard no_grad;
    for (const auto& parameter : decoder_->parameters()) parameter->value.mul_(factor);
  };
  scale(1.1);  // the server has other weights than ours, as one that served an earlier run
  EXPECT_LE(largest_error(sampler.sample(prompt(), kRollout, 1)), 1e-10);
  scale(1.25);
  sampler.weights_changed(1);
  EXPECT_GT(largest_error(sampler.sample(prompt(), kRollout, 1)), 1e-3);  // it samples with the old ones still
  sampler.weights_changed(2);
  EXPECT_LE(largest_error(sampler.sample(prompt(), kRollout, 1)), 1e-10);
  for (const int64_t step : {3, 4, 5, 6}) sampler.weights_changed(step);
  std::vector<std::string> kept;
  for (const auto& entry : fs::directory_iterator(folder.path() / "weights")) kept.push_back(entry.path().filename());
  std::sort(kept.begin(), kept.end());
  EXPECT_THAT(kept, ElementsAre("step-4", "step-6"));
  std::vector<std::string> told;
  for (const auto& request : server_->asked()) {
    if (request["path"] == "/update_weights_from_disk")
      told.push_back(fs::path(request["model_path"].get<std::string>()).filename());
  }
  EXPECT_THAT(told, ElementsAre("step-0", "step-2", "step-4", "step-6"));
}

TEST_F(ServerSampling, a_server_that_is_not_told_finds_the_folder) {
  const test::TemporaryFolder folder;
  auto untold = options();
  untold.server.reload_path = "";
  untold.write_weights = ServerWeights(*decoder_, server_->model(), folder.path());
  ServerSampler(untold).weights_changed(2);
  EXPECT_TRUE(fs::exists(folder.path() / "step-2" / "model.safetensors"));
  EXPECT_EQ(server_->asked().size(), 0u);
}

TEST_F(ServerSampling, a_server_that_recovers_is_asked_again) {
  server_->reset("busy at first");
  ServerSampler sampler(options(2));
  EXPECT_EQ(sampler.sample(prompt(), kRollout, 1).group.responses.size(), 3u);
  EXPECT_EQ(server_->asked().size(), 3u);
}

TEST_F(ServerSampling, a_server_that_fails_is_reported_with_what_was_asked_and_answered) {
  EXPECT_THAT(refused("dies after two requests", 1),
              AllOf(HasSubstr("POST /v1/completions with 4 prompt tokens, n 3, max_tokens 5"),
                    HasSubstr("can't be reached, or went away"), HasSubstr("(asked 2 times)")));
  EXPECT_THAT(refused("rubbish"), HasSubstr("answered with \"Hello\", wanted choices"));
  EXPECT_THAT(refused("slow", 0, 1.0), HasSubstr("gave no answer within 1 s"));
  EXPECT_THAT(refused("another model"), HasSubstr("sampled token 1000000, wanted 0 to 31: it serves another model"));
  EXPECT_THAT(refused<ConfigError>("no ids"), HasSubstr("returns no token ids, and its text can't be tokenized back exactly"));
}

TEST_F(ServerSampling, an_address_that_is_none_is_a_fault_of_the_configuration) {
  ServerSamplerOptions nowhere{.server = {.url = "localhost:8000"}, .echo_errors = false};
  EXPECT_THROW(ServerSampler{nowhere}, ConfigError);
}

}  // namespace
}  // namespace longstraw::training

#include "app/verify_run.h"

#include "app/write_record.h"

#include "core/base/errors.h"
#include "core/base/sha256.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

namespace longstraw::app {
namespace {

namespace fs = std::filesystem;
using core::data::Batch;
using core::model::Decoder;
using core::model::Dtype;

// What every arm must find unchanged: the weights in memory, and the batch.
std::string fingerprint(const Decoder& decoder, const Batch& batch) {
  Sha256 sha;
  for (const auto& parameter : decoder.parameters()) {
    const at::Tensor bytes = parameter->value.detach().to(at::kCPU).contiguous();
    sha.update(bytes.const_data_ptr(), bytes.nbytes());
  }
  sha.update(core::data::data_sha256(batch));
  return sha.hex();
}

class ArmRunner {
 public:
  ArmRunner(const RunConfig& config, const Decoder& decoder, const Batch& batch, Progress& progress)
      : config_(config), decoder_(decoder), batch_(batch), progress_(progress), fingerprint_(fingerprint(decoder, batch)) {}

  void run(Arm arm, const fs::path& path) {
    const std::string name(core::config::name_of(arm));
    const auto result = run_arm(arm, decoder_, batch_, config_, progress_);
    if (fingerprint(decoder_, batch_) != fingerprint_) {
      throw Error(ExitStatus::kFailedRunning,
                  fmt::format("arm {}: it changed the weights or the batch, which all arms share", name));
    }
    write_record(path, {.arm = name, .config = config_, .decoder = decoder_, .batch = batch_, .result = result});
  }

 private:
  const RunConfig& config_;
  const Decoder& decoder_;
  const Batch& batch_;
  Progress& progress_;
  std::string fingerprint_;
};

RunConfig noise_config(RunConfig config) {
  using reference::Attention;
  switch (config.model.dtype) {
    case Dtype::kBfloat16: config.model.dtype = Dtype::kFloat32; break;
    case Dtype::kFloat32: config.model.dtype = Dtype::kFloat64; break;
    case Dtype::kFloat64:
      config.reference.attention = config.reference.attention == Attention::kTextbook ? Attention::kSdpa : Attention::kTextbook;
      break;
  }
  return config;
}

}  // namespace

compare::VerifyInputs run_arms(const RunConfig& config, std::unique_ptr<Decoder> decoder, const Batch& batch,
                               const fs::path& folder, Progress& progress) {
  const auto path = [&](const char* name) { return (folder / name).string(); };
  compare::VerifyInputs inputs{.reference = path("reference.h5"), .arms = {}, .noise = path("noise.h5"), .config = config.compare};
  RunConfig with_tail = config;
  with_tail.longstraw.tail_tokens = tail_tokens(config, batch);
  {
    ArmRunner runner(with_tail, *decoder, batch, progress);
    runner.run(Arm::kReference, inputs.reference);
    for (const Arm arm : {Arm::kDetached, Arm::kTail, Arm::kExact}) {
      const std::string name(core::config::name_of(arm));
      inputs.arms.emplace_back(name, path((name + ".h5").c_str()));
      runner.run(arm, inputs.arms.back().second);
    }
  }
  progress.say("the reference once more, for the noise floor:");
  const RunConfig wide = noise_config(with_tail);
  if (wide.model.dtype != config.model.dtype) {
    decoder.reset();
    decoder = open_model(wide.model, wide.lora, progress);
  }
  ArmRunner(wide, *decoder, batch, progress).run(Arm::kReference, *inputs.noise);
  return inputs;
}

}  // namespace longstraw::app

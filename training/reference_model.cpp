#include "training/reference_model.h"

#include "core/base/errors.h"
#include "core/model/lora.h"
#include "core/model/save.h"

#include <fmt/format.h>

#include <optional>

namespace longstraw::training {

ReferenceModel::ReferenceModel(const Settings& settings, const core::model::Decoder& decoder)
    : policy_decoder_(decoder), train_(settings.train) {
  const bool frozen_base = settings.lora.wanted() && !train_.ref_model;
  if (frozen_base) return;
  const std::string folder = train_.ref_model.value_or(settings.model.path);
  own_ = core::model::load_decoder(folder, decoder.dtype(), decoder.device());
  const int64_t wanted = decoder.architecture().vocab, got = own_->architecture().vocab;
  if (got != wanted) {
    throw FormatError(
        fmt::format("{}: train.ref_model: a vocabulary of {}, wanted {}, as {} has", folder, got, wanted, settings.model.path));
  }
}

core::model::TokenScores ReferenceModel::scores(const Policy& policy, const core::data::Batch& batch) const {
  if (own_) return policy.scores(*own_, batch, {});
  const core::model::WithoutAdapters base(policy_decoder_);
  return policy.scores(policy_decoder_, batch, {});
}

void ReferenceModel::after_step(int64_t steps) {
  if (!train_.sync_ref_model || steps % train_.ref_model_sync_steps != 0) return;
  core::model::mix_into(*own_, policy_decoder_, train_.ref_model_mixup_alpha);
}

}  // namespace longstraw::training

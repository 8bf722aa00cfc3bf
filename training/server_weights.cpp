#include "training/server_weights.h"

#include "core/base/errors.h"
#include "core/model/save.h"

#include <fmt/format.h>

#include <utility>

namespace longstraw::training {
namespace {

namespace fs = std::filesystem;

// Everything in `folder` but the two.
void remove_others(const fs::path& folder, const fs::path& one, const fs::path& other) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const bool ours = entry.path().filename().string().starts_with("step-");
    if (ours && entry.path() != one && entry.path() != other) fs::remove_all(entry.path(), ignored);
  }
}

void make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw IoError(fmt::format("{}: can't be made: {}", folder.string(), error.message()));
}

}  // namespace

ServerWeights::ServerWeights(const core::model::Decoder& decoder, fs::path source, fs::path folder)
    : decoder_(&decoder), source_(std::move(source)), folder_(std::move(folder)) {}

fs::path ServerWeights::operator()(int64_t step) {
  const fs::path whole = folder_ / fmt::format("step-{}", step), partial = folder_ / fmt::format("step-{}.partial", step);
  make_folder(folder_);
  std::error_code ignored;
  if (newest_ == whole) newest_.clear();
  remove_others(folder_, newest_, newest_);  // before, so that the disk never holds three
  make_folder(partial);
  try {
    core::model::save_checkpoint(*decoder_, source_, partial);
  } catch (...) {
    fs::remove_all(partial, ignored);
    throw;
  }
  std::error_code error;
  fs::rename(partial, whole, error);
  if (error) throw IoError(fmt::format("{}: can't be renamed: {}", partial.string(), error.message()));
  return newest_ = whole;
}

}  // namespace longstraw::training

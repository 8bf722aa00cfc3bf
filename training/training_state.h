#pragma once
// What lies inside one checkpoint folder; when it is written, renamed and removed is checkpoint.h's business.

#include "training/checkpoint.h"

#include <filesystem>
#include <functional>

namespace longstraw::training {

inline constexpr const char* kStateFile = "training_state/state.json";

// Into `folder`, which is made. IoError naming the file. `before_write` is called before each file or set of files.
void write_contents(const CheckpointContents& contents, const std::filesystem::path& folder,
                    const std::function<void()>& before_write);

}  // namespace longstraw::training

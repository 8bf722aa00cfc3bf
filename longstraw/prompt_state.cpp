#include "longstraw/prompt_state.h"

#include "core/base/errors.h"
#include "core/device/device.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

namespace longstraw {
namespace {

// The same rows with room for `capacity` tokens.
at::Tensor grown(const at::Tensor& rows_HNw, int64_t capacity) {
  at::Tensor made = at::empty({rows_HNw.size(0), capacity, rows_HNw.size(2)}, rows_HNw.options());
  made.narrow(1, 0, rows_HNw.size(1)).copy_(rows_HNw);
  return made;
}

}  // namespace

PromptState::PromptState(const core::model::Decoder& decoder, int64_t capacity, int64_t choices_begin)
    : wide_(core::device::accumulation_dtype(decoder.dtype())),
      device_(decoder.device()),
      capacity_(capacity),
      choices_begin_(std::min(choices_begin, capacity)),
      adjoint_begin_(capacity),
      weights_version_(decoder.weights_version()) {
  const auto options = at::TensorOptions().dtype(decoder.dtype()).device(decoder.device());
  for (const auto& state : decoder.states()) {
    Slot& slot = slots_.emplace_back();
    slot.window = state.window;
    slot.carried.resize(state.carried.size());
    for (const auto& rows : state.rows) {
      Rows& made = slot.rows.emplace_back();
      made.heads = rows.heads;
      made.width = rows.width;
      made.wants_adjoint = rows.adjoint;
      if (!slot.window) made.blocks.push_back({0, at::empty({rows.heads, capacity_, rows.width}, options)});
    }
  }
  for (const auto& router : decoder.routers()) {
    const bool is_small = router.experts <= std::numeric_limits<int16_t>::max();
    const auto ids = options.dtype(is_small ? at::kShort : at::kInt);
    routes_.push_back({at::empty({capacity_ - choices_begin_, router.chosen}, ids), {}});
  }
}

void PromptState::reserve(int64_t capacity) {
  if (capacity <= capacity_) return;
  const at::NoGradGuard no_grad;
  for (Slot& slot : slots_) {
    if (slot.window) continue;
    for (Rows& rows : slot.rows) rows.blocks.front().rows = grown(rows.blocks.front().rows, capacity);
  }
  for (Routes& routes : routes_) {
    routes.chosen = grown(routes.chosen.unsqueeze(0), capacity - choices_begin_).squeeze(0);
  }
  capacity_ = capacity;
}

void PromptState::open_adjoint(int64_t adjoint_begin) {
  adjoint_begin_ = std::min(adjoint_begin, capacity_);
  for (Slot& slot : slots_) {
    for (Rows& rows : slot.rows) {
      if (!rows.wants_adjoint) continue;
      rows.adjoint =
          at::empty({rows.heads, capacity_ - adjoint_begin_, rows.width}, at::TensorOptions().dtype(wide_).device(device_));
    }
  }
}

void PromptState::close_adjoint() {
  leave_captured(-1);
  for (Slot& slot : slots_) {
    for (Rows& rows : slot.rows) rows.adjoint.reset();
  }
  adjoint_begin_ = capacity_;
}

at::Tensor PromptState::rows(int64_t slot, int64_t part, int64_t begin, int64_t count) const {
  std::vector<at::Tensor> pieces;
  for (const Block& block : slots_.at(slot).rows.at(part).blocks) {
    const int64_t from = std::max(begin, block.begin), to = std::min(begin + count, block.end());
    if (from < to || count == 0) pieces.push_back(block.rows.narrow(1, from - block.begin, std::max<int64_t>(0, to - from)));
  }
  const at::Tensor found = pieces.size() == 1 ? pieces.front() : at::cat(pieces, 1);
  TORCH_CHECK(found.size(1) == count, "prompt state: positions ", begin, " to ", begin + count, " of slot ", slot,
              " are not all there");
  return found;
}

at::Tensor PromptState::rows_adjoint(int64_t slot, int64_t part, int64_t begin, int64_t count) const {
  return slots_.at(slot).rows.at(part).adjoint.narrow(1, begin - adjoint_begin_, count);
}

void PromptState::write_rows(int64_t slot, int64_t part, int64_t begin, const at::Tensor& rows_Shw) {
  at::NoGradGuard no_grad;
  auto& blocks = slots_.at(slot).rows.at(part).blocks;
  if (!slots_[slot].window) {
    blocks.front().rows.narrow(1, begin, rows_Shw.size(0)).copy_(rows_Shw.transpose(0, 1));
    return;
  }
  std::erase_if(blocks, [&](const Block& block) { return block.begin >= begin; });  // of a node that was left
  blocks.push_back({begin, rows_Shw.detach().transpose(0, 1).clone(at::MemoryFormat::Contiguous)});
}

bool PromptState::holds_rows(int64_t slot, int64_t part, int64_t begin, const at::Tensor& rows_Shw) const {
  return at::equal(rows(slot, part, begin, rows_Shw.size(0)), rows_Shw.detach().transpose(0, 1));
}

void PromptState::zero_adjoint(int64_t begin, int64_t count) {
  for (Slot& slot : slots_) {
    for (Rows& rows : slot.rows) {
      if (rows.adjoint.defined()) rows.adjoint.narrow(1, begin - adjoint_begin_, count).zero_();
    }
  }
}

at::Tensor PromptState::carried(int64_t slot, int64_t part, int64_t position) const {
  if (position == 0) return {};
  const auto& boundaries = slots_.at(slot).carried.at(part);
  const auto found = boundaries.find(position);
  TORCH_CHECK(found != boundaries.end(), "prompt state: slot ", slot, " holds nothing at position ", position);
  return found->second.value;
}

void PromptState::write_carried(int64_t slot, int64_t part, int64_t position, const at::Tensor& value) {
  slots_.at(slot).carried.at(part)[position] = {value.detach().clone(at::MemoryFormat::Contiguous), {}};
}

bool PromptState::holds_carried(int64_t slot, int64_t part, int64_t position, const at::Tensor& value) const {
  return at::equal(carried(slot, part, position), value.detach());
}

at::Tensor PromptState::carried_adjoint(int64_t slot, int64_t part, int64_t position) const {
  const auto& boundaries = slots_.at(slot).carried.at(part);
  const auto found = boundaries.find(position);
  return found == boundaries.end() ? at::Tensor() : found->second.adjoint;
}

void PromptState::add_carried_adjoint(int64_t slot, int64_t part, int64_t position, const at::Tensor& grad) {
  at::Tensor& adjoint = slots_.at(slot).carried.at(part).at(position).adjoint;
  if (adjoint.defined()) adjoint.add_(grad);
  else adjoint = grad.to(wide_, /*non_blocking=*/false, /*copy=*/true);
}

at::Tensor PromptState::routes(int64_t router, int64_t begin, int64_t count) const {
  const Routes& routes = routes_.at(router);
  return routes.written.contains(begin) ? routes.chosen.narrow(0, begin - choices_begin_, count).to(at::kLong) : at::Tensor();
}

void PromptState::write_routes(int64_t router, int64_t begin, const at::Tensor& chosen_Sk) {
  if (begin < choices_begin_) return;
  Routes& routes = routes_.at(router);
  routes.chosen.narrow(0, begin - choices_begin_, chosen_Sk.size(0)).copy_(chosen_Sk);
  routes.written.insert(begin);
}

std::optional<uint64_t> PromptState::selection_hash(int64_t slot, int64_t begin) const {
  const auto& selections = slots_.at(slot).selections;
  const auto found = selections.find(begin);
  return found == selections.end() ? std::nullopt : std::optional(found->second);
}

void PromptState::write_selection_hash(int64_t slot, int64_t begin, uint64_t hash) { slots_.at(slot).selections[begin] = hash; }

void PromptState::forget_before(int64_t position) {
  for (Slot& slot : slots_) {
    for (auto& boundaries : slot.carried) boundaries.erase(boundaries.begin(), boundaries.lower_bound(position));
    if (!slot.window) continue;
    for (Rows& rows : slot.rows) {
      std::erase_if(rows.blocks, [&](const Block& block) { return block.end() <= position - *slot.window + 1; });
    }
  }
}

void PromptState::leave(int64_t begin) {
  for (Slot& slot : slots_) {
    for (auto& boundaries : slot.carried) boundaries.erase(boundaries.upper_bound(begin), boundaries.end());
    slot.selections.erase(slot.selections.lower_bound(begin), slot.selections.end());
  }
  for (Routes& routes : routes_) routes.written.erase(routes.written.lower_bound(begin), routes.written.end());
}

void PromptState::leave_captured(int64_t begin) {
  for (Slot& slot : slots_) {
    for (auto& boundaries : slot.carried) {
      for (auto border = boundaries.upper_bound(begin); border != boundaries.end(); ++border) border->second.adjoint.reset();
    }
  }
}

void PromptState::drop_blocks_from(int64_t position) {
  for (Slot& slot : slots_) {
    if (!slot.window) continue;
    for (Rows& rows : slot.rows) std::erase_if(rows.blocks, [&](const Block& block) { return block.begin >= position; });
  }
}

bool PromptState::is_current(const core::model::Decoder& decoder) const { return decoder.weights_version() == weights_version_; }

void PromptState::check_weights(const core::model::Decoder& decoder) const {
  if (!is_current(decoder)) {
    throw ConfigError(
        "the prompt state was made by other weights than the model has now: capture the prompt again after "
        "an optimizer step");
  }
}

int64_t PromptState::state_bytes() const {
  int64_t bytes = 0;
  for (const Slot& slot : slots_) {
    for (const Rows& rows : slot.rows) {
      for (const Block& block : rows.blocks) bytes += static_cast<int64_t>(block.rows.nbytes());
    }
    for (const auto& boundaries : slot.carried) {
      for (const auto& [position, boundary] : boundaries) bytes += static_cast<int64_t>(boundary.value.nbytes());
    }
  }
  for (const Routes& routes : routes_) bytes += static_cast<int64_t>(routes.chosen.nbytes());
  return bytes;
}

int64_t PromptState::adjoint_bytes() const {
  int64_t bytes = 0;
  for (const Slot& slot : slots_) {
    for (const Rows& rows : slot.rows) bytes += rows.adjoint.defined() ? static_cast<int64_t>(rows.adjoint.nbytes()) : 0;
    for (const auto& boundaries : slot.carried) {
      for (const auto& [position, boundary] : boundaries) {
        bytes += boundary.adjoint.defined() ? static_cast<int64_t>(boundary.adjoint.nbytes()) : 0;
      }
    }
  }
  return bytes;
}

}  // namespace longstraw

#pragma once
// A made-up run with the structure of a real one, so that faults can be planted in it: a decoder's parameter names and shapes;
// gradients that are a response part plus a prompt part, the latter absent where a real model has none; an output matrix whose
// rows come from the responses' tokens; responses with rewards, advantages and log-probabilities.

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "core/record/record.h"

namespace longstraw::compare::testing {

struct Gradient {
  std::vector<std::int64_t> shape;
  std::vector<double> values;
};

struct SyntheticStep {
  std::map<std::string, Gradient> gradients;
  std::map<std::string, Gradient> prompt_part;  // what `detached` drops
  std::vector<core::record::ResponseRecord> responses;
};

struct SyntheticOptions {
  std::int64_t layers = 4;
  bool biases = true;
  bool recurrent = false;  // every layer but the last is a gated delta rule layer
  bool tied = false;       // one matrix for embedding and output
  std::uint64_t seed = 1;
  double first_weight = 1;                       // weight of the first response token in the output matrix
  std::map<std::int64_t, double> member_weight;  // of all tokens of a member there; 1 where absent
};

SyntheticStep synthetic_step(const SyntheticOptions& options = {});
core::record::RecordHeader synthetic_header(const std::string& arm, const std::string& dtype);
// Each element times (1 + size * normal number), and a floor of size * the parameter's root mean square: how rounding looks.
void add_rounding(SyntheticStep& step, double size, std::uint64_t seed);
// Writes a closed record of the given steps; gradients are stored as float32 unless dtype is float64.
std::string write_run(const std::string& path, const core::record::RecordHeader& header, const std::vector<SyntheticStep>& steps);

}  // namespace longstraw::compare::testing

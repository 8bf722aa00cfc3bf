#pragma once
// What the searches for causes share: which parameters deviate beyond their bound and have no cause yet.

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "compare/diagnose.h"

namespace longstraw::compare {

class Deviations {
 public:
  explicit Deviations(const DiagnosisInput& input);

  const DiagnosisInput& input() const { return input_; }
  // Deviating parameters without a cause, in order of name.
  std::vector<const ParameterMeasure*> open() const;
  bool deviates(const std::string& name) const { return deviating_.contains(name); }
  bool is_open(const std::string& name) const { return deviating_.contains(name) && !explained_.contains(name); }
  // How large a relative error on this parameter rounding explains.
  double tolerance(const std::string& name) const;
  std::size_t count() const { return deviating_.size(); }

  void add(std::string name, std::string evidence, std::vector<std::string> parameters);
  std::vector<Finding> take() { return std::move(findings_); }
  const std::vector<Finding>& findings() const { return findings_; }

 private:
  const DiagnosisInput& input_;
  std::set<std::string> deviating_;
  std::set<std::string> explained_;
  std::vector<Finding> findings_;
};

// "a, b, c and 4 more"
std::string listed(const std::vector<std::string>& names, std::size_t most = 3);

// Each search takes what it can explain out of `deviations`.
void find_nonfinite(Deviations& deviations);
void find_missing(Deviations& deviations);
void find_zeroed(Deviations& deviations);
void find_gradient_of_indexer(Deviations& deviations);
void find_wrong_sign(Deviations& deviations);
void find_constant_factor(Deviations& deviations);
void find_exchanged(Deviations& deviations);
void find_transposed(Deviations& deviations);
void find_earlier_step(Deviations& deviations);
void find_state_adjoints(Deviations& deviations);
void find_cut_prompt(Deviations& deviations);
// Reads the responses of both records; true when the responses themselves differ.
bool find_in_responses(Deviations& deviations);
// The first point of the forward pass at which traces part. False without traces in both, or where they agree.
bool find_in_trace(Deviations& deviations, const std::vector<core::record::ResponseRecord>& reference,
                   const std::vector<core::record::ResponseRecord>& candidate);
// Looks at the rows of the output matrix that belong to the responses' tokens.
void find_in_token_rows(Deviations& deviations);

}  // namespace longstraw::compare

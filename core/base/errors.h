#pragma once
// The family of errors that a user can cause or meet. A message says what, which, got and wanted, for example
//   record out.h5: /steps/000003/gradients/model.norm.weight: shape [64], expected [128]
// `main` catches once and maps the error to the program's exit status. A deviation between two gradients is a result,
// not an error.

#include <stdexcept>
#include <string>

namespace longstraw {

// Exit status of every program: a contract that CI jobs rely on.
enum class ExitStatus : int {
  kWithinBounds = 0,   // success; within bounds; adopt
  kBeyondBounds = 1,   // beyond bounds; do not adopt
  kUnusable = 2,       // wrong use or unusable input
  kFailedRunning = 3,  // failure while running
};

class Error : public std::runtime_error {
 public:
  Error(ExitStatus status, const std::string& message) : std::runtime_error(message), status_(status) {}
  ExitStatus exit_status() const { return status_; }

 private:
  ExitStatus status_;
};

// Wrong use: an unknown key, a value out of its range, two options that exclude each other.
class ConfigError : public Error {
 public:
  explicit ConfigError(const std::string& message) : Error(ExitStatus::kUnusable, message) {}
};

// An input that can't be used: a truncated file, a wrong shape, a NaN.
class FormatError : public Error {
 public:
  explicit FormatError(const std::string& message) : Error(ExitStatus::kUnusable, message) {}
};

// Reading or writing failed for a reason outside the data: no permission, a full disk.
class IoError : public Error {
 public:
  explicit IoError(const std::string& message) : Error(ExitStatus::kFailedRunning, message) {}
};

// A device that is missing, or ran out of memory.
class DeviceError : public Error {
 public:
  explicit DeviceError(const std::string& message) : Error(ExitStatus::kFailedRunning, message) {}
};

// Another process (a rank, a reward function) that died, hung or answered rubbish.
class CommunicationError : public Error {
 public:
  explicit CommunicationError(const std::string& message) : Error(ExitStatus::kFailedRunning, message) {}
};

}  // namespace longstraw

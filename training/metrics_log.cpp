#include "core/base/errors.h"
#include "core/data/child_process.h"
#include "core/data/reward_process.h"
#include "training/metrics.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>

namespace longstraw::training {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr auto kOpenTime = std::chrono::duration<double>(180.0);
constexpr auto kWriteTime = std::chrono::duration<double>(30.0);

json json_of(const Metrics& metrics) {
  json object = json::object();
  for (const auto& [name, value] : metrics) object[name] = std::isfinite(value) ? json(value) : json(nullptr);
  return object;
}

// One sink, python/longstraw/sinks.py. Its troubles are said once and end it.
class SinkProcess {
 public:
  SinkProcess(Sink sink, const fs::path& folder, const std::string& run_name, const std::string& config_yaml)
      : name_(core::config::name_of(sink)) {
    try {
      process_ = std::make_unique<core::data::ChildProcess>(core::data::python_module("longstraw.sinks"));
    } catch (const Error& error) {
      give_up(error.what());
      return;
    }
    ask({{"op", "open"}, {"sink", name_}, {"folder", folder.string()}, {"run_name", run_name}, {"config", config_yaml}}, kOpenTime);
  }
  ~SinkProcess() {
    if (process_) ask({{"op", "close"}}, kWriteTime);
  }

  void write(int64_t step, const json& metrics) {
    if (process_) ask({{"op", "log"}, {"step", step}, {"metrics", metrics}}, kWriteTime);
  }

 private:
  void ask(const json& request, std::chrono::duration<double> limit) {
    try {
      const json answer = json::parse(process_->exchange(request.dump(-1, ' ', true, json::error_handler_t::replace), limit));
      if (answer.contains("error")) give_up(answer["error"].get<std::string>());
    } catch (const std::exception& error) {
      give_up(error.what());
    }
  }
  void give_up(const std::string& problem) {
    fmt::print(stderr, "longstraw: metrics no longer go to {}: {}\n", name_, problem);
    process_.reset();
  }

  std::string name_;
  std::unique_ptr<core::data::ChildProcess> process_;
};

}  // namespace

struct MetricsLog::Impl {
  fs::path path;
  int file = -1;
  int64_t bytes = 0;
  std::vector<std::unique_ptr<SinkProcess>> sinks;

  [[noreturn]] void fail(const char* what) const {
    throw IoError(fmt::format("{}: {}: {}", path.string(), what, std::strerror(errno)));
  }
  ~Impl() {
    if (file >= 0) ::close(file);
  }
};

MetricsLog::MetricsLog(const fs::path& folder, int64_t keep_bytes, const std::vector<Sink>& sinks, const std::string& run_name,
                       const std::string& config_yaml)
    : impl_(std::make_unique<Impl>()) {
  impl_->path = folder / "metrics.jsonl";
  impl_->file = ::open(impl_->path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (impl_->file < 0) impl_->fail("can't be opened");
  const off_t there = ::lseek(impl_->file, 0, SEEK_END);
  if (there < keep_bytes) {
    throw FormatError(
        fmt::format("{}: {} bytes, but the checkpoint was saved when it had {}", impl_->path.string(), there, keep_bytes));
  }
  if (::ftruncate(impl_->file, keep_bytes) != 0 || ::lseek(impl_->file, keep_bytes, SEEK_SET) < 0) impl_->fail("can't be cut");
  impl_->bytes = keep_bytes;
  for (const Sink sink : sinks) impl_->sinks.push_back(std::make_unique<SinkProcess>(sink, folder, run_name, config_yaml));
}

MetricsLog::~MetricsLog() = default;

void MetricsLog::write(int64_t step, const Metrics& metrics) {
  const json values = json_of(metrics);
  nlohmann::ordered_json line{{"step", step}};
  for (const auto& [name, value] : values.items()) line[name] = value;
  const std::string text = line.dump() + "\n";
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t count = ::write(impl_->file, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      const int problem = errno;
      // Half a line would be no JSON; what can't be cut off now is cut off at resume.
      if (::ftruncate(impl_->file, impl_->bytes) != 0) errno = problem;
      errno = problem;
      impl_->fail("can't be written");
    }
    done += size_t(count);
  }
  impl_->bytes += int64_t(text.size());
  for (const auto& sink : impl_->sinks) sink->write(step, values);
}

void MetricsLog::sync() {
  if (::fsync(impl_->file) != 0) impl_->fail("can't be brought to the disk");
}

int64_t MetricsLog::bytes() const { return impl_->bytes; }

}  // namespace longstraw::training

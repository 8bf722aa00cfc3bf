// Times the chunked delta rule or Mamba-2 recurrence, forward and backward, on the inputs of a tensor file, beside which
// bench/mixers.py runs transformers on the same. Prints one line of JSON; keeps the results where asked to.

#include "core/base/errors.h"
#include "core/device/device.h"
#include "core/device/memory_meter.h"
#include "core/model/checkpoint.h"
#include "core/model/safetensors.h"
#include "longstraw/delta_rule.h"
#include "longstraw/state_space.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <ctime>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace longstraw {
namespace {

using Tensors = std::map<std::string, at::Tensor>;

Tensors read(const std::string& path) {
  const core::model::SafetensorsFile file(path);
  Tensors tensors;
  for (const auto& tensor : file.tensors()) tensors[tensor.name] = core::model::read_tensor(file, tensor);
  return tensors;
}

const at::Tensor& need(const Tensors& tensors, const std::string& name) {
  const auto found = tensors.find(name);
  if (found == tensors.end()) throw FormatError(fmt::format("the inputs have no {}", name));
  return found->second;
}

void write(const std::string& path, const Tensors& tensors) {
  std::vector<core::model::StoredTensor> stored;
  for (const auto& [name, tensor] : tensors) {
    stored.push_back({name,
                      core::model::stored_dtype(tensor.scalar_type()),
                      tensor.sizes().vec(),
                      {static_cast<const std::byte*>(tensor.const_data_ptr()), size_t(tensor.nbytes())}});
  }
  core::model::write_safetensors(path, stored);
}

// What is timed: the forward pass alone, and both.
struct Mixer {
  std::function<void()> forward;
  std::function<Tensors()> both;
};

Mixer delta_rule(const Tensors& in, int64_t chunk) {
  const DeltaRuleInput input{
      need(in, "query"), need(in, "key"), need(in, "value"), need(in, "log_decay"), need(in, "beta"), need(in, "state"), {}};
  const at::Tensor grad_out = need(in, "grad_out"), grad_end = need(in, "grad_end_state");
  return {[=] { delta_rule_forward(input, chunk, /*for_backward=*/false); },
          [=] {
            const DeltaRuleOutput out = delta_rule_forward(input, chunk);
            const DeltaRuleGradients g = delta_rule_backward(input, out, grad_out, grad_end, chunk);
            return Tensors{{"out", out.out_NTHv}, {"end_state", out.end_state_NHkv}, {"query", g.query}, {"key", g.key},
                           {"value", g.value},    {"log_decay", g.log_decay},        {"beta", g.beta},   {"state", g.state}};
          }};
}

Mixer state_space(const Tensors& in, int64_t chunk) {
  const StateSpaceInput input{need(in, "x"), need(in, "dt"), need(in, "a"), need(in, "b"), need(in, "c"), need(in, "state"), {}};
  const at::Tensor grad_out = need(in, "grad_out"), grad_end = need(in, "grad_end_state");
  return {
      [=] { state_space_forward(input, chunk, /*for_backward=*/false); },
      [=] {
        const StateSpaceOutput out = state_space_forward(input, chunk);
        const StateSpaceGradients g = state_space_backward(input, out, grad_out, grad_end, chunk);
        return Tensors{
            {"out", out.out_NTHp}, {"end_state", out.end_state_NHpn}, {"x", g.x}, {"dt", g.dt}, {"a", g.a}, {"b", g.b}, {"c", g.c},
            {"state", g.state}};
      }};
}

struct Timed {
  std::vector<double> seconds;
  std::vector<double> cpu_seconds;  // of all threads: other programs on the machine change it less
  int64_t peak_bytes = 0;           // above the inputs, results included
};

Timed time_it(int repeat, const std::function<void()>& work) {
  const core::device::MemoryMeter meter(at::kCPU);
  using Clock = std::chrono::steady_clock;
  Timed timed;
  for (int i = 0; i <= repeat; ++i) {  // the first run warms up
    meter.reset_peak();
    const int64_t before = meter.live_bytes();
    const std::clock_t cpu_start = std::clock();
    const auto start = Clock::now();
    work();
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    if (i > 0) {
      timed.seconds.push_back(seconds);
      timed.cpu_seconds.push_back(double(std::clock() - cpu_start) / CLOCKS_PER_SEC);
    }
    timed.peak_bytes = meter.peak_bytes() - before;
  }
  return timed;
}

int run(const std::string& kind, const std::string& inputs, int threads, int repeat, int64_t chunk, const std::string& results) {
  core::device::set_up_determinism(threads);
  const Tensors in = read(inputs);
  const Mixer mixer = kind == "delta_rule" ? delta_rule(in, chunk) : state_space(in, chunk);
  const Timed forward = time_it(repeat, mixer.forward), both = time_it(repeat, [&] { mixer.both(); });
  if (!results.empty()) write(results, mixer.both());
  const auto list = [](const std::vector<double>& values) { return fmt::format("[{:.6f}]", fmt::join(values, ", ")); };
  fmt::print("{{\"forward\": {}, \"both\": {}, \"forward_cpu\": {}, \"both_cpu\": {}, ", list(forward.seconds), list(both.seconds),
             list(forward.cpu_seconds), list(both.cpu_seconds));
  fmt::print("\"forward_peak_bytes\": {}, \"peak_bytes\": {}, \"chunk\": {}, \"threads\": {}}}\n", forward.peak_bytes,
             both.peak_bytes, chunk, at::get_num_threads());
  return 0;
}

}  // namespace
}  // namespace longstraw

int main(int argc, char** argv) {
  longstraw::core::device::install_counting_allocator();
  const std::string kind = argc > 1 ? argv[1] : "";
  const int threads = argc > 3 ? std::atoi(argv[3]) : 0, repeat = argc > 4 ? std::atoi(argv[4]) : 3;
  const int64_t chunk = argc > 5 ? std::atoll(argv[5]) : 64;
  if (argc < 3 || argc > 7 || (kind != "delta_rule" && kind != "state_space") || threads < 0 || repeat < 1 || chunk < 1) {
    fmt::print(
        stderr,
        "usage: longstraw_bench_mixers delta_rule|state_space INPUTS.safetensors [THREADS [REPEAT [CHUNK [RESULTS.safetensors]]]]\n");
    return 2;
  }
  try {
    return longstraw::run(kind, argv[2], threads, repeat, chunk, argc > 6 ? argv[6] : "");
  } catch (const longstraw::Error& error) {
    fmt::print(stderr, "longstraw_bench_mixers: {}\n", error.what());
    return int(error.exit_status());
  }
}

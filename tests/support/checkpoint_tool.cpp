// For tests in Python: reads a checkpoint, perhaps an adapter, and writes what was asked for.
//   checkpoint_tool save SOURCE OUT DTYPE [changed]         weights, each doubled where they are to be changed
//   checkpoint_tool merge SOURCE OUT DTYPE ADAPTER          weights merged with an adapter
//   checkpoint_tool adapter SOURCE OUT DTYPE ADAPTER        an adapter as we write it
//   checkpoint_tool new_adapter SOURCE OUT DTYPE R ALPHA TARGET...   a new one, with B as A is: drawn from a seed
#include "core/base/errors.h"
#include "core/device/device.h"
#include "core/model/lora.h"
#include "core/model/save.h"

#include <ATen/ATen.h>

#include <cstdio>
#include <string>
#include <vector>

namespace {

using namespace longstraw;
using namespace longstraw::core::model;

void new_adapter(Decoder& decoder, const std::vector<std::string>& arguments) {
  LoraConfig lora;
  lora.r = std::stoll(arguments.at(4));
  lora.lora_alpha = std::stod(arguments.at(5));
  lora.target_modules.assign(arguments.begin() + 6, arguments.end());
  add_lora(decoder, lora);
  at::manual_seed(7);
  const at::NoGradGuard no_grad;
  for (const auto& parameter : decoder.parameters()) {
    if (parameter->name.find("lora_B") != std::string::npos) parameter->value.normal_(0.0, 0.2);
  }
}

int run(const std::vector<std::string>& arguments) {
  const std::string& what = arguments.at(0);
  const auto decoder = load_decoder(arguments.at(1), core::device::parse_dtype(arguments.at(3)), at::kCPU);
  if (what == "save") {
    const at::NoGradGuard no_grad;
    if (arguments.size() > 4) {
      for (const auto& weight : decoder->weights()) weight->value.mul_(1.25);
    }
    save_checkpoint(*decoder, arguments.at(1), arguments.at(2));
    return 0;
  }
  if (what == "new_adapter") {
    new_adapter(*decoder, arguments);
  } else {
    LoraConfig lora;
    lora.adapter = arguments.at(4);
    add_lora(*decoder, lora);
  }
  if (what == "merge") save_checkpoint(*decoder, arguments.at(1), arguments.at(2));
  else save_adapter(*decoder, arguments.at(1), arguments.at(2));
  return 0;
}

}  // namespace

int main(int count, char** values) {
  try {
    return run({values + 1, values + count});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}

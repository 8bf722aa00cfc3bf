#pragma once
// A folder for one test's files, gone when the test ends.

#include "core/base/errors.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace longstraw::testing_support {

class Scratch {
 public:
  Scratch() {
    std::string pattern = (std::filesystem::temp_directory_path() / "longstraw-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  std::filesystem::path path(const std::string& name) const { return folder_ / name; }
  std::filesystem::path file(const std::string& name, const std::string& content) const {
    std::ofstream(path(name), std::ios::binary) << content;
    return path(name);
  }

 private:
  std::filesystem::path folder_;
};

// The message of the error of type E that `action` throws, without the folder's name.
template <class E, class Action>
std::string message_of(Action action) {
  try {
    action();
  } catch (const E& error) {
    std::string text = error.what();
    const std::string folder = std::filesystem::temp_directory_path().string() + "/longstraw-";
    for (std::size_t at; (at = text.find(folder)) != std::string::npos;) text.erase(at, folder.size() + 7);
    return text;
  }
  return "(no error)";
}

}  // namespace longstraw::testing_support

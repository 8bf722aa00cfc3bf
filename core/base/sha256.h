#pragma once
// SHA-256 of data that comes in pieces, and of a file without loading it (libcrypto).

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

namespace longstraw {

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  Sha256& operator=(Sha256&&) noexcept;

  void update(const void* bytes, std::size_t count);
  void update(std::string_view text) { update(text.data(), text.size()); }
  // 64 lower-case hexadecimal digits over all that was given; the object then starts anew.
  std::string hex();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Throws FormatError if the file can't be opened, IoError if reading it fails.
std::string sha256_of_file(const std::filesystem::path& path);

}  // namespace longstraw

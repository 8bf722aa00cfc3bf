#include "core/base/sha256.h"

#include "core/base/errors.h"

#include <fmt/format.h>
#include <openssl/evp.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <vector>

namespace longstraw {
namespace {

void require(int succeeded) {
  if (succeeded != 1) throw IoError("SHA-256: libcrypto refused to compute it");
}

}  // namespace

struct Sha256::State {
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context{EVP_MD_CTX_new(), EVP_MD_CTX_free};
};

Sha256::Sha256() : state_(std::make_unique<State>()) { require(EVP_DigestInit_ex(state_->context.get(), EVP_sha256(), nullptr)); }
Sha256::~Sha256() = default;
Sha256::Sha256(Sha256&&) noexcept = default;
Sha256& Sha256::operator=(Sha256&&) noexcept = default;

void Sha256::update(const void* bytes, std::size_t count) { require(EVP_DigestUpdate(state_->context.get(), bytes, count)); }

std::string Sha256::hex() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned int size = 0;
  require(EVP_DigestFinal_ex(state_->context.get(), digest.data(), &size));
  require(EVP_DigestInit_ex(state_->context.get(), EVP_sha256(), nullptr));
  std::string text;
  for (unsigned int i = 0; i < size; ++i) text += fmt::format("{:02x}", digest[i]);
  return text;
}

std::string sha256_of_file(const std::filesystem::path& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
  if (!file) throw FormatError(fmt::format("{}: can't be read: {}", path.string(), std::strerror(errno)));
  Sha256 sha;
  std::vector<char> buffer(1 << 20);
  while (const std::size_t count = std::fread(buffer.data(), 1, buffer.size(), file.get())) {
    sha.update(buffer.data(), count);
  }
  if (std::ferror(file.get())) throw IoError(fmt::format("{}: reading failed: {}", path.string(), std::strerror(errno)));
  return sha.hex();
}

}  // namespace longstraw

#include "core/model/sha256.h"

#include "core/base/errors.h"

#include <fmt/format.h>
#include <openssl/evp.h>

#include <array>

namespace longstraw::core::model {

namespace {
void require(int ok) {
  if (ok != 1) throw IoError("SHA-256: OpenSSL refused");
}
}  // namespace

void Sha256::Free::operator()(evp_md_ctx_st* context) const { EVP_MD_CTX_free(context); }

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  require(context_ ? EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) : 0);
}

void Sha256::update(std::span<const std::byte> bytes) {
  require(EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()));
}
void Sha256::update(std::string_view text) { require(EVP_DigestUpdate(context_.get(), text.data(), text.size())); }

std::string Sha256::hex() {
  std::array<unsigned char, 32> digest{};
  require(EVP_DigestFinal_ex(context_.get(), digest.data(), nullptr));
  return fmt::format("{:02x}", fmt::join(digest, ""));
}

}  // namespace longstraw::core::model

#pragma once
// SHA-256 of a stream of bytes, by OpenSSL, which uses the processor's SHA instructions: a checkpoint is hashed at the
// speed of memory, where a portable implementation would dominate the start.

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

struct evp_md_ctx_st;

namespace longstraw::core::model {

class Sha256 {
 public:
  Sha256();
  void update(std::span<const std::byte> bytes);
  void update(std::string_view text);
  std::string hex();  // of all bytes so far, 64 lower-case digits; the object is used up then

 private:
  struct Free {
    void operator()(evp_md_ctx_st* context) const;
  };
  std::unique_ptr<evp_md_ctx_st, Free> context_;
};

}  // namespace longstraw::core::model

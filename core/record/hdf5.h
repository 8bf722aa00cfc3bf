#pragma once
// Thin ownership over the HDF5 C library: every identifier has an owner, every failure is an exception, nothing is
// printed by the library itself. Only core/record includes this header.
//
// A failure while writing is an IoError (a full disk), while reading a FormatError (a damaged file); the message is
// `where` followed by HDF5's own innermost reason.

#include <hdf5.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace longstraw::core::record::hdf5 {

enum class Doing { kReading, kWriting };

// Turns HDF5's own error printing off, for the whole process. Idempotent.
void silence();

// Throws FormatError (reading) or IoError (writing).
[[noreturn]] void fail(Doing doing, const std::string& where);

// An HDF5 identifier with the function that closes it.
class Handle {
 public:
  using Close = herr_t (*)(hid_t);

  Handle() = default;
  // Takes ownership; a negative id is a failure.
  Handle(hid_t id, Close close, Doing doing, const std::string& where) : id_(id), close_(close) {
    if (id < 0) fail(doing, where);
  }
  Handle(Handle&& other) noexcept : id_(std::exchange(other.id_, -1)), close_(other.close_) {}
  Handle& operator=(Handle&& other) noexcept {
    if (this != &other) {
      reset();
      id_ = std::exchange(other.id_, -1);
      close_ = other.close_;
    }
    return *this;
  }
  ~Handle() { reset(); }

  hid_t id() const { return id_; }
  explicit operator bool() const { return id_ >= 0; }
  void reset();
  // Closes now and tells whether that worked (closing a file writes to it).
  herr_t close();

 private:
  hid_t id_ = -1;
  Close close_ = nullptr;
};

inline void check(herr_t result, Doing doing, const std::string& where) {
  if (result < 0) fail(doing, where);
}

// --- groups and links
Handle create_group(hid_t parent, const std::string& name, const std::string& where);
Handle open_group(hid_t parent, const std::string& name, const std::string& where);
bool exists(hid_t parent, const std::string& name);
// Names of the links of a group, in increasing order of name.
std::vector<std::string> link_names(hid_t group, const std::string& where);

// --- attributes (scalars; text is UTF-8)
void write_attribute(hid_t object, const std::string& name, const std::string& value, const std::string& where);
void write_attribute(hid_t object, const std::string& name, std::int64_t value, const std::string& where);
void write_attribute(hid_t object, const std::string& name, double value, const std::string& where);
bool has_attribute(hid_t object, const std::string& name);
std::vector<std::string> attribute_names(hid_t object, const std::string& where);
// Missing, or of another class (text, whole number, number): FormatError naming the attribute.
std::string read_text_attribute(hid_t object, const std::string& name, const std::string& where);
std::int64_t read_int_attribute(hid_t object, const std::string& name, const std::string& where);
double read_double_attribute(hid_t object, const std::string& name, const std::string& where);

// --- whole one-dimensional datasets (small ones: responses, sketches, rewards)
void write_array(hid_t parent, const std::string& name, const std::vector<std::int64_t>& values, const std::string& where);
void write_array(hid_t parent, const std::string& name, const std::vector<double>& values, const std::string& where);
void write_array(hid_t parent, const std::string& name, const std::vector<std::uint8_t>& values, const std::string& where);
void write_array(hid_t parent, const std::string& name, const std::vector<std::string>& values, const std::string& where);
std::vector<std::int64_t> read_ints(hid_t parent, const std::string& name, const std::string& where);
std::vector<double> read_doubles(hid_t parent, const std::string& name, const std::string& where);
std::vector<std::string> read_texts(hid_t parent, const std::string& name, const std::string& where);

// A dataset's shape.
std::vector<std::int64_t> shape_of(hid_t dataset, const std::string& where);

// UTF-8 text of `length` bytes, padded with zeros, or of H5T_VARIABLE length.
Handle text_type(std::size_t length, Doing doing, const std::string& where);

}  // namespace longstraw::core::record::hdf5

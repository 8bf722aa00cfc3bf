#include "core/record/hdf5.h"

#include <algorithm>

#include "core/base/errors.h"

namespace longstraw::core::record::hdf5 {
namespace {

herr_t keep_description(unsigned, const H5E_error2_t* error, void* out) {
  if (error->desc != nullptr && *error->desc != '\0') *static_cast<std::string*>(out) = error->desc;
  return 0;
}

// The deepest entry of the error stack names the cause; the others only repeat the call chain.
std::string innermost_reason() {
  std::string reason;
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_DOWNWARD, &keep_description, &reason);
  H5Eclear2(H5E_DEFAULT);
  return reason.empty() ? "unknown HDF5 error" : reason;
}

Handle scalar_space(Doing doing, const std::string& where) { return {H5Screate(H5S_SCALAR), &H5Sclose, doing, where}; }

void write_scalar(hid_t object, const std::string& name, hid_t file_type, hid_t memory_type, const void* value,
                  const std::string& where) {
  const auto doing = Doing::kWriting;
  const std::string place = where + ": attribute " + name;
  const Handle space = scalar_space(doing, place);
  const Handle attribute(H5Acreate2(object, name.c_str(), file_type, space.id(), H5P_DEFAULT, H5P_DEFAULT), &H5Aclose, doing,
                         place);
  check(H5Awrite(attribute.id(), memory_type, value), doing, place);
}

// Opens a scalar attribute of the wanted class, or says what is there instead.
Handle open_scalar(hid_t object, const std::string& name, std::initializer_list<H5T_class_t> wanted, const char* wanted_name,
                   const std::string& where) {
  const std::string place = where + ": attribute " + name;
  if (!has_attribute(object, name)) throw FormatError(place + ": missing");
  Handle attribute(H5Aopen(object, name.c_str(), H5P_DEFAULT), &H5Aclose, Doing::kReading, place);
  const Handle type(H5Aget_type(attribute.id()), &H5Tclose, Doing::kReading, place);
  const Handle space(H5Aget_space(attribute.id()), &H5Sclose, Doing::kReading, place);
  const bool class_fits = std::find(wanted.begin(), wanted.end(), H5Tget_class(type.id())) != wanted.end();
  if (!class_fits || H5Sget_simple_extent_npoints(space.id()) != 1) {
    throw FormatError(place + ": expected one " + wanted_name);
  }
  return attribute;
}

template <class T>
void write_numbers(hid_t parent, const std::string& name, const std::vector<T>& values, hid_t file_type, hid_t memory_type,
                   const std::string& where) {
  const auto doing = Doing::kWriting;
  const std::string place = where + "/" + name;
  const hsize_t count = values.size();
  const Handle space(H5Screate_simple(1, &count, nullptr), &H5Sclose, doing, place);
  const Handle dataset(H5Dcreate2(parent, name.c_str(), file_type, space.id(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT), &H5Dclose,
                       doing, place);
  if (!values.empty()) check(H5Dwrite(dataset.id(), memory_type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()), doing, place);
}

Handle open_dataset(hid_t parent, const std::string& name, const std::string& place) {
  if (!exists(parent, name)) throw FormatError(place + ": missing");
  return {H5Dopen2(parent, name.c_str(), H5P_DEFAULT), &H5Dclose, Doing::kReading, place};
}

std::size_t length_of(hid_t dataset, const std::string& place) {
  const auto shape = shape_of(dataset, place);
  if (shape.size() != 1) throw FormatError(place + ": expected one dimension, got " + std::to_string(shape.size()));
  return static_cast<std::size_t>(shape[0]);
}

template <class T>
std::vector<T> read_numbers(hid_t parent, const std::string& name, hid_t memory_type, std::initializer_list<H5T_class_t> wanted,
                            const std::string& where) {
  const std::string place = where + "/" + name;
  const Handle dataset = open_dataset(parent, name, place);
  const Handle type(H5Dget_type(dataset.id()), &H5Tclose, Doing::kReading, place);
  if (std::find(wanted.begin(), wanted.end(), H5Tget_class(type.id())) == wanted.end()) {
    throw FormatError(place + ": unexpected element type");
  }
  std::vector<T> values(length_of(dataset.id(), place));
  if (!values.empty()) {
    check(H5Dread(dataset.id(), memory_type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()), Doing::kReading, place);
  }
  return values;
}

std::vector<std::string> read_fixed_texts(hid_t dataset, std::size_t count, hid_t file_type, const std::string& place) {
  const std::size_t width = H5Tget_size(file_type);
  const Handle type = text_type(width, Doing::kReading, place);
  check(H5Tset_cset(type.id(), H5Tget_cset(file_type)), Doing::kReading, place);  // h5py writes bytes as ASCII
  std::vector<char> bytes(count * width);
  check(H5Dread(dataset, type.id(), H5S_ALL, H5S_ALL, H5P_DEFAULT, bytes.data()), Doing::kReading, place);
  std::vector<std::string> texts(count);
  for (std::size_t i = 0; i < count; ++i) {
    const char* begin = bytes.data() + i * width;
    texts[i].assign(begin, std::find(begin, begin + width, '\0'));
  }
  return texts;
}

// Other writers (h5py by default) use strings of variable length.
std::vector<std::string> read_variable_texts(hid_t dataset, std::size_t count, hid_t file_type, const std::string& place) {
  const Handle type = text_type(H5T_VARIABLE, Doing::kReading, place);
  check(H5Tset_cset(type.id(), H5Tget_cset(file_type)), Doing::kReading, place);
  const Handle space(H5Dget_space(dataset), &H5Sclose, Doing::kReading, place);
  std::vector<char*> pointers(count, nullptr);
  check(H5Dread(dataset, type.id(), H5S_ALL, H5S_ALL, H5P_DEFAULT, pointers.data()), Doing::kReading, place);
  std::vector<std::string> texts(count);
  for (std::size_t i = 0; i < count; ++i) texts[i] = pointers[i] == nullptr ? "" : pointers[i];
  H5Dvlen_reclaim(type.id(), space.id(), H5P_DEFAULT, pointers.data());
  return texts;
}

}  // namespace

void silence() { H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr); }

void fail(Doing doing, const std::string& where) {
  const std::string message = where + ": " + innermost_reason();
  if (doing == Doing::kReading) throw FormatError(message);
  throw IoError(message);
}

void Handle::reset() { close(); }

herr_t Handle::close() {
  if (id_ < 0) return 0;
  return close_(std::exchange(id_, -1));
}

Handle create_group(hid_t parent, const std::string& name, const std::string& where) {
  const std::string place = where + "/" + name;
  return {H5Gcreate2(parent, name.c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT), &H5Gclose, Doing::kWriting, place};
}

Handle open_group(hid_t parent, const std::string& name, const std::string& where) {
  const std::string place = where + "/" + name;
  if (!exists(parent, name)) throw FormatError(place + ": missing");
  return {H5Gopen2(parent, name.c_str(), H5P_DEFAULT), &H5Gclose, Doing::kReading, place};
}

bool exists(hid_t parent, const std::string& name) { return H5Lexists(parent, name.c_str(), H5P_DEFAULT) > 0; }

std::vector<std::string> link_names(hid_t group, const std::string& where) {
  std::vector<std::string> names;
  const auto keep = [](hid_t, const char* name, const H5L_info_t*, void* out) -> herr_t {
    static_cast<std::vector<std::string>*>(out)->emplace_back(name);
    return 0;
  };
  check(H5Literate(group, H5_INDEX_NAME, H5_ITER_INC, nullptr, keep, &names), Doing::kReading, where);
  return names;
}

Handle text_type(std::size_t length, Doing doing, const std::string& where) {
  Handle type(H5Tcopy(H5T_C_S1), &H5Tclose, doing, where);
  check(H5Tset_size(type.id(), length), doing, where);
  check(H5Tset_cset(type.id(), H5T_CSET_UTF8), doing, where);
  if (length != H5T_VARIABLE) check(H5Tset_strpad(type.id(), H5T_STR_NULLPAD), doing, where);
  return type;
}

void write_attribute(hid_t object, const std::string& name, const std::string& value, const std::string& where) {
  // Of variable length: h5py then gives text, not bytes.
  const Handle type = text_type(H5T_VARIABLE, Doing::kWriting, where);
  const char* pointer = value.c_str();
  write_scalar(object, name, type.id(), type.id(), &pointer, where);
}

void write_attribute(hid_t object, const std::string& name, std::int64_t value, const std::string& where) {
  write_scalar(object, name, H5T_STD_I64LE, H5T_NATIVE_INT64, &value, where);
}

void write_attribute(hid_t object, const std::string& name, double value, const std::string& where) {
  write_scalar(object, name, H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, &value, where);
}

bool has_attribute(hid_t object, const std::string& name) { return H5Aexists(object, name.c_str()) > 0; }

std::vector<std::string> attribute_names(hid_t object, const std::string& where) {
  std::vector<std::string> names;
  const auto keep = [](hid_t, const char* name, const H5A_info_t*, void* out) -> herr_t {
    static_cast<std::vector<std::string>*>(out)->emplace_back(name);
    return 0;
  };
  check(H5Aiterate2(object, H5_INDEX_NAME, H5_ITER_INC, nullptr, keep, &names), Doing::kReading, where);
  return names;
}

std::string read_text_attribute(hid_t object, const std::string& name, const std::string& where) {
  const std::string place = where + ": attribute " + name;
  const Handle attribute = open_scalar(object, name, {H5T_STRING}, "text", where);
  const Handle type(H5Aget_type(attribute.id()), &H5Tclose, Doing::kReading, place);
  if (H5Tis_variable_str(type.id()) > 0) {
    char* pointer = nullptr;
    check(H5Aread(attribute.id(), type.id(), &pointer), Doing::kReading, place);
    std::string text = pointer == nullptr ? "" : pointer;
    H5free_memory(pointer);
    return text;
  }
  std::string text(H5Tget_size(type.id()), '\0');
  check(H5Aread(attribute.id(), type.id(), text.data()), Doing::kReading, place);
  text.resize(std::min(text.find('\0'), text.size()));
  return text;
}

std::int64_t read_int_attribute(hid_t object, const std::string& name, const std::string& where) {
  const Handle attribute = open_scalar(object, name, {H5T_INTEGER, H5T_ENUM}, "whole number", where);
  std::int64_t value = 0;
  check(H5Aread(attribute.id(), H5T_NATIVE_INT64, &value), Doing::kReading, where + ": attribute " + name);
  return value;
}

double read_double_attribute(hid_t object, const std::string& name, const std::string& where) {
  const Handle attribute = open_scalar(object, name, {H5T_INTEGER, H5T_FLOAT}, "number", where);
  double value = 0;
  check(H5Aread(attribute.id(), H5T_NATIVE_DOUBLE, &value), Doing::kReading, where + ": attribute " + name);
  return value;
}

void write_array(hid_t parent, const std::string& name, const std::vector<std::int64_t>& values, const std::string& where) {
  write_numbers(parent, name, values, H5T_STD_I64LE, H5T_NATIVE_INT64, where);
}

void write_array(hid_t parent, const std::string& name, const std::vector<double>& values, const std::string& where) {
  write_numbers(parent, name, values, H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, where);
}

void write_array(hid_t parent, const std::string& name, const std::vector<std::uint8_t>& values, const std::string& where) {
  write_numbers(parent, name, values, H5T_STD_U8LE, H5T_NATIVE_UINT8, where);
}

void write_array(hid_t parent, const std::string& name, const std::vector<std::string>& values, const std::string& where) {
  std::size_t width = 1;
  for (const auto& value : values) width = std::max(width, value.size());
  std::vector<char> bytes(values.size() * width, '\0');
  for (std::size_t i = 0; i < values.size(); ++i) std::copy(values[i].begin(), values[i].end(), bytes.begin() + i * width);
  const Handle type = text_type(width, Doing::kWriting, where + "/" + name);
  const std::string place = where + "/" + name;
  const hsize_t count = values.size();
  const Handle space(H5Screate_simple(1, &count, nullptr), &H5Sclose, Doing::kWriting, place);
  const Handle dataset(H5Dcreate2(parent, name.c_str(), type.id(), space.id(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT), &H5Dclose,
                       Doing::kWriting, place);
  if (values.empty()) return;
  check(H5Dwrite(dataset.id(), type.id(), H5S_ALL, H5S_ALL, H5P_DEFAULT, bytes.data()), Doing::kWriting, place);
}

std::vector<std::int64_t> read_ints(hid_t parent, const std::string& name, const std::string& where) {
  return read_numbers<std::int64_t>(parent, name, H5T_NATIVE_INT64, {H5T_INTEGER, H5T_ENUM}, where);
}

std::vector<double> read_doubles(hid_t parent, const std::string& name, const std::string& where) {
  return read_numbers<double>(parent, name, H5T_NATIVE_DOUBLE, {H5T_INTEGER, H5T_FLOAT}, where);
}

std::vector<std::string> read_texts(hid_t parent, const std::string& name, const std::string& where) {
  const std::string place = where + "/" + name;
  const Handle dataset = open_dataset(parent, name, place);
  const Handle type(H5Dget_type(dataset.id()), &H5Tclose, Doing::kReading, place);
  if (H5Tget_class(type.id()) != H5T_STRING) throw FormatError(place + ": expected text");
  const std::size_t count = length_of(dataset.id(), place);
  if (count == 0) return {};
  if (H5Tis_variable_str(type.id()) > 0) return read_variable_texts(dataset.id(), count, type.id(), place);
  return read_fixed_texts(dataset.id(), count, type.id(), place);
}

std::vector<std::int64_t> shape_of(hid_t dataset, const std::string& where) {
  const Handle space(H5Dget_space(dataset), &H5Sclose, Doing::kReading, where);
  const int rank = H5Sget_simple_extent_ndims(space.id());
  if (rank < 0) fail(Doing::kReading, where);
  std::vector<hsize_t> dims(static_cast<std::size_t>(rank));
  if (rank > 0) H5Sget_simple_extent_dims(space.id(), dims.data(), nullptr);
  return {dims.begin(), dims.end()};
}

}  // namespace longstraw::core::record::hdf5

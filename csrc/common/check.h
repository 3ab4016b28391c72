// Errors and argument checks shared by every operator. Messages name the argument, what came and what was expected.
// std::invalid_argument reaches Python as ValueError, std::out_of_range as IndexError.
#pragma once

#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

namespace mori {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Sizes = std::vector<int64_t>;

// Text without iostreams: numbers must not follow the process's locale, and a library that was linked with its own copy of
// libstdc++ crashes when it formats a number through a stream.
inline std::string text(const char* part) { return part; }
inline std::string text(const std::string& part) { return part; }
inline std::string text(double part) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%g", part);
  return buffer;
}
template <class Integer, class = std::enable_if_t<std::is_integral_v<Integer>>>
std::string text(Integer part) {
  return std::to_string(part);
}

template <class Error = std::invalid_argument, class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error((std::string() + ... + text(parts)));
}

#define MORI_CHECK(condition, ...)                \
  do {                                            \
    if (!(condition)) ::mori::fail(__VA_ARGS__);  \
  } while (0)

// Torch's Python spelling: "float8_e4m3fn", not "Float8_e4m3fn".
inline std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Half: return "float16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Bool: return "bool";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Float8_e5m2: return "float8_e5m2";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case ScalarType::Float8_e5m2fnuz: return "float8_e5m2fnuz";
    case ScalarType::Float8_e4m3fnuz: return "float8_e4m3fnuz";
    case ScalarType::Float8_e8m0fnu: return "float8_e8m0fnu";
    default: return torch::headeronly::toString(dtype);
  }
}

inline Sizes sizes_of(const Tensor& t) { return Sizes(t.sizes().begin(), t.sizes().end()); }

inline std::string to_string(const Sizes& sizes) {
  std::string list;
  for (int64_t size : sizes) list += (list.empty() ? "" : ", ") + std::to_string(size);
  return "[" + list + "]";
}

// "float32 [8, 63]"
inline std::string describe(const Tensor& t) { return dtype_name(t.scalar_type()) + " " + to_string(sizes_of(t)); }

inline bool is_float(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half;
}

inline bool same_device(const Tensor& a, const Tensor& b) { return a.device() == b.device(); }

inline void check_same_device(const char* op, const char* name, const Tensor& t, const char* first_name, const Tensor& first) {
  MORI_CHECK(same_device(t, first), op, ": ", name, " must be on the same device as ", first_name);
}

inline void check_dtype(const char* op, const char* name, const Tensor& t, std::initializer_list<ScalarType> allowed) {
  std::string expected;
  for (ScalarType dtype : allowed) {
    if (t.scalar_type() == dtype) return;
    expected += (expected.empty() ? "" : " or ") + dtype_name(dtype);
  }
  fail(op, ": ", name, " must be ", expected, ", got ", describe(t));
}

inline void check_sizes(const char* op, const char* name, const Tensor& t, const Sizes& expected, const char* meaning) {
  MORI_CHECK(sizes_of(t) == expected, op, ": ", name, " must have shape ", to_string(expected), " (", meaning, "), got ", describe(t));
}

inline ScalarType check_out_dtype(const char* op, std::optional<ScalarType> requested, ScalarType fallback) {
  ScalarType dtype = requested.value_or(fallback);
  MORI_CHECK(is_float(dtype), op, ": out_dtype must be bfloat16, float16 or float32, got ", dtype_name(dtype));
  return dtype;
}

// An `out` of the caller's: right shape and dtype, dense, and apart from every input.
void check_out(const char* op, const char* name, const Tensor& out, const Sizes& sizes, std::initializer_list<ScalarType> allowed,
               std::initializer_list<const Tensor*> inputs);

// The tensor's values in row-major order: itself when it is dense, else a dense copy.
inline Tensor dense(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace mori

#include "check.h"

namespace mori {
namespace {

struct ByteRange {
  const char* begin;
  const char* end;
};

// Where the storage of a tensor begins. On the `mps` device that is a Metal buffer's handle, not an address: bytes past it mean
// something within the same buffer only.
const char* storage_of(const Tensor& t) {
  int64_t offset = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(t.get(), &offset));
  return static_cast<const char*>(t.const_data_ptr()) - offset * static_cast<int64_t>(t.element_size());
}

// The bytes a (possibly strided) tensor spans.
ByteRange span(const Tensor& t) {
  const char* data = static_cast<const char*>(t.const_data_ptr());
  if (t.numel() == 0) return {data, data};
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return {data, data + (last + 1) * t.element_size()};
}

}  // namespace

void check_out(const char* op, const char* name, const Tensor& out, const Sizes& sizes, std::initializer_list<ScalarType> allowed,
               std::initializer_list<const Tensor*> inputs) {
  check_dtype(op, name, out, allowed);
  check_sizes(op, name, out, sizes, "the result's shape");
  MORI_CHECK(out.is_contiguous(), op, ": ", name, " must be contiguous, got ", describe(out), " with other strides");
  const bool handles = out.device().type() == torch::headeronly::DeviceType::MPS;
  const ByteRange result = span(out);
  for (const Tensor* input : inputs) {
    if (input == nullptr) continue;
    check_same_device(op, name, out, "the inputs", *input);
    if (handles && storage_of(out) != storage_of(*input)) continue;
    const ByteRange source = span(*input);
    const bool empty = result.begin == result.end || source.begin == source.end;
    MORI_CHECK(empty || result.end <= source.begin || source.end <= result.begin, op, ": ", name, " must not share memory with an input");
  }
}

}  // namespace mori

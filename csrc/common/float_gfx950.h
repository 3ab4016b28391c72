// The float dtypes behind a void pointer.
#pragma once

#include <hip/hip_runtime_api.h>

namespace mori::gfx950 {

enum class Float : int { f32, bf16, f16 };

constexpr int bytes_of(Float type) { return type == Float::f32 ? 4 : 2; }

#if defined(__HIP__)

// Calls f with a value of the element type.
template <class F>
auto with_float(Float type, F f) {
  switch (type) {
    case Float::f32: return f(float{});
    case Float::bf16: return f(__bf16{});
    default: return f(_Float16{});
  }
}

#endif

}  // namespace mori::gfx950

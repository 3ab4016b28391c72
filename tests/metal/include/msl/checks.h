// What the compiler's instrumentation calls in a checked build.
#pragma once

#include "simdgroup.h"

#define MSL_HOOK inline __attribute__((used, visibility("hidden"), no_sanitize("coverage", "undefined")))

extern "C" {

#define MSL_ACCESS(bytes)                                                                                                       \
  MSL_HOOK void __sanitizer_cov_load##bytes(char* address) {                                                                    \
    if (address >= msl_runtime->shared_begin && address < msl_runtime->shared_end) msl_runtime->on_load(address, bytes);        \
  }                                                                                                                             \
  MSL_HOOK void __sanitizer_cov_store##bytes(char* address) {                                                                   \
    if (address >= msl_runtime->shared_begin && address < msl_runtime->shared_end) msl_runtime->on_store(address, bytes);       \
  }
MSL_ACCESS(1)
MSL_ACCESS(2)
MSL_ACCESS(4)
MSL_ACCESS(8)
MSL_ACCESS(16)
#undef MSL_ACCESS

struct MslSourceLocation {
  const char* file;
  unsigned line, column;
};
#define MSL_UNDEFINED(check, message) \
  MSL_HOOK void __ubsan_handle_##check##_abort(MslSourceLocation* at) { msl_runtime->fail(message, int(at->line)); }
MSL_UNDEFINED(type_mismatch_v1, "misaligned access")
MSL_UNDEFINED(out_of_bounds, "array index out of bounds")
MSL_UNDEFINED(add_overflow, "signed overflow in an addition")
MSL_UNDEFINED(sub_overflow, "signed overflow in a subtraction")
MSL_UNDEFINED(mul_overflow, "signed overflow in a multiplication")
MSL_UNDEFINED(negate_overflow, "signed overflow in a negation")
MSL_UNDEFINED(divrem_overflow, "division by zero, or its overflow")
MSL_UNDEFINED(shift_out_of_bounds, "shift by a negative count or by too many bits")
MSL_UNDEFINED(float_cast_overflow, "conversion of a float beyond the integer's range")
#undef MSL_UNDEFINED

}  // extern "C"

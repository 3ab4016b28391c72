// Calls a kernel: Python knows the attributes and buffer indices of its parameters, deduction knows their types.
#pragma once

#include "simdgroup.h"

namespace msl {

// The order is that of ATTRIBUTES in source.py, after kBuffer.
enum class Source : int {
  kBuffer,
  kPositionInGrid,
  kPositionInThreadgroup,
  kThreadgroupPosition,
  kThreadsPerThreadgroup,
  kThreadsPerGrid,
  kThreadgroupsPerGrid,
  kIndexInThreadgroup,
  kIndexInSimdgroup,
  kSimdgroup,
  kSimdgroups,
  kThreadsPerSimdgroup
};
struct Parameter {
  Source source;
  int buffer;
};

// What a buffer parameter points to, for the checks in emulator.py.
struct BufferType {
  int elements;      // of a reference; 0 for a pointer
  int element_size;  // of a scalar or of a vector's element; else of the struct
  char element;      // 'f' float, 'b' bfloat, 'i' integer, 's' struct
  char is_const;
};

template <class P>
constexpr BufferType buffer_type() {
  using Pointee = __remove_pointer(__remove_reference_t(P));
  using T = value_type<Pointee>;
  using E = typename vector<T>::element;
  if constexpr (!__is_pointer(P) && !__is_reference(P)) {
    return {};
  } else {
    constexpr char kind = is_same<E, bfloat> ? 'b' : is_float<E> ? 'f' : is_integer<E> ? 'i' : 's';
    constexpr bool is_const = __is_const(typename remove_address_space<Pointee>::type);
    return {__is_reference(P) ? int(sizeof(T) / sizeof(E)) : 0, int(sizeof(E)), kind, is_const};
  }
}

inline unsigned scalar_value(Source source) {
  const Lane& lane = *msl_runtime->lane;
  switch (source) {
    case Source::kPositionInGrid: return lane.position_in_grid[0];
    case Source::kPositionInThreadgroup: return lane.position_in_threadgroup[0];
    case Source::kThreadgroupPosition: return lane.threadgroup_position[0];
    case Source::kThreadsPerThreadgroup: return lane.threads_per_threadgroup[0];
    case Source::kThreadsPerGrid: return lane.threads_per_grid[0];
    case Source::kThreadgroupsPerGrid: return lane.threadgroups_per_grid[0];
    case Source::kIndexInThreadgroup: return lane.index_in_threadgroup;
    case Source::kIndexInSimdgroup: return lane.index_in_simdgroup;
    case Source::kSimdgroup: return lane.simdgroup;
    case Source::kSimdgroups: return lane.simdgroups;
    case Source::kThreadsPerSimdgroup: return kSimdWidth;
    case Source::kBuffer: return 0;
  }
}
inline const unsigned* vector_value(Source source) {
  const Lane& lane = *msl_runtime->lane;
  switch (source) {
    case Source::kPositionInGrid: return lane.position_in_grid;
    case Source::kPositionInThreadgroup: return lane.position_in_threadgroup;
    case Source::kThreadgroupPosition: return lane.threadgroup_position;
    case Source::kThreadsPerThreadgroup: return lane.threads_per_threadgroup;
    case Source::kThreadsPerGrid: return lane.threads_per_grid;
    case Source::kThreadgroupsPerGrid: return lane.threadgroups_per_grid;
    default: return nullptr;  // refused in source.py
  }
}

template <class P>
inline P argument(const Parameter& parameter, void** buffers) {
  if constexpr (__is_pointer(P)) {
    return (P)buffers[parameter.buffer];
  } else if constexpr (__is_reference(P)) {
    return *(__remove_reference_t(P)*)buffers[parameter.buffer];
  } else {
    using E = typename vector<P>::element;
    static_assert(is_same<E, uint> || is_same<E, ushort>, "an attribute's parameter is ushort, uint or a vector of them");
    if constexpr (vector<P>::size == 1) {
      return P(scalar_value(parameter.source));
    } else {
      const unsigned* value = vector_value(parameter.source);
      if (!value) msl_runtime->fail("this attribute is a scalar", 0);
      P result;
      for (int i = 0; i < vector<P>::size; i++) result[i] = E(value[i]);
      return result;
    }
  }
}

template <size_t... I>
struct indices {};
template <class T, T... I>
struct make_indices {
  using type = indices<I...>;
};

template <class... P, size_t... I>
inline void call(void (*function)(P...), const Parameter* parameters, void** buffers, indices<I...>) {
  function(argument<P>(parameters[I], buffers)...);
}
template <class... P>
inline void call(void (*function)(P...), const Parameter* parameters, void** buffers) {
  call(function, parameters, buffers, typename __make_integer_seq<make_indices, size_t, sizeof...(P)>::type{});
}
template <class... P>
inline void describe(void (*)(P...), BufferType* types) {
  ((*types++ = buffer_type<P>()), ...);
}

}  // namespace msl

#define MSL_SECTION __attribute__((section("msl_threadgroup"), used, retain))
// `threadgroup float a[8];` as MSL_THREADGROUP(a, [8], float). One line, so that line numbers stay.
#define MSL_THREADGROUP(name, dimensions, ...)                                                                               \
  typedef __VA_ARGS__ msl_type_##name dimensions;                                                                            \
  static msl::ThreadgroupVariable msl_variable_##name MSL_SECTION = {__PRETTY_FUNCTION__, #name, sizeof(msl_type_##name),     \
                                                                     alignof(msl_type_##name), nullptr};                     \
  threadgroup msl_type_##name& name = *(threadgroup msl_type_##name*)msl_variable_##name.address;
// The first statement of a kernel, with the limit of its attribute max_total_threads_per_threadgroup, or 0.
#define MSL_KERNEL_BEGIN(max_threads) \
  if (msl_runtime->probe(__PRETTY_FUNCTION__, max_threads)) return

extern "C" {
extern msl::ThreadgroupVariable __start_msl_threadgroup[] __attribute__((weak, visibility("hidden")));
extern msl::ThreadgroupVariable __stop_msl_threadgroup[] __attribute__((weak, visibility("hidden")));
inline __attribute__((used, no_sanitize("coverage", "undefined"))) void msl_bind(msl::Runtime* runtime, msl::ThreadgroupVariable** begin,
                                                                                 msl::ThreadgroupVariable** end) {
  msl_runtime = runtime;
  *begin = __start_msl_threadgroup;
  *end = __stop_msl_threadgroup;
}
}

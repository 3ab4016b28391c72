// Barriers, and functions across the lanes of a simdgroup.
#pragma once

#include "math.h"
#include "runtime.h"

extern "C" __attribute__((visibility("hidden"))) inline msl::Runtime* msl_runtime = nullptr;

// For the emulator's own loops over registers: a checked build has no hooks there. They access shared memory by the two functions.
#define MSL_UNCHECKED __attribute__((noinline, no_sanitize("coverage", "undefined")))

namespace msl {

template <class Pointer>
inline auto load_shared(Pointer from) {
#ifdef MSL_CHECKED
  msl_runtime->on_load((const char*)from, sizeof *from);
#endif
  return *from;
}
template <class Pointer, class T>
inline void store_shared(Pointer to, T value) {
#ifdef MSL_CHECKED
  msl_runtime->on_store((const char*)to, sizeof *to);
#endif
  *to = value;
}

template <class Frame>
inline void collective(Site site, Frame& frame, Combine combine, unsigned simdgroups = 1) {
  msl_runtime->collective(site, simdgroups, &frame, combine);
}

// Every lane gives a value and receives `result(values, lanes, this lane)`.
template <class T, class F>
inline T exchange(Site site, T value, F) {
  collective(site, value, [](void** frames, unsigned lanes) MSL_UNCHECKED {
    T values[kSimdWidth];
    for (unsigned i = 0; i < lanes; i++) values[i] = *static_cast<T*>(frames[i]);
    for (unsigned i = 0; i < lanes; i++) *static_cast<T*>(frames[i]) = F{}(values, lanes, i);
  });
  return value;
}

// The lane that a shuffle reads; beyond the simdgroup's lanes the result is undefined in MSL, so the kernel must not do it.
inline unsigned source_lane(unsigned lane, unsigned lanes) {
  if (lane >= lanes) msl_runtime->fail("a shuffle reads a lane that does not exist", 0);
  return lane < lanes ? lane : 0;
}

template <class T>
struct Shuffle {
  T value;
  unsigned source;
};
template <class T>
inline T shuffle(Site site, T value, unsigned source) {
  Shuffle<T> frame{value, source};
  collective(site, frame, [](void** frames, unsigned lanes) MSL_UNCHECKED {
    T values[kSimdWidth];
    for (unsigned i = 0; i < lanes; i++) values[i] = static_cast<Shuffle<T>*>(frames[i])->value;
    for (unsigned i = 0; i < lanes; i++) {
      auto& to = *static_cast<Shuffle<T>*>(frames[i]);
      to.value = values[source_lane(to.source, lanes)];
    }
  });
  return frame.value;
}

struct Sum {
  template <class T>
  T operator()(T* values, unsigned lanes, unsigned) const {
    T v[kSimdWidth];
    for (unsigned i = 0; i < lanes; i++) v[i] = values[i];
    switch (msl_runtime->behaviour.simd_sum) {
      case SumOrder::kButterfly:
        for (unsigned step = kSimdWidth / 2; step; step /= 2)
          for (unsigned i = 0; i < step; i++)
            if (i + step < lanes) v[i] = v[i] + v[i + step];
        return v[0];
      case SumOrder::kAdjacent:
        for (unsigned step = 1; step < kSimdWidth; step *= 2)
          for (unsigned i = 0; i + step < lanes; i += 2 * step) v[i] = v[i] + v[i + step];
        return v[0];
      case SumOrder::kForward:
        for (unsigned i = 1; i < lanes; i++) v[0] = v[0] + v[i];
        return v[0];
      case SumOrder::kReverse:
        for (unsigned i = lanes - 1; i-- > 0;) v[i] = v[i] + v[i + 1];
        return v[0];
    }
  }
};
struct Max {
  template <class T>
  T operator()(T* values, unsigned lanes, unsigned) const {
    T result = values[0];
    for (unsigned i = 1; i < lanes; i++) result = metal::max(result, values[i]);
    return result;
  }
};
struct Min {
  template <class T>
  T operator()(T* values, unsigned lanes, unsigned) const {
    T result = values[0];
    for (unsigned i = 1; i < lanes; i++) result = metal::min(result, values[i]);
    return result;
  }
};
struct Or {
  int operator()(int* values, unsigned lanes, unsigned) const {
    int result = 0;
    for (unsigned i = 0; i < lanes; i++) result |= values[i];
    return result;
  }
};
struct PrefixSum {
  template <class T>
  T operator()(T* values, unsigned, unsigned lane) const {
    T sum = T(0);
    for (unsigned i = 0; i < lane; i++) sum = sum + values[i];
    return sum;
  }
};

}  // namespace msl

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

inline void threadgroup_barrier(mem_flags flags, msl::Site site = msl::here("threadgroup_barrier")) {
  msl_runtime->threadgroup_barrier(site, int(flags));
}
inline void simdgroup_barrier(mem_flags flags, msl::Site site = msl::here("simdgroup_barrier")) {
  msl_runtime->simdgroup_barrier(site, int(flags));
}

template <class T>
inline T simd_sum(T value, msl::Site site = msl::here("simd_sum")) {
  return msl::exchange(site, value, msl::Sum{});
}
template <class T>
inline T simd_max(T value, msl::Site site = msl::here("simd_max")) {
  return msl::exchange(site, value, msl::Max{});
}
template <class T>
inline T simd_min(T value, msl::Site site = msl::here("simd_min")) {
  return msl::exchange(site, value, msl::Min{});
}
template <class T>
inline T simd_prefix_exclusive_sum(T value, msl::Site site = msl::here("simd_prefix_exclusive_sum")) {
  return msl::exchange(site, value, msl::PrefixSum{});
}
template <class T>
inline T simd_prefix_inclusive_sum(T value, msl::Site site = msl::here("simd_prefix_inclusive_sum")) {
  return msl::exchange(site, value, msl::PrefixSum{}) + value;
}
inline bool simd_any(bool value, msl::Site site = msl::here("simd_any")) { return msl::exchange(site, int(value), msl::Or{}); }
inline bool simd_all(bool value, msl::Site site = msl::here("simd_all")) { return !msl::exchange(site, int(!value), msl::Or{}); }

template <class T>
inline T simd_shuffle(T value, ushort lane, msl::Site site = msl::here("simd_shuffle")) {
  return msl::shuffle(site, value, lane);
}
template <class T>
inline T simd_broadcast(T value, ushort lane, msl::Site site = msl::here("simd_broadcast")) {
  return msl::shuffle(site, value, lane);
}
template <class T>
inline T simd_broadcast_first(T value, msl::Site site = msl::here("simd_broadcast_first")) {
  return msl::shuffle(site, value, 0);
}
template <class T>
inline T simd_shuffle_xor(T value, ushort mask, msl::Site site = msl::here("simd_shuffle_xor")) {
  return msl::shuffle(site, value, msl_runtime->lane->index_in_simdgroup ^ mask);
}
// These two do not wrap around: the lanes without a source keep their value.
template <class T>
inline T simd_shuffle_up(T value, ushort delta, msl::Site site = msl::here("simd_shuffle_up")) {
  const unsigned lane = msl_runtime->lane->index_in_simdgroup;
  return msl::shuffle(site, value, lane >= delta ? lane - delta : lane);
}
template <class T>
inline T simd_shuffle_down(T value, ushort delta, msl::Site site = msl::here("simd_shuffle_down")) {
  const unsigned lane = msl_runtime->lane->index_in_simdgroup;
  return msl::shuffle(site, value, lane + delta < msl::kSimdWidth ? lane + delta : lane);
}

}  // namespace metal

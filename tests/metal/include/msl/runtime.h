// What a compiled shader and the runtime know of each other. Plain C++ for both sides; the shader is built without any library.
#pragma once

namespace msl {

constexpr unsigned kSimdWidth = 32;
constexpr unsigned kMaxThreads = 1024;  // in a threadgroup
constexpr unsigned kMaxSimdgroups = kMaxThreads / kSimdWidth;

// The values of the kernel arguments that a lane receives by attribute.
struct Lane {
  unsigned position_in_grid[3], position_in_threadgroup[3], threadgroup_position[3];
  unsigned threads_per_threadgroup[3], threads_per_grid[3], threadgroups_per_grid[3];
  unsigned index_in_threadgroup, index_in_simdgroup, simdgroup, simdgroups;
};

// A `threadgroup` variable of a kernel; the runtime gives it its address when the library is loaded.
struct ThreadgroupVariable {
  const char* function;  // the kernel, as its __PRETTY_FUNCTION__
  const char* name;
  unsigned long size, alignment;
  char* volatile address;
};

// Where a lane waits for others: the call and its line in the shader.
struct Site {
  const char* call;
  int line;
};
constexpr Site here(const char* call, int line = __builtin_LINE()) { return {call, line}; }

enum MemFlags { kMemNone = 0, kMemDevice = 1, kMemThreadgroup = 2 };

// Which of several legal behaviours of a GPU is emulated; see Settings in emulator.py.
enum class SumOrder : int { kButterfly, kAdjacent, kForward, kReverse };
enum class MatrixLayout : int { kBlocks, kRows };
enum class ProductOrder : int { kForward, kReverse };
enum class CooperativeLayout : int { kBlocks, kRuns, kStrided, kDeadSlots, kTransposed };

struct Behaviour {
  SumOrder simd_sum;
  MatrixLayout matrix_layout;
  ProductOrder product_order;
  CooperativeLayout cooperative_layout;
};

// Called once per collective with the frames of all lanes that take part, in lane order.
using Combine = void (*)(void** frames, unsigned lanes);

struct Runtime {
  const Lane* lane;  // the one that runs
  Behaviour behaviour;
  char *shared_begin, *shared_end;  // what the checker watches: threadgroup memory, and buffers
  // Waits for the lanes of this simdgroup (simdgroups == 1) or of the whole threadgroup; the last one runs `combine`.
  void (*collective)(Site site, unsigned simdgroups, void* frame, Combine combine);
  void (*threadgroup_barrier)(Site site, int mem_flags);
  void (*simdgroup_barrier)(Site site, int mem_flags);
  void (*on_load)(const char* address, unsigned bytes);
  void (*on_store)(const char* address, unsigned bytes);
  bool (*probe)(const char* function, int max_threads);  // true: only these two were wanted
  void (*fail)(const char* message, int line);
};

}  // namespace msl

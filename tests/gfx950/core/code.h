// What each mnemonic is: resolved once per program. An unknown mnemonic is an error.
#pragma once
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "mfma.h"
#include "salu.h"
#include "valu.h"

namespace gfx950 {

enum Class : u8 {
  kClassSalu,
  kClassValu,
  kClassPacked,
  kClassMfma,
  kClassLane,
  kClassSaveexec,
  kClassBranch,
  kClassWait,
  kClassBarrier,
  kClassEnd,
  kClassNop,
  kClassSleep,
  kClassCache,
  kClassSmem,
  kClassTime,
  kClassVmem,
  kClassDs,
  kClassPermute
};

enum Space : u8 { kBuffer, kGlobal, kFlat, kScratch };
enum Access : u8 { kLoad, kLoadLds, kStore, kAtomic, kAtomicReturn };
enum Fill : u8 { kZero, kSign, kLow, kHigh, kSignLow, kSignHigh };  // where a narrow value goes in its register
struct MemOp {
  const char* name;
  Access access;
  int bytes;
  Fill fill;
};
inline const MemOp kMemory[] = {
    {"load_ubyte", kLoad, 1, kZero},           {"load_sbyte", kLoad, 1, kSign},
    {"load_ushort", kLoad, 2, kZero},          {"load_sshort", kLoad, 2, kSign},
    {"load_ubyte_d16", kLoad, 1, kLow},        {"load_ubyte_d16_hi", kLoad, 1, kHigh},
    {"load_sbyte_d16", kLoad, 1, kSignLow},    {"load_sbyte_d16_hi", kLoad, 1, kSignHigh},
    {"load_short_d16", kLoad, 2, kLow},        {"load_short_d16_hi", kLoad, 2, kHigh},
    {"load_dword", kLoad, 4, kZero},           {"load_dwordx2", kLoad, 8, kZero},
    {"load_dwordx3", kLoad, 12, kZero},        {"load_dwordx4", kLoad, 16, kZero},
    {"load_lds_dword", kLoadLds, 4, kZero},    {"load_lds_dwordx3", kLoadLds, 12, kZero},
    {"load_lds_dwordx4", kLoadLds, 16, kZero}, {"store_byte", kStore, 1, kLow},
    {"store_short", kStore, 2, kLow},          {"store_byte_d16_hi", kStore, 1, kHigh},
    {"store_short_d16_hi", kStore, 2, kHigh},  {"store_dword", kStore, 4, kZero},
    {"store_dwordx2", kStore, 8, kZero},       {"store_dwordx3", kStore, 12, kZero},
    {"store_dwordx4", kStore, 16, kZero},
};

// Read-modify-write; `a` is memory, `b` the operand (cmpswap: the low half of `b` is new, the high half is compared).
struct AtomicOp {
  const char* name;
  int bytes;  // operand bytes in memory
  u64 (*run)(u64 a, u64 b);
};
inline u64 add_f32(u64 a, u64 b) { return bits(f32(a) + f32(b)); }
inline const AtomicOp kAtomics[] = {
    {"add", 4, [](u64 a, u64 b) { return u64(u32(a + b)); }},
    {"sub", 4, [](u64 a, u64 b) { return u64(u32(a - b)); }},
    {"swap", 4, [](u64, u64 b) { return b; }},
    {"or", 4, [](u64 a, u64 b) { return a | b; }},
    {"and", 4, [](u64 a, u64 b) { return a & b; }},
    {"xor", 4, [](u64 a, u64 b) { return a ^ b; }},
    {"umax", 4, [](u64 a, u64 b) { return std::max(a, b); }},
    {"umin", 4, [](u64 a, u64 b) { return std::min(a, b); }},
    {"smax", 4, [](u64 a, u64 b) { return sx(a) > sx(b) ? a : b; }},
    {"smin", 4, [](u64 a, u64 b) { return sx(a) < sx(b) ? a : b; }},
    {"inc", 4, [](u64 a, u64 b) { return a >= b ? 0 : a + 1; }},
    {"cmpswap", 4, [](u64 a, u64 b) { return a == b >> 32 ? b & 0xffffffff : a; }},
    {"add_f32", 4, add_f32},
    {"add_x2", 8, [](u64 a, u64 b) { return a + b; }},
    {"or_x2", 8, [](u64 a, u64 b) { return a | b; }},
    {"swap_x2", 8, [](u64, u64 b) { return b; }},
    {"umax_x2", 8, [](u64 a, u64 b) { return std::max(a, b); }},
    {"pk_add_bf16", 4,
     [](u64 a, u64 b) { return pk(to_bf16(from_bf16(a) + from_bf16(b)), to_bf16(from_bf16(a >> 16) + from_bf16(b >> 16))); }},
    {"pk_add_f16", 4, [](u64 a, u64 b) { return pk(to_f16(h16(a) + h16(b)), to_f16(h16(a >> 16) + h16(b >> 16))); }},
};

struct DsOp {
  const char* name;
  bool write;
  int bytes, parts, stride;  // `parts` pieces of `bytes`, at offset0 and offset1 times `stride` when there are two
  Fill fill;
};
inline const DsOp kDsOps[] = {
    {"ds_read_u8", false, 1, 1, 0, kZero},         {"ds_read_i8", false, 1, 1, 0, kSign},
    {"ds_read_u16", false, 2, 1, 0, kZero},        {"ds_read_i16", false, 2, 1, 0, kSign},
    {"ds_read_u8_d16", false, 1, 1, 0, kLow},      {"ds_read_u8_d16_hi", false, 1, 1, 0, kHigh},
    {"ds_read_u16_d16", false, 2, 1, 0, kLow},     {"ds_read_u16_d16_hi", false, 2, 1, 0, kHigh},
    {"ds_read_b32", false, 4, 1, 0, kZero},        {"ds_read_b64", false, 8, 1, 0, kZero},
    {"ds_read_b96", false, 12, 1, 0, kZero},       {"ds_read_b128", false, 16, 1, 0, kZero},
    {"ds_read2_b32", false, 4, 2, 4, kZero},       {"ds_read2_b64", false, 8, 2, 8, kZero},
    {"ds_read2st64_b32", false, 4, 2, 256, kZero}, {"ds_read2st64_b64", false, 8, 2, 512, kZero},
    {"ds_write_b8", true, 1, 1, 0, kLow},          {"ds_write_b16", true, 2, 1, 0, kLow},
    {"ds_write_b8_d16_hi", true, 1, 1, 0, kHigh},  {"ds_write_b16_d16_hi", true, 2, 1, 0, kHigh},
    {"ds_write_b32", true, 4, 1, 0, kZero},        {"ds_write_b64", true, 8, 1, 0, kZero},
    {"ds_write_b96", true, 12, 1, 0, kZero},       {"ds_write_b128", true, 16, 1, 0, kZero},
    {"ds_write2_b32", true, 4, 2, 4, kZero},       {"ds_write2_b64", true, 8, 2, 8, kZero},
    {"ds_write2st64_b32", true, 4, 2, 256, kZero}, {"ds_write2st64_b64", true, 8, 2, 512, kZero},
};

enum LaneOp : u8 {
  kReadfirstlane,
  kReadlane,
  kWritelane,
  kPermlane16Swap,
  kPermlane32Swap,
  kBpermute,
  kPermute,
  kMbcntLo,
  kMbcntHi
};
enum CacheOp : u8 { kWriteback, kInvalidate };
enum BranchOp : u8 { kAlways, kScc0, kScc1, kVccz, kVccnz, kExecz, kExecnz };

struct Simple {
  const char* name;
  Class cls;
  u8 what;
};
inline const Simple kSimple[] = {
    {"s_barrier", kClassBarrier, 0},
    {"s_endpgm", kClassEnd, 0},
    {"s_waitcnt", kClassWait, 0},
    {"s_nop", kClassNop, 0},
    {"s_setprio", kClassNop, 0},
    {"v_nop", kClassNop, 0},
    {"s_sleep", kClassSleep, 0},
    {"buffer_wbl2", kClassCache, kWriteback},
    {"buffer_inv", kClassCache, kInvalidate},
    {"s_branch", kClassBranch, kAlways},
    {"s_cbranch_scc0", kClassBranch, kScc0},
    {"s_cbranch_scc1", kClassBranch, kScc1},
    {"s_cbranch_vccz", kClassBranch, kVccz},
    {"s_cbranch_vccnz", kClassBranch, kVccnz},
    {"s_cbranch_execz", kClassBranch, kExecz},
    {"s_cbranch_execnz", kClassBranch, kExecnz},
    {"v_readfirstlane_b32", kClassLane, kReadfirstlane},
    {"v_readlane_b32", kClassLane, kReadlane},
    {"v_writelane_b32", kClassLane, kWritelane},
    {"v_permlane16_swap_b32", kClassLane, kPermlane16Swap},
    {"v_permlane32_swap_b32", kClassLane, kPermlane32Swap},
    {"ds_bpermute_b32", kClassPermute, kBpermute},
    {"ds_permute_b32", kClassPermute, kPermute},
    {"v_mbcnt_lo_u32_b32", kClassLane, kMbcntLo},
    {"v_mbcnt_hi_u32_b32", kClassLane, kMbcntHi},
    {"s_and_saveexec_b64", kClassSaveexec, 0},
    {"s_or_saveexec_b64", kClassSaveexec, 1},
    {"s_andn2_saveexec_b64", kClassSaveexec, 2},
    {"s_xor_saveexec_b64", kClassSaveexec, 3},
    {"s_load_dword", kClassSmem, 1},
    {"s_load_dwordx2", kClassSmem, 2},
    {"s_load_dwordx4", kClassSmem, 4},
    {"s_load_dwordx8", kClassSmem, 8},
    {"s_load_dwordx16", kClassSmem, 16},
    {"s_memrealtime", kClassTime, 2},
};

struct Packed {
  const char *name, *base;  // `base` applied to two halves: register pairs for fp32, register halves otherwise
};
inline const Packed kPacked[] = {
    {"v_pk_add_f32", "v_add_f32"},       {"v_pk_mul_f32", "v_mul_f32"},         {"v_pk_fma_f32", "v_fma_f32"},
    {"v_pk_add_f16", "v_add_f16"},       {"v_pk_mul_f16", "v_mul_f16"},         {"v_pk_fma_f16", "v_fma_f16"},
    {"v_pk_max_f16", "v_max_f16"},       {"v_pk_min_f16", "v_min_f16"},         {"v_pk_add_u16", "v_add_u16"},
    {"v_pk_mul_lo_u16", "v_mul_lo_u16"}, {"v_pk_lshlrev_b16", "v_lshlrev_b16"}, {"v_pk_lshrrev_b16", "v_lshrrev_b16"},
    {"v_pk_max_u16", "v_max_u16"},       {"v_pk_min_u16", "v_min_u16"}};

struct Code {
  const Inst* in;
  Class cls;
  u8 what;
  const AluOp* alu;
  const MfmaOp* mfma;
  const MemOp* mem;
  const AtomicOp* atomic;
  const DsOp* ds;
  Space space;
};

// The row of a table with this name, or null.
template <class T, size_t N>
const T* row(const T (&table)[N], std::string_view name) {
  for (const T& r : table)
    if (name == r.name) return &r;
  return nullptr;
}

// False if the mnemonic is unknown.
inline bool resolve(std::string_view name, const Inst* in, Code* c) {
  *c = Code{in, kClassNop, 0, nullptr, nullptr, nullptr, nullptr, nullptr, kGlobal};
  if (const Simple* s = row(kSimple, name)) return c->cls = s->cls, c->what = s->what, true;
  if ((c->alu = row(kSalu, name))) return c->cls = kClassSalu, true;
  if ((c->alu = row(kValu, name))) return c->cls = kClassValu, true;
  if (const Packed* p = row(kPacked, name)) return c->alu = row(kValu, p->base), c->cls = kClassPacked, true;
  if ((c->mfma = row(kMfma, name))) return c->cls = kClassMfma, true;
  if ((c->ds = row(kDsOps, name))) return c->cls = kClassDs, true;
  static const std::pair<std::string_view, Space> kSpaces[] = {
      {"buffer_", kBuffer}, {"global_", kGlobal}, {"flat_", kFlat}, {"scratch_", kScratch}};
  for (const auto& [prefix, space] : kSpaces) {
    if (name.substr(0, prefix.size()) != prefix) continue;
    const std::string_view rest = name.substr(prefix.size());
    c->cls = kClassVmem, c->space = space;
    if ((c->mem = row(kMemory, rest))) return true;
    if (rest.substr(0, 7) == "atomic_") return (c->atomic = row(kAtomics, rest.substr(7))) != nullptr;
  }
  return false;
}

}  // namespace gfx950

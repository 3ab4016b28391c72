// The decoded program, as the Python side builds it (interpreter.py holds the same two layouts as numpy dtypes).
#pragma once
#include <cstdint>

namespace gfx950 {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i32 = int32_t;
using i64 = int64_t;

constexpr int kLanes = 64;
constexpr int kVgprs = 512;  // v0..v255, then a0..a255
constexpr int kSgprs = 128;
constexpr int kVcc = 106, kM0 = 124, kExec = 126;

enum Kind : u8 { kNone, kSgpr, kVgpr, kInt, kFloat };
enum OperandMod : u8 { kNeg = 1, kAbs = 2, kSext = 4 };

struct Operand {
  u8 kind, count, mods, sel;  // sel: SDWA source select, 0..3 byte, 4..5 word, 6 whole register
  i32 index;
  u64 value;  // kInt: the integer, kFloat: the bits of a double
};

// Everything written after the operands, and what the parser resolved: an index into Inst::mod.
enum Mod {
  kTarget, kVmcnt, kLgkmcnt, kOffset, kOffset0, kOffset1, kOffen, kIdxen, kLds, kSc0, kSc1, kNt,
  kOpSel, kOpSelHi, kNegLo, kNegHi, kCbsz, kBlgp, kBitop3, kClamp, kOmod,
  kDpp, kDppArg, kRowMask, kBankMask, kBoundCtrl, kSdwa, kDstSel, kDstUnused, kOperands, kModCount
};
enum DppKind { kNoDpp, kQuadPerm, kRowShl, kRowShr, kRowRor, kRowMirror, kRowHalfMirror, kRowBcast, kRowNewbcast, kWaveShr };

struct Inst {
  Operand op[6];
  i32 mod[kModCount];
};

}  // namespace gfx950

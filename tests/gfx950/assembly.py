"""Reads AMDGPU assembly as LLVM prints it: instructions with their source lines, labels, and each kernel's metadata."""

import re
from dataclasses import dataclass, field, replace

import numpy as np

_REGISTER = re.compile(r"^([sva])(?:(\d+)|\[(\d+):(\d+)\])$")
_NAMED = {
    "vcc": (106, 2),
    "vcc_lo": (106, 1),
    "vcc_hi": (107, 1),
    "m0": (124, 1),
    "exec": (126, 2),
    "exec_lo": (126, 1),
    "exec_hi": (127, 1),
}
_INTEGER = re.compile(r"^-?(0x[0-9a-fA-F]+|\d+)$")
_SUFFIX = re.compile(r"_(e32|e64|sdwa|dpp|e64_dpp)$")


@dataclass(frozen=True)
class Operand:
    kind: str  # s, v (accumulation registers are v256 and up), int, float, off, label
    index: int = 0
    count: int = 1
    value: float | int | str = 0
    neg: bool = False
    abs: bool = False
    sext: bool = False


@dataclass(frozen=True)
class Instruction:
    opcode: str  # without the encoding suffix
    operands: tuple[Operand, ...]
    modifiers: dict[str, str]
    text: str
    line: int  # of the assembly
    source: str  # file:line of what it was compiled from, or ""

    @property
    def is_load(self) -> bool:
        return self.opcode.startswith(("buffer_load", "global_load", "flat_load"))

    @property
    def is_copy(self) -> bool:
        """From memory to LDS."""
        return self.is_load and ("lds" in self.modifiers or "_lds_" in self.opcode)


@dataclass
class Kernel:
    name: str
    instructions: list[Instruction]
    labels: dict[str, int]
    directives: dict[str, int] = field(default_factory=dict)  # .amdhsa_*
    arguments: list[tuple[int, int, str]] = field(default_factory=list)  # offset, size, value_kind
    metadata: dict[str, int] = field(default_factory=dict)  # vgpr_count, vgpr_spill_count, group_segment_fixed_size, ...
    encoded: np.ndarray | None = field(default=None, init=False, repr=False, compare=False)  # by interpreter.py

    def replaced(self, index: int, text: str) -> "Kernel":
        """The same kernel with one instruction written differently: for planting bugs."""
        old = self.instructions[index]
        new = replace(_instruction(text), line=old.line, source=old.source)
        return replace(self, instructions=self.instructions[:index] + [new] + self.instructions[index + 1 :])

    def find(self, opcode: str, contains: str = "") -> list[int]:
        return [i for i, x in enumerate(self.instructions) if x.opcode == opcode and contains in x.text]

    def loop(self) -> range:
        """The main loop: of the backward jumps over matrix instructions, the one with the most loads (empty if there is none)."""
        loops = []
        for i, x in enumerate(self.instructions):
            if x.opcode.startswith(("s_cbranch", "s_branch")) and self.labels[x.operands[0].value] <= i:
                loops.append(range(self.labels[x.operands[0].value], i + 1))

        def weight(r: range) -> tuple:
            body = [self.instructions[i] for i in r]
            mfma = sum(x.opcode.startswith("v_mfma") for x in body)
            return mfma > 0, sum(x.is_load for x in body), mfma, -len(r)

        return max(loops, key=weight, default=range(0))


def _operand(text: str) -> Operand:
    neg = abs_ = sext = False
    if text.startswith("-") and not _INTEGER.match(text) and not re.match(r"^-[\d.]", text):
        neg, text = True, text[1:]
    for name in ("neg", "abs", "sext"):
        if text.startswith(name + "("):
            neg, abs_, sext, text = neg or name == "neg", abs_ or name == "abs", name == "sext", text[len(name) + 1 : -1]
    if text.startswith("|"):
        abs_, text = True, text.strip("|")
    flags = {"neg": neg, "abs": abs_, "sext": sext}
    if match := _REGISTER.match(text):
        low = int(match[2] or match[3])
        count = 1 if match[2] else int(match[4]) - low + 1
        return Operand("s" if match[1] == "s" else "v", low + (256 if match[1] == "a" else 0), count, **flags)
    if text in _NAMED:
        return Operand("s", *_NAMED[text], **flags)
    if text in ("off", "null"):
        return Operand("off")
    if _INTEGER.match(text):
        return Operand("int", value=int(text, 0))
    try:
        return Operand("float", value=float(text), **flags)
    except ValueError:
        return Operand("label", value=text)


def _split(text: str) -> list[str]:
    """At commas outside brackets."""
    return [x.strip() for x in re.split(r",(?![^\[(]*[\])])", text) if x.strip()]


def _instruction(text: str, line: int = 0, source: str = "") -> Instruction:
    mnemonic, _, rest = text.partition(" ")
    rest, modifiers = rest.strip(), {}
    if suffix := _SUFFIX.search(mnemonic):
        mnemonic = mnemonic[: suffix.start()]
        modifiers["encoding"] = suffix[1]
    if mnemonic == "s_waitcnt":
        modifiers |= {m[1]: m[2] for m in re.finditer(r"(\w+)\((\d+)\)", rest)}
        if not modifiers:
            raise ValueError(f"line {line}: s_waitcnt without named counters: {text}")
        return Instruction(mnemonic, (), modifiers, text, line, source)
    parts = _split(rest)
    # The last operand is followed by modifiers, separated by spaces; an instruction may also have nothing but modifiers.
    if parts:
        head, *tail = re.split(r"\s+(?![^\[]*\])", parts[-1])
        if mnemonic in ("buffer_wbl2", "buffer_inv"):
            head, tail = None, [head, *tail]
        parts[-1:] = [head] if head else []
        for word in tail:
            key, colon, value = word.partition(":")
            modifiers[key] = value if colon else "1"
    return Instruction(mnemonic, tuple(_operand(p) for p in parts), modifiers, text, line, source)


def parse(text: str) -> dict[str, Kernel]:
    """All kernels of an assembly file. Text with no .amdhsa_kernel at all is taken as the body of one kernel named "main"."""
    lines = text.splitlines()
    names = re.findall(r"^\s*\.amdhsa_kernel\s+(\S+)", text, re.M)
    kernels = {n: Kernel(n, [], {}) for n in names} or {"main": Kernel("main", [], {})}
    files: dict[str, str] = {}
    current, source = (None, "") if names else (kernels["main"], "")
    for number, raw in enumerate(lines, 1):
        code = raw.split(";")[0].split("//")[0].strip()
        if not code:
            continue
        if match := re.match(r"^([\w.$]+):$", code):
            if match[1] in kernels:
                current = kernels[match[1]]
            elif current is not None:
                current.labels[match[1]] = len(current.instructions)
        elif code.startswith(".file"):
            match = re.match(r'\.file\s+(\d+)\s+(?:"([^"]*)"\s+)?"([^"]*)"', code)
            if match:
                files[match[1]] = match[3].rsplit("/", 1)[-1]
        elif code.startswith(".loc"):
            _, file, at = code.split()[:3]
            source = f"{files.get(file, '?')}:{at}"
        elif code.startswith(".amdhsa_kernel"):
            current, directives = None, kernels[code.split()[1]].directives
        elif code.startswith(".amdhsa_") and names and not code.startswith(".amdhsa_code_object"):
            key, value = code.split()[:2]
            directives[key[len(".amdhsa_") :]] = int(value, 0) if re.match(r"^\d|0x", value) else 0
        elif code.startswith(".amdgpu_metadata"):
            _metadata(lines[number:], kernels)
            break
        elif not code.startswith(".") and current is not None:
            current.instructions.append(_instruction(re.sub(r"\s+", " ", code), number, source))
    return kernels


def _metadata(lines: list[str], kernels: dict[str, Kernel]) -> None:
    """The kernels' entries of the YAML note, read by indentation: `  - .key: value` starts a kernel, `      - .key: value` an argument."""
    entry: dict[str, int | str] = {}
    arguments: list[dict[str, str]] = []

    def finish() -> None:
        if entry.get("name") in kernels:
            kernel = kernels[entry["name"]]
            kernel.metadata = {k: v for k, v in entry.items() if isinstance(v, int)}
            kernel.arguments = [(int(a["offset"]), int(a["size"]), a["value_kind"]) for a in arguments]

    for line in lines:
        if ".end_amdgpu_metadata" in line:
            break
        match = re.match(r"^( *)(- )?\.(\w+):\s*(.*)$", line)
        if not match:
            continue
        indent, dash, key, value = len(match[1]), match[2], match[3], match[4].strip("'\" ")
        if indent == 2 and dash:
            finish()
            entry, arguments = {}, []
        if indent >= 6:
            if dash:
                arguments.append({})
            arguments[-1][key] = value
        else:
            entry[key] = int(value) if re.match(r"^\d+$", value) else value
    finish()

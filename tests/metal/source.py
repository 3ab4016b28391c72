"""Metal source to C++ that clang compiles: kernels and their parameters, `threadgroup` variables, `host_name` instantiations.

The source is preprocessed. Only what C++ cannot express is rewritten; line numbers stay. What is not understood is a SyntaxError,
never a guess.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# In the order of msl::Source in include/msl/entry.h, after kBuffer.
ATTRIBUTES = (
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
    "threads_per_threadgroup",
    "threads_per_grid",
    "threadgroups_per_grid",
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "threads_per_simdgroup",
)
SCALAR_ATTRIBUTES = ATTRIBUTES[6:]
MAX_BUFFERS = 31
BUFFER = 0


@dataclass(frozen=True)
class Parameter:
    source: int  # BUFFER, or 1 + index in ATTRIBUTES
    buffer: int  # -1 unless a buffer


@dataclass(frozen=True)
class Function:
    """A function with the `kernel` qualifier, as it stands in the source."""

    name: str
    parameters: tuple[Parameter, ...]
    max_threads: str  # the expression of its attribute, or 0
    is_template: bool
    body: tuple[int, int]  # from its opening brace to the one that closes it


@dataclass(frozen=True)
class Kernel:
    """What can be called: a kernel function, or a named instantiation of a template."""

    name: str
    expression: str  # the function in C++
    function: Function


def strip_comments(source: str) -> str:
    """Comments become blanks; string literals stay."""
    token = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
    return token.sub(lambda m: m[0] if m[0][0] == '"' else re.sub(r"[^\n]", " ", m[0]), source)


MARKER = re.compile(r'#\s*(\d+)\s+"[^"\n]*"[ \t\d]*\n')


def line_of(source: str, at: int) -> int:
    """The line of a position, by the preprocessor's last marker before it."""
    line, start = 1, 0
    for m in MARKER.finditer(source, 0, at):
        line, start = int(m[1]), m.end()
    return line + source.count("\n", start, at)


class SourceError(SyntaxError):
    """What is wrong at a position of the source."""

    def __init__(self, source: str, at: int, problem: str) -> None:
        super().__init__(f"line {line_of(source, at)}: {problem}")
        self.at, self.problem = at, problem


def closing(source: str, at: int) -> int:
    """The position of the bracket that closes the one at `at`."""
    opening = source[at]
    end = {"(": ")", "{": "}", "[": "]", "<": ">"}[opening]
    depth = 0
    for i in range(at, len(source)):
        depth += (source[i] == opening) - (source[i] == end)
        if depth == 0:
            return i
    raise SourceError(source, at, f"{opening} is never closed")


def split_arguments(text: str) -> list[str]:
    """Parts between commas that no bracket encloses."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{<") - (c in ")]}>")
        if c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]] if text[start:].strip() else parts


def parse_parameters(source: str, begin: int, end: int, name: str) -> tuple[Parameter, ...]:
    parameters, used, free = [], set[int](), 0
    for text in split_arguments(source[begin:end]):
        found = re.findall(r"\[\[\s*(\w+)\s*(?:\(\s*(\w+)\s*\))?\s*\]\]", text)
        if len(found) > 1:
            raise SourceError(source, begin, f"kernel {name}: one attribute per parameter, got {text.strip()!r}")
        attribute, argument = found[0] if found else ("buffer", "")
        if attribute in ATTRIBUTES:
            if attribute in SCALAR_ATTRIBUTES and not re.search(r"\b(uint|ushort|uint32_t|uint16_t)\b", text):
                raise SourceError(source, begin, f"kernel {name}: [[{attribute}]] is a scalar, ushort or uint")
            parameters.append(Parameter(1 + ATTRIBUTES.index(attribute), -1))
            continue
        if attribute != "buffer":
            raise SourceError(source, begin, f"kernel {name}: attribute [[{attribute}]] is unknown or cannot be set through torch.mps")
        if argument and not argument.isdigit():
            raise SourceError(source, begin, f"kernel {name}: write the buffer index as a number, got {argument}")
        index = int(argument) if argument else free
        if index >= MAX_BUFFERS or index in used:
            problem = "used twice" if index in used else f"beyond {MAX_BUFFERS - 1}"
            raise SourceError(source, begin, f"kernel {name}: buffer index {index} is {problem}")
        used.add(index)
        free = index + 1
        parameters.append(Parameter(BUFFER, index))
    return tuple(parameters)


LIMIT = re.compile(r"\[\[\s*max_total_threads_per_threadgroup\s*\((.*?)\)\s*\]\]", re.S)
KERNEL = re.compile(r"(?:\[\[\s*kernel\s*\]\]|(?<![\w])kernel\b)(?P<attributes>(?:\s*\[\[[^\]]*\]\])*)\s*void\s+(?P<name>\w+)\s*\(")


def kernel_functions(source: str) -> dict[str, Function]:
    functions = {}
    for m in KERNEL.finditer(source):
        name, head = m["name"], source[: m.start()].rstrip()
        end = closing(source, m.end() - 1)
        brace = re.compile(r"\s*\{").match(source, end + 1)
        if brace is None:
            raise SourceError(source, m.start(), f"kernel {name} has no body")
        if name in functions:
            raise SourceError(source, m.start(), f"kernel {name} is defined twice: kernels cannot be overloaded")
        before = re.search(r"(\[\[[^\[\]]*\]\]\s*)+$", head)
        limit = LIMIT.search((before[0] if before else "") + m["attributes"])
        is_template = re.search(r"\btemplate\s*<[^;{}]*>$", head[: before.start()].rstrip() if before else head) is not None
        parameters = parse_parameters(source, m.end(), end, name)
        body = (brace.end() - 1, closing(source, brace.end() - 1))
        functions[name] = Function(name, parameters, limit[1] if limit else "0", is_template, body)
    return functions


INSTANTIATION = re.compile(r'template\s*\[\[\s*host_name\s*\(\s*(?P<name>"[^"]+"(?:\s*"[^"]+")*)\s*\)\s*\]\]\s*(?P<declaration>[^;]*);')


def instantiations(source: str, functions: dict[str, Function]) -> list[Kernel]:
    kernels = []
    for m in INSTANTIATION.finditer(source):
        call = re.search(r"\b(\w+)\s*<[^;()]*?>\s*(?=\(|$)", m["declaration"].strip())
        if call is None or call[1] not in functions:
            raise SourceError(source, m.start(), f"instantiation {m['name']} names no kernel template")
        name = "".join(re.findall(r'"([^"]+)"', m["name"]))
        kernels.append(Kernel(name, call[0].strip(), functions[call[1]]))
    return kernels


# `threadgroup float a[8], b;` in statement position; what has a * or & is a pointer or reference and stays.
VARIABLE = re.compile(r"(?:^|(?<=[;{}\n]))(?P<space>[ \t]*)threadgroup\s+(?P<declaration>[^;{}()]*);")
DECLARATOR = re.compile(r"\s*(?P<name>\w+)\s*(?P<dimensions>(?:\[[^\[\]]*\]\s*)*)")
TYPE = re.compile(r"(?P<type>(?:struct\s+)?[\w:]+(?:\s*<[^;]*?>)?)(?=\s+\w+\s*(?:\[|,|$))")


def is_pointer(declaration: str) -> bool:
    return re.search(r"[*&]", re.sub(r"\[[^\]]*\]", "", declaration)) is not None


def rewrite_variables(source: str, begin: int, end: int) -> str:
    """source[begin:end], the body of a kernel, with its threadgroup variables as MSL_THREADGROUP (include/msl/entry.h)."""

    def replace(m: re.Match[str]) -> str:
        declaration = " ".join(m["declaration"].split())
        if is_pointer(declaration):
            return m[0]
        kind = TYPE.match(declaration)
        declarators = [DECLARATOR.fullmatch(text) for text in split_arguments(declaration[kind.end() :])] if kind else [None]
        if kind is None or None in declarators:
            raise SourceError(source, begin + m.end(), f"threadgroup declaration not understood: {declaration}")
        variables = [f"MSL_THREADGROUP({d['name']}, {d['dimensions'].strip()}, {kind['type']})" for d in declarators if d]
        return m["space"] + " ".join(variables) + "\n" * m["declaration"].count("\n")

    return VARIABLE.sub(replace, source[begin:end])


LOOP_PRAGMA = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+(?:clang[ \t]+loop|unroll|nounroll)[^\n]*", re.M)  # costs compile time only
ATTRIBUTE = re.compile(rf"\[\[\s*(?:kernel|buffer|{'|'.join(ATTRIBUTES)})\b[^\]]*\]\]")


def require_ascii(source: str) -> None:
    for i, c in enumerate(source):
        if ord(c) > 127:
            raise SyntaxError(f"line {source.count(chr(10), 0, i) + 1}: torch.mps takes ASCII only, got {c!r}")


def blank(m: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", m[0])


def translate(source: str) -> tuple[str, list[Kernel]]:
    """Preprocessed source to C++, and its kernels in the order of their entry points."""
    text = strip_comments(source)
    functions = kernel_functions(text)
    kernels = [Kernel(f.name, f.name, f) for f in functions.values() if not f.is_template] + instantiations(text, functions)
    if len({k.name for k in kernels}) != len(kernels):
        raise SyntaxError("two kernels have the same name")
    text = LOOP_PRAGMA.sub(blank, INSTANTIATION.sub(blank, text))
    for function in sorted(functions.values(), key=lambda f: -f.body[0]):  # back to front, so that positions stay right
        begin, end = function.body[0] + 1, function.body[1]
        text = f"{text[:begin]} MSL_KERNEL_BEGIN({function.max_threads});{rewrite_variables(text, begin, end)}{text[end:]}"
    for m in VARIABLE.finditer(text):
        if not is_pointer(m["declaration"]):
            raise SourceError(text, m.end(), "threadgroup variables are declared in kernel functions only")
    return ATTRIBUTE.sub("", LIMIT.sub("", text)), kernels


def entry_points(kernels: list[Kernel]) -> str:
    lines = ['extern "C" {']
    for i, kernel in enumerate(kernels):
        parameters = kernel.function.parameters
        table = ", ".join(f"{{msl::Source({p.source}), {p.buffer}}}" for p in parameters)
        lines += [
            f"void msl_entry_{i}(void** buffers) {{",
            f"  static const msl::Parameter parameters[] = {{{table or '{}'}}};",
            f"  msl::call(&{kernel.expression}, parameters, buffers);",
            "}",
            f"void msl_describe_{i}(msl::BufferType* types) {{ msl::describe(&{kernel.expression}, types); }}",
        ]
    return "\n".join([*lines, "}", ""])

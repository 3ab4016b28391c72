"""``python -m mori_ops``: what this build holds, and the operator x device table of the README."""

import mori_ops


def table() -> str:
    """Markdown: which operators have a kernel for which device, asked of the dispatcher."""
    kernels = mori_ops.kernels()
    devices = list(next(iter(kernels.values())))
    lines = ["| op | " + " | ".join(devices) + " |", "|---|" + "---|" * len(devices)]
    lines += [f"| `{op}` | " + " | ".join("yes" if on[device] else "–" for device in devices) + " |" for op, on in kernels.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(f"mori_ops, backends {mori_ops.build_info['backends']}, built against torch {mori_ops.build_info['torch']}\n")
    print(table())

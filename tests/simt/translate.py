"""Makes C++ of CUDA sources, for the emulation in this folder: no GPU and no CUDA is needed.

Three things of CUDA are no C++: launches, shared memory, and PTX (loads, stores, the clock).
"""

import pathlib
import re

# A kernel has few blocks here, so that its loops over what is left are gone through.
MAX_BLOCKS = 4


def translate(text: str) -> str:
    """Returns the C++ of a CUDA source or header.

    Raises:
      ValueError: something is left that is not known here.
    """
    text = re.sub(
        r"(\w+<[^<>;]*>)\s*<<<(\w+), (\w+), 0, (\w+)>>>\((\w+)\)",
        r"simt::Launch([=] { \1(\5); }, \2, \3, \4)",
        text,
    )
    text = re.sub(
        r"__shared__ (\w+) (\w+)((?:\[\w+\])+);",
        r"using Shared_\2 = \1\3; auto& \2 = *static_cast<Shared_\2*>"
        r'(simt::Shared("\2", sizeof(Shared_\2)));',
        text,
    )
    text = re.sub(
        r'asm volatile\("ld\.volatile\.global\.v4\.u32.*?\);',
        "simt::Yield(); words = *static_cast<const uint4*>(at);",
        text,
        flags=re.S,
    )
    text = re.sub(
        r'asm volatile\("st\.volatile\.global\.v4\.u32.*?\);',
        "*static_cast<uint4*>(at) = words;",
        text,
        flags=re.S,
    )
    text = re.sub(
        r'asm volatile\("mov\.u64 %0, %%globaltimer;".*?\);', "now = simt::Clock();", text
    )
    text = re.sub(r"kMaxBlocks = \d+", f"kMaxBlocks = {MAX_BLOCKS}", text)
    left = re.search(r"<<<|__shared__|\basm\b", text)
    if left:
        raise ValueError(f"{left.group()!r} is not known to the emulation")
    return text


def translate_tree(root: pathlib.Path, names: list[str], into: pathlib.Path) -> list[pathlib.Path]:
    """Translates sources and all headers of ``cuda/``; returns the C++ sources.

    Args:
      root: of the repository.
      names: the sources, relative to it.
      into: the folder to write to, to be searched for headers before ``root``.
    """
    headers = [
        path for suffix in ("h", "cuh") for path in (root / "cuda/comm").rglob(f"*.{suffix}")
    ]
    sources = [root / name for name in names]
    written = []
    for path in (*headers, *sources):
        target = into / path.relative_to(root)
        if path.suffix == ".cu":
            target = target.with_suffix(".cc")
            written.append(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(translate(path.read_text()))
    return written

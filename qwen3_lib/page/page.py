"""Pages of one HTML file: styles, programs and licences within it, arrays as base64, the source with its lines."""
from __future__ import annotations

import ast
import base64
import hashlib
import json
import struct
import zlib
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

PAGE = Path(__file__).resolve().with_name("page.html")


def pack(array: np.ndarray, dtype: str) -> dict[str, Any]:
    """An array for the page's program: its shape, "f2" or "f4", and little-endian numbers in base64."""
    limit = np.finfo(dtype).max
    data = np.clip(array, -limit, limit).astype("<" + dtype).tobytes()
    return {"shape": list(array.shape), "dtype": dtype, "data": base64.b64encode(data).decode("ascii")}


def png(grey: np.ndarray) -> bytes:
    """A PNG file of uint8 [height, width], 0 is black: Pillow isn't needed. Source: ISO/IEC 15948."""
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">2I5B", *grey.shape[::-1], 8, 0, 0, 0, 0)  # 8 bits, grey
    rows = np.pad(grey, ((0, 0), (1, 0))).tobytes()  # a 0 before each row: no filter
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        chunk(*part) for part in ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")))


def lines_of_functions(source: str) -> dict[str, list[int]]:
    """Name -> [first line, last line] of each function, class and method ("Cache.attend") of a module."""
    lines = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            lines[node.name] = [node.lineno, node.end_lineno or node.lineno]
            for inner in node.body:
                if isinstance(node, ast.ClassDef) and isinstance(inner, ast.FunctionDef):
                    lines[f"{node.name}.{inner.name}"] = [inner.lineno, inner.end_lineno or inner.lineno]
    return lines


def html(contents: dict[str, Any]) -> str:
    """The page on the inside of a model. It can load nothing and run only its own programs, whatever its texts contain.

    The texts are one JSON value whose "<" are escaped, and the program puts them into the page as text.
    """
    text = json.dumps(contents, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return joined(PAGE, {"CONTENTS": text}, "; img-src data:")[0]


def joined(page: Path, values: dict[str, str], rules: str = "") -> tuple[str, str]:
    """(a page, its content security policy). The page's file names values and files beside it, as @@NAME@@.

    The policy allows the styles and the programs by their hashes, and else what `rules` add. @@POLICY@@ stands for it.
    """
    pieces = page.read_text("utf-8").split("@@")  # text, name, text, name, ..., text
    files = {name: (page.parent / name).read_text("utf-8") for name in pieces[1::2] if name not in {*values, "POLICY"}}
    styles, programs = ([text for name, text in files.items() if name.endswith(end)] for end in (".css", ".js"))
    policy = (f"default-src 'none'; style-src {hashes(*styles)}; script-src {hashes(*programs)}; base-uri 'none'; "
              f"form-action 'none'{rules}")
    licences = {name: escape(text, quote=False) for name, text in files.items() if not name.endswith((".css", ".js"))}
    shown = files | licences | values | {"POLICY": policy}
    return "".join(shown[piece] if i % 2 else piece for i, piece in enumerate(pieces)), policy


def hashes(*texts: str) -> str:
    """The hashes of styles or programs, as a content security policy names them."""
    digests = [hashlib.sha256(text.encode("utf-8")).digest() for text in texts]
    return " ".join(f"'sha256-{base64.b64encode(digest).decode('ascii')}'" for digest in digests)

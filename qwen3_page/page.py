"""One HTML file: arrays as base64, the source with its lines, and the page's own style and program within it."""
from __future__ import annotations

import ast
import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

ROOM = Path(__file__).resolve().parent


def pack(array: np.ndarray, dtype: str) -> dict[str, Any]:
    """An array for the page's program: its shape, "f2" or "f4", and little-endian numbers in base64."""
    limit = np.finfo(dtype).max
    data = np.clip(array, -limit, limit).astype("<" + dtype).tobytes()
    return {"shape": list(array.shape), "dtype": dtype, "data": base64.b64encode(data).decode("ascii")}


def lines_of_functions(source: str) -> dict[str, list[int]]:
    """Name -> [first line, last line] of each function, class and method ("KVCache.append") of a module."""
    lines = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            lines[node.name] = [node.lineno, node.end_lineno or node.lineno]
            for inner in node.body:
                if isinstance(node, ast.ClassDef) and isinstance(inner, ast.FunctionDef):
                    lines[f"{node.name}.{inner.name}"] = [inner.lineno, inner.end_lineno or inner.lineno]
    return lines


def html(contents: dict[str, Any]) -> str:
    """The page. It can load nothing and run only its own program, whatever its texts contain.

    The texts are one JSON value whose "<" are escaped, and the program puts them into the page as text. The content
    security policy allows the style and the program by their hashes, and nothing else.
    """
    parts = {name: (ROOM / name).read_text("utf-8") for name in ("page.html", "page.css", "page.js")}
    policy = (f"default-src 'none'; style-src '{sha256(parts['page.css'])}'; script-src '{sha256(parts['page.js'])}'; "
              "base-uri 'none'; form-action 'none'")
    values = {"POLICY": policy, "STYLE": parts["page.css"], "PROGRAM": parts["page.js"],
              "CONTENTS": json.dumps(contents, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")}
    pieces = parts["page.html"].split("@@")  # text, name, text, name, ..., text
    return "".join(values[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def sha256(text: str) -> str:
    """The hash of a style or a program, as a content security policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")

"""How numba translates kernels to LLVM's language: compile.py then optimizes all of them at once.

By default numba lets LLVM check, link and optimize each function with all that it calls, and makes machine code of it:
half of its time. Passes that kernels don't need, and the count of who uses an array, are left out, too.

It saves 3 s of the first answer after an installation: 4.2 s in place of 7.5 on two cores of a Zen 5, and 4.8 s of CPU
time in place of 7.4 (with NUMBA_OPT=0 in both).
"""
from collections.abc import Iterator
from typing import Any

from numba.core import typed_passes, untyped_passes
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import PassManager

PASSES = (untyped_passes.TranslateByteCode, untyped_passes.FixupArgs, untyped_passes.IRProcessing,
          untyped_passes.GenericRewrites, untyped_passes.ReconstructSSA, typed_passes.NopythonTypeInference,
          typed_passes.PreLowerStripPhis, typed_passes.NativeLowering, typed_passes.NoPythonBackend)


class Library(JITCodeLibrary):
    """A function in LLVM's language, with the libraries of the functions that it calls."""

    def __init__(self, codegen: Any, name: str) -> None:
        super().__init__(codegen, name)
        self.modules, self.libraries = list[Any](), list[JITCodeLibrary]()

    def add_ir_module(self, ir_module: Any) -> None:
        self.modules.append(ir_module)

    def add_linking_library(self, library: JITCodeLibrary) -> None:
        self.libraries.append(library)

    def get_pointer_to_function(self, name: str) -> int:
        """No machine code yet."""
        return 0

    @property
    def codegen(self) -> Any:
        """What numba asks to set a function's environment, which only Python objects need."""
        return self

    def set_env(self, name: str, environment: Any) -> None:
        pass

    def finalize(self) -> None:
        """Only for functions of numba's own compiler that call this one, as tests do."""
        for module in self.modules:
            super().add_ir_module(module)
        for library in self.libraries:
            super().add_linking_library(library)
        super().finalize()

    def texts(self, known: set[Any]) -> Iterator[str]:
        """The modules of this library and of those it needs, without known ones; a caller is before its functions."""
        yield from map(str, self.modules)
        for library in self.libraries:
            if library not in known:
                known.add(library)
                yield from library.texts(known) if isinstance(library, Library) else [library.get_llvm_str()]


class Translator(CompilerBase):
    """numba's compiler for kernels."""

    def __init__(self, typing: Any, target: Any, library: Any, args: Any, return_type: Any, flags: Any,
                 locals: Any) -> None:
        flags.nrt = False
        super().__init__(typing, target, Library(target.codegen(), "kernel"), args, return_type, flags, locals)

    def define_pipelines(self) -> list[PassManager]:
        manager = PassManager("kernels")
        for each in PASSES:
            manager.add_pass(each, each.__name__)
        manager.finalize()
        return [manager]

"""What the bridge uses of torch's compiler, all of it private and untyped, and source text for it.

The compiler reads source text, so functions and classes that telegrad writes have one, kept in
`linecache`. Types stand in it as names bound to `Exactly(type)`, which the annotation hook
understands: a type that torch has made cannot always be written as an annotation.
"""

from __future__ import annotations

import itertools
import linecache
import sys
import threading
import types
from typing import Any

import torch
import torch._jit_internal
import torch._sources
import torch.jit._builtins
import torch.jit._recursive
import torch.jit._script
import torch.jit._state
import torch.jit.annotations
import torch.jit.frontend
from torch.futures import Future

core: Any = torch._C
jit_annotations: Any = torch.jit.annotations
builtins: Any = torch.jit._builtins
fake_range: Any = torch._sources.fake_range
frontend: Any = torch.jit.frontend
internal: Any = torch._jit_internal
library: Any = torch.library
recursive: Any = torch.jit._recursive
script: Any = torch.jit._script
state: Any = torch.jit._state


PREFIX = "telegrad_script_"
"""How the names of these modules begin."""

_numbers = itertools.count()
generating = threading.RLock()
"""One thread compiles: torch's compiler is not safe for more. Whoever takes another lock takes it
inside of this one."""


class Exactly:
    """As an annotation: this very type."""

    def __init__(self, type_: Any) -> None:
        self.type = type_


def module_of(source: str, module_name: str | None = None, /, **names: Any) -> Any:
    """A module with the given source, in which `names` are known.

    Args:
        module_name: by default one of its own, that begins with `PREFIX`.
    """
    name = f"{PREFIX}{next(_numbers)}" if module_name is None else module_name
    module = types.ModuleType(name)
    file = f"<{name}>"
    module.__dict__.update(torch=torch, Any=Any, Future=Future, __file__=file, **names)
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    sys.modules[name] = module  # where the compiler looks for the source
    exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
    return module


def compiled(thing: Any) -> Any:
    """The TorchScript function of a function; the script type of a class."""
    # torch.jit.script does just this, and warns of its deprecation each time.
    if isinstance(thing, type):
        resolve = internal.createResolutionCallbackForClassMethods(thing)
        script._script_impl(thing, _rcb=resolve)
        return state._get_script_class(thing)
    return script._script_impl(thing)

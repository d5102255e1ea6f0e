"""What the bridge uses of torch's compiler: all of it private, and none of it typed."""

from __future__ import annotations

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

__all__ = [
    "builtins",
    "core",
    "fake_range",
    "frontend",
    "internal",
    "jit_annotations",
    "library",
    "recursive",
    "script",
    "state",
]

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

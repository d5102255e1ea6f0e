"""`compat_program`, with every function of torch's own RPC and autograd made to fail, in this
process and in each that it starts: a spawned child runs this file again."""

import sys
import types

import torch

from telegrad import install


def poisoned(name):
    def fail(*args, **kwargs):
        raise SystemExit(f"torch's own {name} was called")

    return fail


def poison():
    for extension in (torch._C._distributed_rpc, torch._C._distributed_autograd):
        for name, value in list(vars(extension).items()):
            if isinstance(value, type):
                try:
                    value.__init__ = poisoned(name)
                except TypeError:
                    continue  # enumerations and the like
            elif callable(value):
                setattr(extension, name, poisoned(name))
    for name in ("_rpc_init", "_dist_autograd_init", "_faulty_agent_init"):
        setattr(torch._C, name, poisoned(name))
    for module in list(sys.modules.values()):
        if "torch/distributed/rpc/" in (getattr(module, "__file__", None) or ""):
            for name, value in list(vars(module).items()):
                if isinstance(value, types.FunctionType):
                    setattr(module, name, poisoned(name))


if __name__ == "__main__":
    install()
poison()

if __name__ == "__main__":
    import compat_program

    compat_program.main()

"""telegrad inside TorchScript: calls, references, gradients; without any C++.

TorchScript's compiler knows torch's own RPC: operators of the interpreter, and a reference type
that only torch's C++ can make values of. Neither can be reached from outside, but everything around
them can, so a function that uses telegrad is compiled like this:

1. `marking` marks, in the syntax tree, calls of telegrad's functions and futures that come from
   Python. The marks are names that no program can write.
2. The compiler takes a marked call for one of torch's RPC. So it checks the arguments against the
   signature of the called function, and says what is wrong in its own words.
3. `hooks` replaces the marked operators of the finished graph by telegrad's (`operators`).
4. `RRef[T]` is a class written in TorchScript, made for each `T` (`references`).

Calls that bear no mark are left alone: they are torch's own. So nothing changes for a program that
uses torch's RPC, or none, and nothing has to be undone when `uninstall()` gives torch's modules
their names back. `telegrad.compat.compilers` loads all of this when something is first compiled.

`threads` says what a function written in TorchScript sees of the autograd context, and `at_exit`
how it ends with the process.
"""

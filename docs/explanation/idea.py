"""Distributed autograd in 100 lines: the idea of telegrad, over pipes.

A call of a function in another process becomes two nodes in the caller's own autograd graph, joined
by an empty tensor, the token:

    arguments ── Collect ── token ── Post ── results

`loss.backward()` runs torch's engine, which comes to `Post` first: it sends the gradients of the
results to the other process and does not wait. `Collect` waits for the gradients of the arguments.
Its sequence number 0 tells the engine to run it only when nothing else is ready, so all remote
parts of a pass run side by side.

The other process keeps what came with a call and what it returned. When gradients come, torch's
engine runs there between the two; parameters on the way get theirs in `.grad`, where they live.

That is all: each graph has an edge wherever there is a dependency, so torch's engine is the
distributed engine. What telegrad adds is everything else: nesting, failures, references, second
derivatives, speed, security. Run it: `python idea.py`.
"""

import multiprocessing
import pickle
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.autograd import Function


class Worker:
    """A process that runs functions, one at a time."""

    def __init__(self):
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._line = ThreadPoolExecutor(1)  # one message and its answer after the other

    def call(self, fn, *args):
        """`fn(*args)` there, for a function that returns a tensor."""
        inputs = [a for a in args if torch.is_tensor(a) and a.requires_grad]
        call = {"worker": self}
        token = Collect.apply(call, *inputs, torch.ones((), requires_grad=True))
        token.grad_fn._set_sequence_nr(0)
        bare = [(a.detach(), a.requires_grad) if torch.is_tensor(a) else (a, False) for a in args]
        call["number"], result = self.ask("call", fn, bare).result()
        return Post.apply(call, result, token) if result.requires_grad else result

    def ask(self, *message):
        """The answer, as a future. It ends with the process: reading raises EOFError then."""
        return self._line.submit(self._exchange, message)

    def _exchange(self, message):
        self._pipe.send_bytes(pickle.dumps(message))
        is_fine, value = pickle.loads(self._pipe.recv_bytes())
        if not is_fine:
            raise value
        return value

    def close(self):
        self._pipe.close()
        self._process.join()
        self._process.close()
        self._line.shutdown()


class Collect(Function):
    @staticmethod
    def forward(ctx, call, *inputs):
        ctx.call = call
        return torch.empty(0)

    @staticmethod
    def backward(ctx, _):
        return None, *ctx.call["gradients"].result(), None


class Post(Function):
    @staticmethod
    def forward(ctx, call, result, token):
        ctx.call = call
        return result.detach()

    @staticmethod
    def backward(ctx, gradient):
        call = ctx.call
        call["gradients"] = call["worker"].ask("backward", call["number"], gradient)
        return None, None, torch.empty(0)


def _serve(pipe):
    calls = {}
    while True:
        try:
            kind, *message = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = True, {"call": _run, "backward": _run_back}[kind](calls, *message)
        except Exception as error:  # noqa: BLE001 - it is raised at the caller
            answer = False, error
        pipe.send_bytes(pickle.dumps(answer))


def _run(calls, fn, args):
    args = [a.requires_grad_() if needs_grad else a for a, needs_grad in args]
    result = fn(*args)
    number = len(calls)
    calls[number] = [a for a in args if torch.is_tensor(a) and a.requires_grad], result
    return number, result.detach().requires_grad_(result.requires_grad)


def _run_back(calls, number, gradient):
    inputs, result = calls[number]
    calls[number] = None  # as at home: the graph is freed
    result.backward(gradient)
    return [tensor.grad for tensor in inputs]


if __name__ == "__main__":
    left, right = Worker(), Worker()
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    loss = (left.call(torch.sin, x) * right.call(torch.exp, x)).sum()
    loss.backward()
    print(x.grad, "is", x.detach().exp() * (x.detach().cos() + x.detach().sin()))
    left.close()
    right.close()

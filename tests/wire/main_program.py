"""A script whose definitions go to workers by value: run as `__main__` by test_definitions."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import io
import json
import sys
import threading
import traceback
from concurrent import futures

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import telegrad
from telegrad import rpc

scale = 2.0
table = {}
settings = {"rate": 1}
weight = torch.ones(2)


def call(worker, func, *args, **kwargs):
    return rpc.rpc_sync(worker, func, args=args, kwargs=kwargs)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor

    def scaled(self):
        return Batch(self.x * scale)


class Base(nn.Module):
    made = 0

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        Base.made += 1


class Blocks(Base):
    def forward(self, x):
        return F.relu(self.linear(x))

    @classmethod
    def square(cls, width):
        return cls(width)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


class Colour(enum.Enum):
    RED = 1


class OwnError(Exception):
    pass


Point = collections.namedtuple("Point", "x y")


def same(x):
    return x


def is_batch(value):
    return isinstance(value, Batch)


def class_id(value):
    return id(type(value))


def pass_on(worker, func, *args):
    return call(worker, func, *args)


def check_an_instance_is_of_one_class_there_and_of_the_own_class_here():
    batch = Batch(torch.ones(2))
    methods = dict(vars(Batch))
    assert call("a", is_batch, batch)
    assert call("a", class_id, batch) == call("a", class_id, Batch(torch.zeros(1)))
    assert type(call("a", same, batch)) is Batch
    assert type(call("a", Batch, torch.ones(1))) is Batch
    assert all(vars(Batch)[name] is value for name, value in methods.items())
    assert Batch.scaled.__globals__ is globals()


def check_a_class_is_the_same_by_way_of_another_worker():
    batch = Batch(torch.ones(2))
    assert call("a", pass_on, "b", is_batch, batch)
    assert call("a", pass_on, "b", class_id, batch) == call("b", class_id, batch)
    assert type(call("a", pass_on, "b", same, batch)) is Batch


def check_a_module_of_this_script_is_made_there():
    model = call("a", Blocks, 3)
    assert type(model) is Blocks
    assert isinstance(model, Base)
    assert model(torch.ones(3)).shape == (3,)
    assert type(call("a", Blocks.square, 2)) is Blocks


def count_made():
    Blocks(1)
    return Base.made


def check_attributes_of_a_class_stay_there_between_calls():
    made = Base.made
    first = call("b", count_made)
    assert call("b", count_made) == first + 1
    assert Base.made == made


def check_an_enum_a_namedtuple_and_an_exception_come_back_as_they_are():
    assert call("a", same, Colour.RED) is Colour.RED
    assert type(call("a", same, Point(1, 2))) is Point
    with pytest.raises(OwnError) as caught:
        call("a", fail)
    assert caught.value.args == (Colour.RED,)


def fail():
    raise OwnError(Colour.RED)


def factorial(n):
    return 1 if n == 0 else n * factorial(n - 1)


def is_even(n):
    return n == 0 or is_odd(n - 1)


def is_odd(n):
    return n != 0 and is_even(n - 1)


def check_functions_that_call_themselves_and_each_other():
    assert call("a", factorial, 5) == 120
    assert call("a", is_even, 10)


def check_a_function_that_comes_back_is_the_own_one():
    assert call("a", same, factorial) is factorial


def put(key, value):
    table[key] = value


def get(key):
    return table[key]


def check_functions_share_what_they_keep_in_global_variables_there():
    call("a", put, "key", 5)
    assert call("a", get, "key") == 5
    assert table == {}


def rate():
    return settings["rate"]


def check_a_global_variable_that_changes_here_changes_there():
    global scale
    batch = Batch(torch.ones(2))
    assert call("a", Batch.scaled, batch).x.tolist() == [2, 2]
    scale = 3.0
    assert call("a", Batch.scaled, batch).x.tolist() == [3, 3]
    assert call("a", rate) == 1
    settings["rate"] = 7
    assert call("a", rate) == 7


class Settings:
    rate = 1


in_fields, in_array, in_module = Settings(), np.ones(2), torch.nn.Linear(1, 1, bias=False)


def sizes():
    return in_fields.rate, in_array.sum().item(), in_module.weight.item()


def check_what_changes_inside_of_a_global_variable_changes_there():
    for number in (2.0, 3.0):
        in_fields.rate = number
        in_array.fill(number)
        torch.nn.init.constant_(in_module.weight, number)
        assert call("a", sizes) == (number, 2 * number, number)


def weighed(x):
    return (weight * x).tolist()


def check_a_tensor_that_changes_in_place_changes_there():
    assert call("a", weighed, 2) == [2, 2]
    weight.add_(1)
    assert call("a", weighed, 2) == [4, 4]


def count(calls=[]):  # noqa: B006
    calls.append(1)
    return len(calls)


def check_defaults_stay_there_between_calls():
    assert [call("a", count), call("a", count), count()] == [1, 2, 1]


@torch.no_grad()
def without_grad(x):
    return (x * scale).requires_grad


def check_decorated_functions_partials_and_bound_methods():
    assert call("a", without_grad, torch.ones(1, requires_grad=True)) is False
    assert call("a", functools.partial(pow, 2), 5) == 32
    assert call("a", Batch(torch.ones(1)).scaled).x.item() == scale


@functools.lru_cache(maxsize=3)
def remembered(x):
    return x + scale


class Keeper:
    @functools.cache  # noqa: B019
    def twice(self, x):
        return 2 * x


def check_functions_with_a_cache():
    assert call("a", remembered, 1) == 1 + scale
    assert call("a", Keeper().twice, 4) == 8
    assert call("a", Keeper).twice(5) == 10


handles = {}


def use_handle():
    return handles["x"].to_here().tolist()


def check_references_in_global_variables():
    handles["x"] = rpc.remote("b", torch.ones, args=(2,))
    assert call("a", use_handle) == [1, 1]
    handles["x"] = rpc.remote("b", torch.zeros, args=(2,))
    assert call("a", use_handle) == [0, 0]
    handles.clear()


group = None


def use_group():
    return group.names


def check_a_function_may_use_the_names_of_the_workers():
    assert call("a", use_group) == ("a", "b")


lock = threading.Lock()


def use_lock():
    return lock


def check_what_cannot_be_sent_is_named():
    with pytest.raises(telegrad.TelegradError, match="func global 'lock'"):
        call("a", use_lock)


def check_closures_and_lambdas():
    z = torch.ones(2)
    assert call("a", lambda x: (x + z * scale).tolist(), 1) == [1 + scale] * 2
    assert [call("a", lambda x: x + scale, i) for i in range(3)] == [i + scale for i in range(3)]
    assert [call("a", lambda x, i=i: x + i, 1) for i in range(3)] == [1, 2, 3]


def square_and_differentiate(x):
    x.requires_grad_()
    Square.apply(x).backward()
    return x.grad


def check_an_autograd_function():
    assert call("a", square_and_differentiate, torch.tensor(3.0)).item() == 6.0


def save_and_load():
    file = io.BytesIO()
    torch.save(Blocks(2), file)
    file.seek(0)
    return type(torch.load(file, weights_only=False)) is Blocks


def check_torch_save_there_finds_the_class_by_its_name():
    assert call("b", save_and_load)


def greet():
    return "old"


def check_what_is_defined_anew_is_sent_anew():
    global greet, Batch
    former, old = Batch, Batch(torch.ones(1))
    assert call("a", greet) == "old"

    def greet():
        return "new"

    greet.__qualname__ = "greet"
    assert call("a", greet) == "new"

    class Batch:
        pass

    Batch.__qualname__ = "Batch"
    assert call("a", is_batch, Batch())
    assert not call("a", is_batch, old)
    assert type(call("a", same, old)) is former
    Batch = former


def scaled_twice(self):
    return Batch(self.x * 2 * scale)


def check_a_method_that_is_exchanged_is_sent_anew():
    batch = Batch(torch.ones(1))
    former = Batch.scaled
    there = call("a", class_id, batch)
    Batch.scaled = scaled_twice
    assert call("a", lambda batch: batch.scaled().x.item(), batch) == 2 * scale
    Batch.scaled = former
    assert call("a", lambda batch: batch.scaled().x.item(), batch) == scale
    assert call("a", class_id, batch) == there


class Fresh:
    def __init__(self):
        super().__init__()


def check_many_first_uses_at_once_make_one_class():
    with futures.ThreadPoolExecutor(8) as pool:
        called = [pool.submit(call, "b", class_id, Fresh()) for _ in range(32)]
        assert len({future.result() for future in called}) == 1


class Hooked:
    hook = staticmethod(same)


def hook_of(value):
    return value.hook


def check_an_attribute_that_becomes_none_is_sent_anew():
    Hooked.hook = functools.partial(same, 1)
    assert call("a", hook_of, Hooked()) is not None
    Hooked.hook = None
    assert call("a", hook_of, Hooked()) is None


class Left:
    def other(self):
        return Right()


class Right:
    kind = Left


def check_classes_that_refer_to_each_other():
    assert type(call("a", Left().other)) is Right
    assert call("a", same, Right).kind is Left


def check_an_exec_namespace_is_like_a_notebook():
    space = {"__name__": "__main__"}
    exec("offset = 1\ndef add(x): return x + offset\nclass Cell: pass", space)
    assert call("b", space["add"], 1) == 2
    exec("offset = 5", space)
    assert call("b", space["add"], 1) == 6
    assert type(call("b", same, space["Cell"]())) is space["Cell"]


CHECKS = [name for name in list(globals()) if name.startswith("check_")]


if __name__ == "__main__":
    outcomes = {}
    with telegrad.workers("a", "b") as group:
        for name in CHECKS:
            try:
                globals()[name]()
                outcomes[name] = ""
            except BaseException:
                outcomes[name] = traceback.format_exc()
    json.dump(outcomes, sys.stdout)

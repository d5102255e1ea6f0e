"""A function is named by where every process finds it, or not at all."""

from __future__ import annotations

import functools
import gc
import math
import operator
import sys
import types
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from telegrad.errors import SerializationError
from telegrad.wire.function_names import function_named, name_of


def here() -> None: ...


class Owner:
    def method(self) -> None: ...

    @staticmethod
    def static() -> None: ...

    @classmethod
    def made(cls) -> None: ...

    class Inner:
        pass


NAMED = [
    here,
    Owner,
    Owner.Inner,
    Owner.method,
    Owner.static,
    Owner.made,
    len,
    dict,
    str.upper,
    math.sqrt,
    operator.add,
    functools.reduce,
    torch.add,
    torch.relu,
    torch.randn,
    torch.tensor,
    torch.matmul,
    torch.einsum,
    torch.linalg.norm,
    torch.fft.fft,
    torch.special.erf,
    torch.nn.functional.linear,
    torch.nn.functional.max_pool2d,
    torch.nn.functional.softmax,
    torch.Tensor,
    torch.Tensor.add,
    torch.Tensor.add_,
    torch.Tensor.__add__,
    torch.Tensor.backward,
    torch.ops.aten.add,
    torch.ops.aten.add.Tensor,
    torch.ops.aten.relu.default,
    nn.Linear,
    nn.Embedding.from_pretrained,
]


@pytest.mark.parametrize("func", NAMED, ids=str)
def test_what_can_be_imported_is_named_and_found_again(func: Any) -> None:
    name = name_of(func)
    assert name is not None
    assert function_named(name) == func
    assert name_of(func) == name


def test_a_name_is_module_and_qualified_name() -> None:
    assert name_of(Owner.static) == f"{__name__}\0Owner.static".encode()


def closure() -> Any:
    def inner() -> None: ...

    return inner


@pytest.mark.parametrize(
    "func",
    [lambda: None, closure(), functools.partial(len), Owner().method, [].append, Owner(), 3, None],
    ids=repr,
)
def test_what_cannot_be_imported_has_no_name(func: Any) -> None:
    assert name_of(func) is None


@pytest.fixture
def visiting(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("visiting_references")
    exec("def greet(): return 1", module.__dict__)
    monkeypatch.setitem(sys.modules, "visiting_references", module)
    return module


def test_a_name_bound_anew_no_longer_stands_for_the_old_function(
    visiting: types.ModuleType,
) -> None:
    old = visiting.greet
    name = name_of(old)
    assert name is not None
    assert function_named(name) is old
    exec("def greet(): return 2", visiting.__dict__)
    assert name_of(old) is None
    assert name_of(visiting.greet) == name
    assert function_named(name)() == 2


def test_naming_a_function_does_not_keep_it_alive(visiting: types.ModuleType) -> None:
    assert name_of(visiting.greet) is not None
    watch = weakref.ref(visiting.greet)
    del visiting.greet
    gc.collect()
    assert watch() is None


def test_a_module_is_imported_when_it_is_named() -> None:
    sys.modules.pop("colorsys", None)
    assert function_named(b"colorsys\0rgb_to_hsv")(0.0, 0.0, 0.0) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            b"no_such_module_x\0f",
            "module 'no_such_module_x' cannot be imported on the worker that is called",
        ),
        (b"math\0no_such", "the worker that is called has no 'no_such' in math"),
        (b"math\0sqrt.deeper", "has no 'sqrt.deeper' in math"),
        (b"math", "not the name of a function"),
        (b"\0x", "not the name of a function"),
        (b"", "not the name of a function"),
        (b"\xff\0x", "not the name of a function"),
    ],
)
def test_a_name_that_is_not_found_is_a_clear_error(name: bytes, message: str) -> None:
    with pytest.raises(SerializationError, match=message):
        function_named(name)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    @torch.jit.script
    def scripted(x: torch.Tensor) -> torch.Tensor:
        return x + 1


def test_script_functions_are_named_if_they_are_found_by_import() -> None:
    name = name_of(scripted)
    assert name is not None
    assert function_named(name) is scripted

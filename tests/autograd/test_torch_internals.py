"""What telegrad assumes about private names of torch: a torch that changes one fails here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

import telegrad.autograd
from telegrad.autograd import torch_internals as internals

PRIVATE = re.compile(
    r"torch\._|from torch\.\S* import _|next_id|\._(C|backward_cls|execution_engine|input_metadata"
    r"|use_count|backward_hooks|post_accumulate_grad_hooks|set_sequence_nr|default_pg)\b"
)


def leaf():
    return torch.ones(2, requires_grad=True)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def seen_in_backward(look):
    """What a function returns that is called during a backward pass."""
    x, seen = leaf(), []
    y = x * 2
    y.register_hook(lambda gradient: seen.append(look(y.grad_fn)))
    y.sum().backward()
    return seen[0]


def test_no_other_module_uses_private_names():
    for path in Path(telegrad.autograd.__file__).parent.rglob("*.py"):
        if path.name != "torch_internals.py":
            for number, line in enumerate(path.read_text().splitlines(), 1):
                assert not PRIVATE.search(line), f"{path}:{number}: {line}"


def test_the_node_of_a_leaf():
    x = leaf()
    node = get_gradient_edge(x).node
    assert type(node) is internals.AccumulateGrad
    assert node.variable is x
    assert not node.next_functions


def test_the_nodes_of_a_python_function():
    y = Twice.apply(leaf())
    assert type(y.grad_fn) is internals.node_type_of(Twice)
    assert issubclass(internals.node_type_of(Twice), internals.PythonNode)
    assert not isinstance((leaf() * 2).grad_fn, internals.PythonNode)


def test_the_engine_runs_the_apply_of_a_node_type():
    node_type = internals.node_type_of(type("Own", (Twice,), {}))
    node_type.apply = lambda node, gradient: gradient * 100
    x = leaf()
    y = internals.apply_of(node_type._forward_cls)(x)
    y.sum().backward()
    assert x.grad.tolist() == [100.0] * 2


def test_a_function_is_applied_without_the_steps_for_transforms():
    x = leaf()
    internals.apply_of(Twice)(x).sum().backward()
    assert x.grad.tolist() == [2.0] * 2


def test_every_way_to_register_a_hook_on_a_python_node():
    node_type = internals.node_type_of(Twice)
    named = {name for name in dir(node_type) if "register" in name}
    assert named - {"_register_hook"} == set(internals.REGISTER_HOOK)
    assert isinstance(vars(torch.autograd.function._HookMixin)["_register_hook"], staticmethod)


def test_a_hook_on_an_output_is_registered_by_its_node():
    registered = []
    node_type = internals.node_type_of(type("Own", (Twice,), {}))
    node_type._register_hook_dict = lambda node, tensor: registered.append(tensor)
    y = internals.apply_of(node_type._forward_cls)(leaf())
    y.register_hook(lambda gradient: None)
    assert registered[0] is y


def test_the_node_of_a_checkpoint():
    y = checkpoint(torch.sin, leaf(), use_reentrant=True)
    assert type(y.grad_fn) is internals.CheckpointNode
    assert y.grad_fn.run_function is torch.sin


def test_every_future_has_one_base():
    assert isinstance(torch.futures.Future(), internals.Future)
    assert isinstance(torch.futures.Future().then(len), internals.Future)


def test_the_hook_on_several_tensors_is_known_by_its_name():
    x, y = leaf() * 1, leaf() * 1
    handle = register_multi_grad_hook((x, y), lambda gradients: None)
    for tensor in (x, y):
        (hook,) = tensor._backward_hooks.values()
        assert hook.__qualname__.startswith(internals.COUNTING_HOOK)
    handle.remove()


def test_what_enters_a_node_is_known():
    (metadata,) = internals.input_metadata((leaf() * 2).grad_fn)
    assert tuple(metadata.shape) == (2,)
    assert metadata.dtype is torch.float32


def test_of_ready_nodes_the_highest_number_runs_first():
    x, order = leaf(), []
    products = [x * n for n in (2, 3)]
    products.append(Twice.apply(x))
    for number, product in enumerate(products):
        internals.set_sequence_number(product.grad_fn, number)
        product.grad_fn.register_hook(lambda *_, number=number: order.append(number))
    torch.stack(products).sum().backward()
    assert order == [2, 1, 0]


def test_a_delayed_error_is_an_identity_until_it_runs():
    y = internals.delayed_error("not this way")(leaf())
    assert y.tolist() == [1.0] * 2
    assert [type(node) for node, _ in y.grad_fn.next_functions] == [internals.AccumulateGrad]
    with pytest.raises(RuntimeError, match="not this way"):
        y.sum().backward()


def test_the_hooks_of_a_tensor():
    x = leaf()
    assert not internals.has_tensor_hooks(x)
    assert not internals.has_post_accumulate_hooks(x)
    x.register_hook(lambda gradient: None)
    handle = x.register_post_accumulate_grad_hook(len)
    assert internals.has_tensor_hooks(x)
    assert internals.has_post_accumulate_hooks(x)
    assert [*internals.post_accumulate_hooks(x).values()] == [len]
    handle.remove()
    assert not internals.post_accumulate_hooks(x)


def test_the_hooks_of_a_tensor_may_be_kept_in_a_dictionary_of_ours():
    x, seen = leaf(), []
    y = x * 2
    internals.set_tensor_hooks(y, lambda hooks: {0: seen.append})
    y.grad_fn._register_hook_dict(y)
    y.sum().backward()
    assert [gradient.tolist() for gradient in seen] == [[1.0] * 2]


@pytest.mark.parametrize(
    "register",
    [
        lambda x: x.register_hook(len),
        lambda x: get_gradient_edge(x).node.register_hook(len),
        lambda x: get_gradient_edge(x).node.register_prehook(len),
        lambda x: x.register_post_accumulate_grad_hook(len),
    ],
)
def test_every_registration_of_a_hook_is_counted(register):
    before = internals.hooks_ever_registered()
    register(leaf())
    assert internals.hooks_ever_registered() > before


def test_the_engine_as_it_is_called():
    x = leaf()
    y = (x * 2).sum()
    edge = get_gradient_edge(x)
    roots = (get_gradient_edge(y), internals.IDLE_ROOT)
    gradients = (torch.tensor(3.0), torch.zeros(()))
    found = internals.run_backward(roots, gradients, True, False, (edge,), True, False)
    assert [gradient.tolist() for gradient in found] == [[6.0] * 2]
    assert x.grad is None
    internals.run_backward(roots, gradients, False, False, (), True, True)
    assert x.grad.tolist() == [6.0] * 2
    with pytest.raises(RuntimeError, match="second time"):
        internals.run_backward(roots, gradients, False, False, (), True, True)


def test_a_backward_pass_has_a_number():
    assert internals.current_task() == -1
    assert seen_in_backward(lambda node: internals.current_task()) >= 0


def test_the_engine_says_what_it_will_run():
    other = (leaf() * 2).grad_fn
    assert seen_in_backward(
        lambda node: (internals.will_run(node.next_functions[0][0]), internals.will_run(other))
    ) == (True, False)


def test_the_engine_says_whether_it_keeps_the_graph():
    assert seen_in_backward(lambda node: internals.keeps_graph()) is False


def test_a_callback_runs_at_the_end_of_the_pass():
    order = []
    seen_in_backward(
        lambda node: internals.queue_callback(lambda: order.append("end")) or order.append("hook")
    )
    assert order == ["hook", "end"]


def test_the_modes_of_a_thread():
    assert not internals.is_profiler_enabled()
    with torch.profiler.profile():
        assert internals.is_profiler_enabled()
    assert not internals.is_any_autocast_enabled()
    with torch.autocast("cpu"):
        assert internals.is_any_autocast_enabled()
    assert not internals.are_transforms_active()
    assert torch.func.vmap(lambda x: x + internals.are_transforms_active())(torch.zeros(1)) == 1
    internals.set_grad_enabled(False)
    assert not torch.is_grad_enabled()
    internals.set_grad_enabled(True)
    assert torch.is_grad_enabled()


def test_torchs_thread_local_objects():
    key = "telegrad.test"
    assert not internals.is_in_torch(key)
    internals.stash_in_torch(key, "value")
    assert internals.is_in_torch(key)
    assert internals.get_from_torch(key) == "value"
    internals.remove_from_torch(key)
    assert not internals.is_in_torch(key)


def test_dense_tensors():
    assert internals.is_dense(torch.ones(2, 3).T)
    assert not internals.is_dense(torch.ones(2, 3)[:, 0])
    assert not internals.is_dense(torch.ones(1).expand(3))


def test_owners_of_a_tensor_are_counted():
    x = torch.ones(2)
    assert internals.use_count(x) == 1
    y = (x.requires_grad_() * x).sum()  # saves it
    assert internals.use_count(x) > 1
    del y


def test_a_default_group_is_noticed(tmp_path):
    assert not internals.has_default_group()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert internals.has_default_group()
    finally:
        torch.distributed.destroy_process_group()
    assert not internals.has_default_group()

"""The agent that loses and delays messages, and own backends: in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


PREAMBLE = """
        import tempfile, telegrad
        telegrad.install()
        import torch, torch.distributed.rpc as rpc
        import torch.distributed.rpc._testing
        place = f"file://{tempfile.mktemp()}"
"""


def test_a_lost_creation_is_told_at_once():
    run(
        PREAMBLE
        + """
        backend = rpc.backend_registry.BackendType["FAULTY_TENSORPIPE"]
        options = rpc.backend_registry.construct_rpc_backend_options(
            backend, init_method=place, num_worker_threads=2, num_fail_sends=3,
            messages_to_fail=["SCRIPT_REMOTE_CALL"], messages_to_delay={})
        rpc.init_rpc("worker0", backend=backend, rank=0, world_size=1, rpc_backend_options=options)
        rref = rpc.remote("worker0", torch.add, args=(torch.ones(1), 1))
        try:
            rref.to_here()
        except RuntimeError as error:
            assert "RRef creation" in str(error)
        else:
            raise AssertionError("not lost")
        del rref
        rpc.shutdown()
        """
    )


def test_a_programs_own_pickler_packs_its_calls():
    run(
        PREAMBLE
        + """
        from torch.distributed.rpc.internal import _InternalRPCPickler

        class Counting(_InternalRPCPickler):
            calls = 0
            def serialize(self, obj):
                Counting.calls += 1
                return super().serialize(obj)

        options = rpc.TensorPipeRpcBackendOptions(init_method=place)
        rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
        with rpc.api._use_rpc_pickler(Counting()):
            assert rpc.rpc_sync("worker0", torch.add, (torch.ones(2), 1)).tolist() == [2, 2]
            assert rpc.rpc_async("worker0", max, (1, 2)).wait() == 2
            assert rpc.remote("worker0", max, (3, 2)).to_here() == 3
        assert Counting.calls == 3
        rpc.shutdown()
        """
    )


def test_reducers_registered_while_it_runs_are_used():
    run(
        PREAMBLE
        + """
        from torch.distributed.rpc.internal import _internal_rpc_pickler

        class Handle:
            def __reduce__(self):
                raise TypeError("a handle of this process")

        options = rpc.TensorPipeRpcBackendOptions(init_method=place)
        rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
        _internal_rpc_pickler._register_reducer(Handle, lambda handle: (str, ("reduced",)))
        assert rpc.rpc_sync("worker0", list, ([Handle()],)) == ["reduced"]
        rpc.shutdown()
        """
    )


def test_own_backends_are_started_with_what_they_take():
    run(
        PREAMBLE
        + """
        class Options(rpc.RpcBackendOptions):
            pass

        class Agent:
            def get_worker_infos(self):
                return [rpc.WorkerInfo("alone", 0)]
            def shutdown(self):
                self.is_shut = True

        started = []
        def start(**given):
            started.append(given)
            return Agent()

        rpc.backend_registry.register_backend("OWN", lambda t, m, **k: Options(t, m), start)
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=Options(5, place))
        assert started[0]["name"] == "alone" and started[0]["world_size"] == 1
        agent = rpc.api._get_current_rpc_agent()
        assert isinstance(agent, Agent)
        rpc.shutdown(graceful=False)
        assert agent.is_shut and not rpc.api._is_current_rpc_agent_set()
        """
    )


def test_device_maps_are_checked_with_torchs_words():
    run(
        PREAMBLE
        + """
        options = rpc.TensorPipeRpcBackendOptions(init_method=place)
        try:
            options.set_device_map("worker1", {"cuda:0": "cuda:1", "cuda:1": "cuda:1"})
        except ValueError as error:
            assert "only supports 1-to-1 mapping" in str(error)
        else:
            raise AssertionError("two to one")
        try:
            options.set_devices(["cpu"])
        except ValueError as error:
            assert "expect a list of CUDA devices" in str(error)
        else:
            raise AssertionError("cpu")
        options.set_device_map("nobody", {"cuda:0": "cuda:1"})
        try:
            rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
        except ValueError as error:
            assert "Node worker0 has invalid target node names in its device maps" in str(error)
        else:
            raise AssertionError("nobody")
        assert not rpc.api._is_current_rpc_agent_set()
        """
    )

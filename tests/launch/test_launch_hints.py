"""What `telegrad run` says of common mistakes, and what it does not show."""

from __future__ import annotations

import os
import signal
import textwrap

from launching import telegrad


def write(tmp_path, code):
    (tmp_path / "script.py").write_text(textwrap.dedent(code))


def run(tmp_path, *arguments):
    with telegrad("run", *arguments, cwd=tmp_path) as launched:
        code = launched.end()
        return code, launched.out.decode(), launched.err.decode()


LEFT_EARLY = "worker 1 had ended before, with exit code 0, while others still needed it."


def test_a_worker_that_leaves_without_shutdown_is_named(tmp_path):
    write(
        tmp_path,
        """
        import os, sys, torch
        import telegrad.rpc as rpc
        rpc.init_rpc(f"worker{os.environ['RANK']}")
        if os.environ["RANK"] == "0":
            there = rpc.rpc_sync("worker1", os.getpid)
            try:
                while True:
                    rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
            except ConnectionError:
                while os.path.exists(f"/proc/{there}"):
                    os.sched_yield()
                raise
        """,
    )
    code, _, err = run(tmp_path, "-n", "2", "script.py")
    assert code == 1
    assert LEFT_EARLY in err.splitlines()[-1]
    assert "rpc.shutdown(), which keeps it serving until all are done" in err


def test_so_is_one_that_never_joined(tmp_path):
    write(
        tmp_path,
        """
        import os, sys
        if os.environ["RANK"] == "1":
            sys.exit()
        import telegrad.rpc as rpc
        rpc.init_rpc("worker0", rpc_backend_options=rpc.RpcOptions(rpc_timeout=1))
        """,
    )
    code, _, err = run(tmp_path, "-n", "2", "script.py")
    assert code == 1
    assert "rank 1 of 2 did not join within 1 s" in err
    assert LEFT_EARLY in err.splitlines()[-1]


def test_a_count_after_the_script_is_noticed(tmp_path):
    write(tmp_path, "import os, sys; print(os.environ['WORLD_SIZE'], sys.argv[1:])")
    code, out, err = run(tmp_path, "script.py", "-n", "2")
    assert (code, out) == (0, "1 ['-n', '2']\n")
    assert "-n 2 stands after the program" in err
    assert "put it before: telegrad run -n 2 ..." in err
    code, out, err = run(tmp_path, "-n", "1", "script.py", "-n", "2")
    assert (code, out, err) == (0, "1 ['-n', '2']\n", "")


def test_ctrl_c_shows_no_traceback_of_a_worker_that_only_waits(tmp_path):
    write(
        tmp_path,
        """
        import os, signal, torch
        import telegrad.rpc as rpc
        signal.signal(signal.SIGINT, signal.default_int_handler)
        rank = os.environ["RANK"]
        rpc.init_rpc(f"worker{rank}")
        if rank == "0":
            rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
            print("working", flush=True)
            signal.pause()
        rpc.shutdown()
        """,
    )
    with telegrad("run", "-n", "2", "script.py", cwd=tmp_path) as launched:
        launched.expect(b"working")
        os.kill(launched.process.pid, signal.SIGINT)
        assert launched.end() == 130
        err = launched.err.decode()
    assert "[0] Traceback" in err
    assert "[1] Traceback" not in err

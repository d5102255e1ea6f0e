"""The tests of torch's suites that may fail on telegrad, each with its reason.

A run fails if a test outside of this list fails, and also if one in it passes.
"""

from __future__ import annotations

__all__ = ["EXPECTED_FAILURES"]

_REMOTE_EVENTS = (
    "it looks for what the callee did in the caller's profile: only torch's C++ can add remote "
    "events to one"
)
_NO_HANG = "it asserts that backward() hangs when a remote result is not used; telegrad's returns"

_LISTED: dict[str, dict[str, str]] = {
    _NO_HANG: {
        "DistAutogradTest": "test_backward_unused_send_function",
    },
    _REMOTE_EVENTS: {
        "RpcTest": """
            test_profiler_export_trace
            test_profiler_remote_events_profiled
            test_profiler_remote_events_profiled_single_threaded
            test_profiler_rpc_memory
            test_profiler_rpc_record_shapes
            test_profiler_with_async_rpc_builtin
            test_profiler_with_async_rpc_builtin_single_threaded
            test_profiler_with_async_rpc_udf
            test_profiler_with_async_rpc_udf_single_threaded
            test_profiler_with_autograd_context
            test_profiler_with_autograd_context_single_threaded
            test_profiler_with_remote_builtin
            test_profiler_with_remote_builtin_single_threaded
            test_profiler_with_remote_udf
            test_profiler_with_remote_udf_single_threaded
            test_profiler_with_script_async_rpc
            test_profiler_with_script_async_rpc_single_threaded
            test_profiler_with_script_remote_rpc
            test_profiler_with_script_remote_rpc_single_threaded
            test_profiler_with_script_sync_rpc
            test_profiler_with_script_sync_rpc_single_threaded
            test_profiler_with_sync_rpc_builtin
            test_profiler_with_sync_rpc_builtin_single_threaded
            test_profiler_with_sync_rpc_udf
            test_profiler_with_sync_rpc_udf_single_threaded
            test_rpc_profiling_async_function
            test_rpc_profiling_async_function_single_threaded
            test_rpc_profiling_remote_record_function
            test_server_process_global_profiler
        """,
        "JitRpcTest": """
            test_rpc_async_jit_profiled
            test_rpc_torchscript_record_function
        """,
    },
}

EXPECTED_FAILURES: dict[str, str] = {
    f"{suite}.{method}": reason
    for reason, suites in _LISTED.items()
    for suite, methods in suites.items()
    for method in methods.split()
}
"""Test name → why it may fail."""

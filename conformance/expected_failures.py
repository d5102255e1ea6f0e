"""The tests of torch's suites that may fail on telegrad, each with its reason.

A run fails if a test outside of this list fails, and also if one in it passes.
"""

from __future__ import annotations

__all__ = ["EXPECTED_FAILURES"]

_REMOTE_EVENTS = (
    "it looks for what the callee did in the caller's profile: only torch's C++ can add remote "
    "events to one"
)
_SCRIPT = "TorchScript cannot use telegrad yet: its operators and RRef type are torch's C++ RPC's"
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
    },
    _SCRIPT: {
        "DistAutogradTest": """
            test_trainer_ps_torchscript_functions
        """,
        "JitRpcTest": """
            test_all_kwargs_are_populated_by_defaults
            test_args_and_kwargs_contain_different_types
            test_args_kwargs_are_neither_passed
            test_async_function_remote
            test_async_function_remote_multi
            test_async_function_simple
            test_async_function_wrong_return_type
            test_async_function_wrong_return_type_remote
            test_call_python_function_remotely_from_script_not_supported
            test_call_rpc_with_profiling
            test_call_script_function_that_not_exists_remotely_from_script
            test_call_script_function_that_raises_remotely_from_script
            test_create_script_module_on_remote
            test_future_passed_between_python_and_jit
            test_kwargs_not_passed
            test_load_script_module_with_pickled_rref
            test_local_rref_local_value
            test_my_script_module_with_rrefs
            test_no_kwargs_are_populated_by_defaults
            test_record_function_on_caller_rpc_async
            test_remote_script_module
            test_return_local_script_class_rref_in_py_and_use_in_script
            test_return_local_script_module_rref_in_py_and_use_in_script
            test_rpc_async_jit_profiled
            test_rpc_torchscript_record_function
            test_rref_as_arg_and_return
            test_rref_is_owner
            test_rref_jit_pickle_not_supported
            test_rref_list_mutate
            test_rref_local_value
            test_rref_python_annotation
            test_some_kwargs_are_populated_by_defaults
            test_torchscript_function_exception
            test_torchscript_functions_not_supported
            test_user_rrefs_confirmed
            test_user_rrefs_confirmed_remote
        """,
        "JitDistAutogradTest": """
            test_dist_backward
            test_get_gradients
            test_jit_fork_within_context
            test_restore_context_after_swtich_to_jit_thread
        """,
        "JitFaultyAgentRpcTest": """
            test_remote_timeout_to_here_in_jit
            test_rref_timeout_pickle_in_jit
            test_rref_to_here_timeout_in_jit
            test_timeout_in_python
            test_timeout_in_torchscript_function
        """,
        "RemoteModuleTest": """
            test_forward_async
            test_forward_async_script
            test_forward_sync
            test_forward_sync_script
            test_remote_module_py_pickle_not_supported_script
        """,
        "ThreeWorkersRemoteModuleTest": """
            test_send_remote_module_over_the_wire_script_not_supported
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

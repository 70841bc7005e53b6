"""Stands in for SGLang's CUDA kernels on a CPU: the two index functions that it calls there, in torch; others raise."""

__version__ = "0.4.10"


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    """Write each request's new slots into its row of the table, `start` to `end`."""
    at = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = out_cache_loc[at : at + last - first].to(req_to_token.dtype)
        at += last - first


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    """The reverse: read them from the table."""
    at = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        out_cache_loc[at : at + last - first] = req_to_token[row, first:last].to(out_cache_loc.dtype)
        at += last - first


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is not in the stand-in for CPUs")

    return missing

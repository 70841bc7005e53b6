"""Run a user's functions in processes of their own: a call that hangs or crashes costs itself and nothing else.

`pool.py` belongs to the process of the run. Each worker process is started through `supervisor.py` and runs `worker.py`.
"""

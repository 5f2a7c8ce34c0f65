"""The planner: how long a round takes, how many servers to wait for, and why a round took as long
as it did (eqs. (7) and (8)).

`order_statistics` is the paper's analysis, `server_time` what one server needs, `round_time` what
becomes of it on a cloud, `plan` all B side by side, `pilots` the trade-off on a job of your own,
`explain` one round of a log.
"""

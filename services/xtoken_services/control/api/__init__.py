"""HTTP API of the control plane: routes by topic, and the models of requests and responses.

Read-only routes use the database, the supervisors' last status and the runs' files (`control.views`); they
send no request to a worker or a queue.
"""

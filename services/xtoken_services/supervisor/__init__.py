"""The supervisor: starts, watches, restarts and kills the processes of a run, without HTTP and without a database.

Modules, lowest first: `os_process` identifies and kills processes, `launchers` start them on this machine or on a Ray
cluster, `orphan_reaper` kills them if the supervisor dies. `process_spec` lists the processes of a run, `process_group`
restarts those that belong together, `queue_monitor` and `node_groups` read what the queues report. `supervisor` joins
them into one run, whose result and record are in `run_record` and whose events go to an observer (`events`).
`run` adds what is prepared before there are processes, and the clean-up, `store_build` a store's build, `local_run`
the terminal (`progress`, `interrupts`). No module here imports torch.
"""

"""The control plane: how a run's processes are started, watched, restarted and stopped, and who may ask for it.

Layers, lowest first: `launcher` starts and signals processes, `fleet` says which ones a run has, `policy` how often one
may fail, `observer` what the queue tells, `supervisor` joins them into one run; `runs` keeps all runs of a control
plane, `app` serves them over HTTP, `client` and `watch` are its user's side. No module here imports torch.
"""

"""The control plane: how a run's processes are started, watched, restarted and stopped, and who may ask for it.

Layers, lowest first: `launcher` starts, signals and finds processes, `fleet` says which ones a run has, `policy` how
often one may fail, `observer` what the queue tells, `supervisor` joins them into one run and writes its diary to
`journal`; `adoption` looks what an earlier control plane has left, `run` is one run's life, `runs` keeps them all, with
the database `store` and the rules of `validator`. `views` is what readers see, `api` and `app` serve it over HTTP
behind `access`; `client`, `cli` and `watch` are the user's side. No module here imports torch.
"""

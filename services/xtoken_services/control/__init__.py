"""Control plane: a FastAPI application that starts, monitors, stops and resumes runs, on top of the supervisor.

From the bottom up: `store` is the database, `db_events` writes a supervisor's events to it, `recovery` finds the
processes of runs again after a restart, `run` is one supervised run and `runs` all of them. `views` gives read-only
access to them; `api` and `web` are the routes, `auth` the middleware, `app` the application, `serve` the server and
`client` its client. `isolated` reads another user's files in child processes. No module imports torch.
"""
